"""A documented command with fewer processes and flags that make it small: `python small.py WORDS`.

Commands that differ from others by the model's scale alone end at once where they only measure.
"""

import os
import re
import sys

SMALL = {
    "train.py": "--model.n_layer 4 --model.n_head 8 --model.n_embd 32 --model.block_size 64 "
    "--train.max_steps 6 --train.tokens_per_step 512 --train.micro_batch_size 4 "
    "--optim.warmup_steps 2 --train.eval_tokens 2048 --train.eval_interval 3 "
    "--train.checkpoint_interval 3 --train.compile false --train.device cpu",
    "perplexity": "--lengths 32,64,128 --max_tokens 2048 --device cpu",
    "ruler": "--lengths 384 --num_samples 2 --device cpu",
    "core": "--device cpu",
    "structure": "--length 8",
    "sample.py": "--max_new_tokens 5 --device cpu",
}
PREPARE = """
import sys, prepare_fineweb
from rove.prepare import sources
sources.FINEWEB_VAL_TOKENS = 40000
prepare_fineweb.main(sys.argv[1:])
"""


def small(words):
    """Return the words of a command that does the same at a small size."""
    words = [re.sub(r"--nproc_per_node=\d+", "--nproc_per_node=2", word) for word in words]
    if words[0] == "torchrun":
        words[:1] = [sys.executable, "-m", "torch.distributed.run"]
    elif words[1] == "prepare_fineweb.py":
        words[:2] = [sys.executable, "-c", PREPARE]
    else:
        words[0] = sys.executable
    kinds = [word for word in words if word in SMALL]
    if "ruler" in kinds and "--samples" not in words and "--tasks" not in words:
        words += ["--tasks", "niah_single_2,qa_1" if "--essay" in words else "niah_single_1,vt"]
    return words + (SMALL[kinds[-1]].split() if kinds else [])


if __name__ == "__main__":
    command = small(sys.argv[1:])
    skipped = os.environ.get("SKIPPED_SCALE", "no scale")
    if skipped in " ".join(command) and "--checkpoint" in command:
        raise SystemExit(0)
    os.execv(command[0], command)
