"""train.py with a fault built in, for tests: `python tests/faults/hooked.py FLAGS`, or by torchrun.

HOOK_SLOW_SAVE: seconds that a checkpoint stays a temporary file before it is renamed.
HOOK_SLOW_EVAL: seconds that the last rank's evaluation takes longer than the others'.
HOOK_RAISE: "STEP:RANK:MARKER" raises there once; MARKER is a file that then exists.
HOOK_WANDB_S: the longest waits for wandb, in seconds.
HOOK_STORE_S: the longest wait for torchrun's store, in seconds.
HOOK_COUNT: folder in which each rank leaves how many updates it made.
"""

import atexit
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402

import model  # noqa: E402
import rove.distributed  # noqa: E402
import rove.files  # noqa: E402
import rove.metrics  # noqa: E402
import train  # noqa: E402

RANK = os.environ.get("RANK", "0")


def slow_save(seconds):
    fsync = rove.files.os.fsync

    def slowly(descriptor):
        if "step_" in os.readlink(f"/proc/self/fd/{descriptor}"):
            time.sleep(seconds)
        fsync(descriptor)

    rove.files.os.fsync = slowly


def slow_evaluation(seconds):
    evaluate = train.evaluate

    def slowly(*arguments):
        if str(int(os.environ["WORLD_SIZE"]) - 1) == RANK:
            time.sleep(seconds)
        return evaluate(*arguments)

    train.evaluate = slowly


def raise_once(step, rank, marker):
    forward, seen = model.GPT.forward, {"step": 0}

    def failing(self, idx, targets=None, pos_offset=0):
        if targets is not None:
            seen["step"] += 1
            if (str(seen["step"]), RANK) == (step, rank) and not Path(marker).exists():
                Path(marker).touch()
                raise RuntimeError(f"a fault on rank {rank} in step {step}")
        return forward(self, idx, targets, pos_offset)

    model.GPT.forward = failing


def count_updates(folder):
    updates = []
    register_optimizer_step_post_hook(lambda *_: updates.append(1))
    atexit.register(lambda: Path(folder, RANK).write_text(str(len(updates))))


if __name__ == "__main__":
    if seconds := os.environ.get("HOOK_SLOW_SAVE"):
        slow_save(float(seconds))
    if seconds := os.environ.get("HOOK_SLOW_EVAL"):
        slow_evaluation(float(seconds))
    if fault := os.environ.get("HOOK_RAISE"):
        raise_once(*fault.split(":", 2))
    if seconds := os.environ.get("HOOK_WANDB_S"):
        rove.metrics.INIT_S = rove.metrics.FINISH_S = float(seconds)
    if seconds := os.environ.get("HOOK_STORE_S"):
        rove.distributed.STORE_TIMEOUT = timedelta(seconds=float(seconds))
    if folder := os.environ.get("HOOK_COUNT"):
        count_updates(folder)
    train.main(sys.argv[1:])
