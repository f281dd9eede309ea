#!/usr/bin/env bash
# Check and time one GPU in at most eight minutes: full JSON into OUT, a short table last.
#
#   bench/gpu.sh OUT [--peer DIR]      DIR: a checkout of nanoGPT
#   bench/gpu.sh OUT --dry_run         the same steps at sizes that say nothing, on any machine
#
# Exit code 1 when a check or a step fails; a step that no time is left for is named in the table.
set -uo pipefail
usage="usage: bench/gpu.sh OUT [--peer DIR] [--dry_run]"
stop() { echo "error: $1; $usage" >&2; exit 2; }
out= peer=() dry=
while [ $# -gt 0 ]; do
    case $1 in
        --peer) [ -f "${2:-}/model.py" ] || stop "--peer ${2:-}: has no model.py"
                peer=(--peer "$(realpath "$2")"); shift 2 ;;
        --dry_run) dry=yes; shift ;;
        -*) stop "unknown flag $1" ;;
        *) [ -z "$out" ] || stop "one OUT only, got $out and $1"; out=$1; shift ;;
    esac
done
[ -n "$out" ] || stop "no OUT given"
mkdir -p "$out" 2>/dev/null && [ -w "$out" ] || stop "$out: cannot be written"
out=$(realpath "$out")
[ -z "$(ls -A "$out")" ] || stop "$out: holds something; name a new folder"
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=python3
small="--n_layer 12 --n_head 12 --n_embd 768" large="--n_layer 24 --n_head 16 --n_embd 1024"
context=1024 small_batches="16 32" large_batches="8 16" repeats=10 length=16384 checks= budget_s=470
if [ -n "$dry" ]; then
    small="--n_layer 1 --n_head 2 --n_embd 32" large="--n_layer 2 --n_head 2 --n_embd 32"
    context=32 small_batches="1 2" large_batches="1" repeats=2 length=64 budget_s=3600
    checks="--length 32 --n_layer 1 --n_embd 64"
fi

failed=0
run() {  # run NAME COMMAND...: keep what it prints; go on when it fails or its time is over
    local name=$1 left=$((budget_s - SECONDS))
    shift
    if [ $left -lt 20 ]; then
        echo "no time was left" > "$out/$name.log"
        return
    fi
    echo "== $name, after $SECONDS s"
    timeout $left "$@" --out "$out/$name.json" > "$out/$name.log" 2>&1
    local code=$?
    [ $code -ne 124 ] || echo "time ran out after $left s" >> "$out/$name.log"
    if [ $code -ne 0 ] || [ ! -s "$out/$name.json" ]; then
        echo "FAILED ($code): $name, see $out/$name.log"
        failed=1
    fi
    tail -n 14 "$out/$name.log"
}
step() {  # step NAME SIZES BATCH
    run "$1_$3" "$python" bench/train_step.py $2 --block_size $context --batch_size "$3" \
        --repeats $repeats "${peer[@]}"
}

run checks "$python" bench/device_checks.py $checks
step step_124m "$small" "${small_batches%% *}"
step step_354m "$large" "${large_batches%% *}"
run generate "$python" bench/generate.py $small --prompt_tokens $((context / 2)) \
    --new_tokens 32 "${peer[@]}"
run eval_16k "$python" bench/eval_memory.py $small --length $length --device auto
for batch in ${small_batches#* }; do step step_124m "$small" "$batch"; done
[ "${large_batches#* }" = "$large_batches" ] || step step_354m "$large" "${large_batches#* }"
"$python" bench/table.py "$out" || failed=1
exit $failed
