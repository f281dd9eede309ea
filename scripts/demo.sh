#!/usr/bin/env bash
# RoPE against RoVE on the standard library's text: prepare, train both side by side, perplexity in
# four modes, one table, samples. What is done already is reused; `rm -rf out/demo-*` starts anew.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
data=data/stdlib-byte
export OMP_NUM_THREADS=1  # two processes, one core each

both() {  # run "$@ MODE" for rope and rove at once; fail if either fails
    "$@" rope & local first=$!
    "$@" rove & local second=$!
    wait $first && wait $second
}
train() {
    "$python" train.py --config configs/demo.yaml --data.dir "$data" --model.pos_mode "$1" \
        --out_dir "out/demo-$1" --train.resume auto 2>&1 | sed -u "s/^/[$1] /"
}
evaluate() {
    local mode
    for mode in "$1" "$1+yarn"; do
        local result="out/demo-$1/eval/perplexity_packed_$mode.json"
        if [ "$result" -nt "out/demo-$1/checkpoints/latest.json" ] &&
            grep -q '"tokens": 131072,*$' "$result" && grep -q '"length": 2048' "$result"; then
            continue
        fi
        "$python" eval.py perplexity --checkpoint "out/demo-$1" --data "$data" --pos_mode "$mode" \
            --lengths 64,128,256,512,1024,2048 --max_tokens 131072 2>&1 | sed -u "s/^/[$mode] /"
    done
}

"$python" prepare_fineweb.py --source python-stdlib --tokenizer byte --out_dir "$data"
both train
both evaluate
for mode in rope rove; do
    echo
    echo "[$mode] a sample, prompt 'def main('"
    "$python" sample.py --checkpoint "out/demo-$mode" --prompt 'def main(' --max_new_tokens 200
done
echo
"$python" report.py out/demo-rope out/demo-rove --out out/demo
