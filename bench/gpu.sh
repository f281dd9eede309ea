#!/usr/bin/env bash
# Check and time one GPU in at most eight minutes: full JSON into OUT, a short table last.
#
#   bench/gpu.sh OUT [--peer DIR]      DIR: a checkout of nanoGPT
#   bench/gpu.sh OUT --dry_run         the same steps at sizes that say nothing, on any machine
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=python3
out=${1:?usage: bench/gpu.sh OUT [--peer DIR] [--dry_run]}
shift
mkdir -p "$out"
peer=() dry=
while [ $# -gt 0 ]; do
    case $1 in
        --peer) peer=(--peer "$2"); shift 2 ;;
        --dry_run) dry=yes; shift ;;
        *) echo "error: unknown argument $1" >&2; exit 2 ;;
    esac
done
small="--n_layer 12 --n_head 12 --n_embd 768" large="--n_layer 24 --n_head 16 --n_embd 1024"
context=1024 batches="16 32 8" repeats=10 length=16384 checks=
if [ -n "$dry" ]; then
    small="--n_layer 1 --n_head 2 --n_embd 32" large="--n_layer 2 --n_head 2 --n_embd 32"
    context=32 batches="1 2" repeats=2 length=64 checks="--length 32 --n_layer 1 --n_embd 64"
fi

failed=0
run() {  # run NAME COMMAND...: keep what it prints, go on when it fails; nothing after 400 s
    local name=$1
    shift
    if [ -z "$dry" ] && [ $SECONDS -gt 400 ]; then
        echo "SKIPPED: $name, as $SECONDS s have passed"
        return
    fi
    echo "== $name, after $SECONDS s"
    if ! "$@" --out "$out/$name.json" > "$out/$name.log" 2>&1; then
        echo "FAILED: $name, see $out/$name.log"
        failed=1
    fi
    tail -n 12 "$out/$name.log"
}

run checks "$python" bench/device_checks.py $checks
run eval_16k "$python" bench/eval_memory.py $small --length $length --device auto
for batch in $batches; do
    run "step_124m_$batch" "$python" bench/train_step.py $small --block_size $context \
        --batch_size "$batch" --repeats $repeats "${peer[@]}"
    run "step_354m_$batch" "$python" bench/train_step.py $large --block_size $context \
        --batch_size "$batch" --repeats $repeats "${peer[@]}"
done
run generate "$python" bench/generate.py $small --prompt_tokens $((context / 2)) \
    --new_tokens 32 "${peer[@]}"
"$python" bench/table.py "$out"
exit $failed
