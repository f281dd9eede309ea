"""Measure the peak memory of `eval.py perplexity` at a long context, random weights of 124M.

    python bench/eval_memory.py --length 16384 --out eval_memory.json
    python bench/eval_memory.py --peer ../nanoGPT

The evaluation runs in a process of its own, from a checkpoint that is written for it (with its
optimizer's state, as training leaves it); the peak is that process's resident set. Its time has
what eval.py does beside: starting, reading the checkpoint and its hash, two passes of at most 1,024
tokens for its estimate of the cost. The peer's side is its model of that block size on the CPU,
made anew, and one forward pass with targets and no gradient.
"""

import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import timing  # noqa: E402

from model import GPT, GPTConfig, PosMode  # noqa: E402
from rove import checkpoint as ckpt  # noqa: E402
from rove import device as dev  # noqa: E402
from rove.config import load  # noqa: E402
from rove.errors import user_errors  # noqa: E402
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
    pos_mode: PosMode = "rove+yarn"
    """position mode of the evaluation"""
    peer: str | None = None
    """checkout of nanoGPT"""
    repeats: int = 1
    """evaluations of each side, in turns; medians count"""
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


def run_peer(peer: str, n_layer: int, n_head: int, n_embd: int, length: int) -> None:
    """Evaluate one window with nanoGPT's model on the CPU."""
    sizes = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "block_size": length}
    model = timing.peer_gpt(peer, **sizes).eval()
    idx = torch.randint(50257, (1, length + 1))
    with torch.no_grad():
        model(idx[:, :-1], idx[:, 1:].contiguous())


def measure(command: list[str]) -> tuple[float, float]:
    """Run a command; return its peak in MiB and its seconds. ValueError when it fails."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        code = os.waitstatus_to_exitcode(status)
        raise ValueError(f"{Path(command[1]).name} failed ({code}); its message stands above")
    return usage.ru_maxrss / 1024, time.perf_counter() - start


def measure_sides(s: Settings, folder: Path) -> dict[str, dict[str, Any]]:
    """Return peak and seconds of our side and the peer's, medians of evaluations in turns."""
    # in a process of its own: a child's peak counts what its parent held when it was forked
    writer = multiprocessing.get_context("spawn").Process(target=write_run, args=(folder, s))
    writer.start()
    writer.join()
    if writer.exitcode:
        raise ValueError("the checkpoint could not be written; the traceback stands above")
    command = [sys.executable, str(ROOT / "eval.py"), "perplexity", "--device", s.device]
    command += ["--checkpoint", str(folder / "run"), "--data", str(folder / "data")]
    command += ["--pos_mode", s.pos_mode, "--lengths", str(s.length)]
    command += ["--max_tokens", str(s.length), "--out", str(folder / "result.json")]
    sides = {"eval.py": command}
    if s.peer is not None:
        timing.peer_module(s.peer, "model.py")
        sizes = [str(n) for n in (s.n_layer, s.n_head, s.n_embd, s.length)]
        sides["nanoGPT"] = [sys.executable, __file__, "run-peer", s.peer, *sizes]
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for number in range(s.repeats):
        for side, own in sorted(sides.items(), reverse=number % 2 == 1):
            (folder / "result.json").unlink(missing_ok=True)
            found[side].append(measure(own))
    return {
        side: {
            "peak_mib": statistics.median(peaks),
            "seconds": statistics.median(seconds),
            "peaks_mib": list(peaks),
            "times_s": list(seconds),
        }
        for side, (peaks, seconds) in (
            (side, zip(*pairs, strict=True)) for side, pairs in found.items()
        )
    }


def main(argv: list[str]) -> None:
    """Print the peak in MiB and the time of each side."""
    s = load(Settings, argv, prog="bench/eval_memory.py", description=__doc__)
    with user_errors(), tempfile.TemporaryDirectory() as name:
        timing.check_settings(s)
        device = dev.resolve_device(s.device)
        if s.peer is not None and device.type != "cpu":
            raise ValueError(f"--peer {s.peer}: is measured on the CPU; use --device cpu")
        sides = measure_sides(s, Path(name))
    ours, peer = sides["eval.py"], sides.get("nanoGPT")
    for side, own in sides.items():
        low, high = min(own["peaks_mib"]), max(own["peaks_mib"])
        peak = f"peak {own['peak_mib']:,.0f} MiB [{low:,.0f}, {high:,.0f}]"
        print(f"{side}: {s.length:,} tokens, {peak}, {own['seconds']:.0f} s")
    if peer is not None:
        memory, speed = (peer[key] / ours[key] for key in ("peak_mib", "seconds"))
        print(f"nanoGPT takes {memory:.2f} times the memory and {speed:.2f} times the time")
    if s.out is not None:
        write_json(Path(s.out), {**ours, "nanoGPT": peer, **timing.described(s, device)})
        print(f"wrote {s.out}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["run-peer"]:
        run_peer(sys.argv[2], *(int(word) for word in sys.argv[3:]))
    else:
        main(sys.argv[1:])
