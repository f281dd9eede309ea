#!/usr/bin/env bash
# RoPE against RoVE on the standard library's text: prepare, train both side by side, perplexity in
# every mode, samples, and a report with tables and plots. What is done already is reused;
# `rm -rf out/demo-*` starts anew.
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
measured() {  # whether every mode of $1 has a result of protocol $2 that is newer than its weights
    local mode result
    for mode in "$1" "$1+yarn"; do
        result="out/demo-$1/eval/perplexity_$2_$mode.json"
        [ "$result" -nt "out/demo-$1/checkpoints/latest.json" ] || return 1
    done
}
evaluate() {
    local protocol
    for protocol in packed tail positions; do
        measured "$1" $protocol && continue
        "$python" eval.py perplexity --checkpoint "out/demo-$1" --data "$data" \
            --pos_mode "$1,$1+yarn" --yarn_values yarn,orig --protocol $protocol \
            --lengths 64,128,256,512,1024,2048 2>&1 | sed -u "s/^/[$1] /"
    done
}

"$python" prepare_fineweb.py --source python-stdlib --tokenizer byte --out_dir "$data"
both train
both evaluate
for mode in rope rove; do
    echo
    echo "[$mode] a sample, prompt 'def main('"
    "$python" sample.py --checkpoint "out/demo-$mode" --prompt 'def main(' --max_new_tokens 200 \
        | tee "out/demo-$mode/samples.txt"
done
echo
"$python" report.py out/demo-rope out/demo-rove --out out/demo
