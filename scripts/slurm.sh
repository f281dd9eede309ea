#!/usr/bin/env bash
# Train on several nodes under Slurm; goes on by itself after pre-emption or the time limit.
#
#   sbatch --nodes=2 --gpus-per-node=8 scripts/slurm.sh \
#       --config configs/gpt2_354m.yaml --model.pos_mode rove --out_dir out/354m-rove
#
# One torchrun per node; they meet at the first node (c10d rendezvous). Ten minutes before the time
# limit Slurm sends SIGUSR1 to every torchrun, which passes it on; all ranks stop after the same
# step, save and exit, and the job is queued again with the same command. The folder of the run
# must be on a disk that all nodes share.
#SBATCH --job-name=rove
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -uo pipefail

nodes=${SLURM_JOB_NUM_NODES:-1}
gpus=${SLURM_GPUS_ON_NODE:-1}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
log=slurm-$SLURM_JOB_ID.log
seen=$(wc -l < "$log" 2>/dev/null || echo 0)  # what earlier starts of this job have written

# A save of the 354M state takes seconds (bench/checkpoint.py); 300 s leave room for a slow disk.
# Before torch 2.12 torchrun passes SIGTERM on, not SIGUSR1, and waits for 30 s.
patience=()
if .venv/bin/torchrun --help | grep -e --shutdown-timeout > /dev/null; then
    patience=(--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout=300)
fi
srun --kill-on-bad-exit=1 .venv/bin/torchrun \
    --nnodes="$nodes" --nproc_per_node="$gpus" --max-restarts=3 \
    --rdzv_id="$SLURM_JOB_ID" --rdzv_backend=c10d --rdzv_endpoint="$head:$port" \
    "${patience[@]}" \
    train.py --train.resume auto "$@"
code=$?

# torchrun's own exit code does not tell a signal from a fault, the run's last words do. A fault is
# not tried again; a run that a signal stopped before its last step is.
if [ $code -ne 0 ] && tail -n +$((seen + 1)) "$log" | grep "stopped by signal" > /dev/null; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
