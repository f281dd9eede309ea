"""Measure the peak memory of `eval.py perplexity` at a long context, random weights of 124M.

    python bench/eval_memory.py --length 16384 --out eval_memory.json

The evaluation runs in a process of its own, from a checkpoint that is written for it (with its
optimizer's state, as training leaves it); the peak is that process's resident set.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from model import GPT, GPTConfig  # noqa: E402
from rove import checkpoint as ckpt  # noqa: E402
from rove import device as dev  # noqa: E402
from rove.config import load  # noqa: E402
from rove.files import write_json  # noqa: E402
from rove.optim import make_optimizer  # noqa: E402
from rove.shards import shard_header  # noqa: E402
from train import OptimConfig  # noqa: E402


@dataclass(frozen=True)
class Settings:
    n_layer: int = 12
    """transformer blocks"""
    n_head: int = 12
    """attention heads"""
    n_embd: int = 768
    """width"""
    length: int = 16384
    """tokens of the window"""
    device: dev.DeviceName = "cpu"
    """where to evaluate; the peak is that of the host's memory"""
    pos_mode: str = "rove+yarn"
    """position mode of the evaluation"""
    out: str | None = None
    """JSON file of the result"""


def write_run(folder: Path, s: Settings) -> None:
    """Write a checkpoint of random weights and a validation shard of random ids."""
    model = GPT(GPTConfig(n_layer=s.n_layer, n_head=s.n_head, n_embd=s.n_embd, pos_mode="rove"))
    optimizer = make_optimizer(model, OptimConfig())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    tokenizer = {"name": "gpt2", "vocab_size": 50257, "sha256": None, "eot_id": 50256}
    state = dict.fromkeys(ckpt.KEYS) | {"format": ckpt.FORMAT, "model": model.state_dict()}
    state |= {"optimizer": optimizer.state_dict(), "model_config": model.config.stored()}
    state |= {"tokenizer": tokenizer, "step": 0, "data": {"seed": 0}, "best_val_loss": 0.0}
    ckpt.save_checkpoint(folder / "run", state | {"scaler": {}}, False, keep=1)
    ids = np.random.default_rng(0).integers(0, 50257, s.length + 1).astype("<u2")
    (folder / "data").mkdir()
    (folder / "data/random_val_000000.bin").write_bytes(shard_header(ids.size) + ids.tobytes())


def main(argv: list[str]) -> None:
    """Print the peak in MiB and the time."""
    s = load(Settings, argv, prog="bench/eval_memory.py", description=__doc__)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # in a process of its own: a child's peak counts what its parent held when it was forked
        writer = multiprocessing.get_context("spawn").Process(target=write_run, args=(folder, s))
        writer.start()
        writer.join()
        command = [sys.executable, str(ROOT / "eval.py"), "perplexity", "--device", s.device]
        command += ["--checkpoint", str(folder / "run"), "--data", str(folder / "data")]
        command += ["--pos_mode", s.pos_mode, "--lengths", str(s.length)]
        command += ["--max_tokens", str(s.length), "--out", str(folder / "result.json")]
        start = time.perf_counter()
        process = subprocess.Popen(command)
        _, status, usage = os.wait4(process.pid, 0)
        seconds, peak = time.perf_counter() - start, usage.ru_maxrss / 1024
        if status:
            raise SystemExit(f"eval.py failed ({os.waitstatus_to_exitcode(status)})")
        nll = json.loads((folder / "result.json").read_text())["results"][0]["nll"]
    print(f"peak {peak:,.0f} MiB, {seconds:.0f} s, {s.length:,} tokens, nll {nll:.4f}")
    if s.out is not None:
        write_json(Path(s.out), {"peak_mib": peak, "seconds": seconds, "settings": vars(s)})
        print(f"wrote {s.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
