"""Time what checkpoints cost: saving a 124M run's state against the steps between two saves.

    python bench/checkpoint.py --dir /path/on/the/disk/that/matters --out checkpoint.json
    python bench/checkpoint.py --peer ../nanoGPT

Saves the full state (weights, both AdamW moments) several times as training does (temporary file,
fsync, rename, hash) and times micro-steps of 124M on this device (forward and backward, compiled,
in the precision that `auto` picks). The share is save time / (save time + steps x step time), of
the steps between two saves, a step being its micro-steps alone. The peer's save, in turns with
ours, is nanoGPT's: torch.save of the same kind of state, without fsync, hash or rename.
"""

import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import timing  # noqa: E402

from model import GPT, GPTConfig  # noqa: E402
from rove import checkpoint as ckpt  # noqa: E402
from rove import device as dev  # noqa: E402
from rove.config import load  # noqa: E402
from rove.errors import user_errors  # noqa: E402
from rove.files import write_json  # noqa: E402
from rove.optim import make_optimizer  # noqa: E402
from train import OptimConfig, TrainConfig  # noqa: E402


@dataclass(frozen=True)
class Settings:
    n_layer: int = 12
    """transformer blocks"""
    n_head: int = 12
    """attention heads"""
    n_embd: int = 768
    """width"""
    block_size: int = 1024
    """tokens of a sequence"""
    micro_batch_size: int = 2
    """sequences in a timed micro-step"""
    world_size: int = 8
    """devices like this one that would share a step"""
    compile: bool = True
    """compile the micro-step"""
    dir: str | None = None
    """folder to save into; null: a temporary one"""
    peer: str | None = None
    """checkout of nanoGPT"""
    repeats: int = 5
    """saves and micro-steps to time; medians count"""
    out: str | None = None
    """JSON file of the result"""


def make_side(s: Settings, folder: str, side: str) -> Callable[[], object]:
    """Return a call of one side: "save", "micro-step" or the peer's save, "nanoGPT"."""
    device = dev.resolve_device("auto")
    sizes = {"n_layer": s.n_layer, "n_head": s.n_head, "n_embd": s.n_embd}
    if side == "nanoGPT":
        model: Any = timing.peer_gpt(str(s.peer), block_size=s.block_size, **sizes).to(device)
        optimizer: Any = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device.type)
    else:
        model = GPT(GPTConfig(pos_mode="rove", block_size=s.block_size, **sizes)).to(device)
        optimizer = make_optimizer(model, OptimConfig())
    dtype = dev.resolve_dtype("auto", device, s.n_embd)
    x = torch.randint(50257, (s.micro_batch_size, s.block_size), device=device)

    def micro_step() -> None:
        with dev.autocast(device, dtype):
            model(x, x)[1].backward()

    if side == "micro-step":
        dev.keep_freed_memory(device)
        if s.compile:
            model.compile()
        return micro_step
    micro_step()
    optimizer.step()
    if side == "nanoGPT":
        peers = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        peers |= {"model_args": sizes, "iter_num": 0, "best_val_loss": 0.0, "config": {}}
        return lambda: torch.save(peers, Path(folder) / "ckpt.pt")
    state = dict.fromkeys(ckpt.KEYS) | {"format": ckpt.FORMAT, "best_val_loss": 0.0}
    state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"scaler": dev.make_scaler(device, dtype).state_dict()}
    state |= {"model_config": model.config.stored()}
    steps = count(1)
    return lambda: ckpt.save_checkpoint(Path(folder), state | {"step": next(steps)}, True, keep=1)


def main(argv: list[str]) -> None:
    """Print save time, step time and the share of the first in training."""
    s = load(Settings, argv, prog="bench/checkpoint.py", description=__doc__)
    device = dev.resolve_device("auto")
    names = ["save", "micro-step"]
    with user_errors(), tempfile.TemporaryDirectory(dir=s.dir) as folder:
        timing.check_settings(s)
        micro_tokens, t = s.micro_batch_size * s.block_size * s.world_size, TrainConfig()
        if t.tokens_per_step % micro_tokens:
            sizes = "--micro_batch_size x --block_size x --world_size"
            raise ValueError(f"{sizes} {micro_tokens}: must divide a step's {t.tokens_per_step}")
        if s.peer is not None:
            timing.peer_module(s.peer, "model.py")
            names.append("nanoGPT")
        sides: dict[str, Any] = {name: partial(make_side, s, folder, name) for name in names}
        times = timing.alternate(sides, s.repeats, 2, device.type)
        size_bytes = max(file.stat().st_size for file in Path(folder).rglob("step_*.pt"))
    micro_times = times.pop("micro-step")
    step_s = statistics.median(micro_times) * (t.tokens_per_step // micro_tokens)
    more = {"size_bytes": size_bytes, "step_s": step_s, "micro_steps_s": micro_times}
    more |= {"tokens_per_step": t.tokens_per_step, "checkpoint_interval": t.checkpoint_interval}
    result = timing.summary(times, "save", **more, **timing.described(s, device, s.compile))
    timing.show(result, "save")
    save_s = result["save"]["median_s"]
    share = result["share"] = save_s / (save_s + t.checkpoint_interval * step_s)
    print(f"a save every {t.checkpoint_interval} steps: {share:.3%} of the time")
    print(f"save {save_s:.2f} s for {size_bytes / 1e9:.2f} GB; step {step_s:.2f} s on {device}")
    break_even_s = save_s * 0.98 / 0.02 / t.checkpoint_interval
    print(f"the share stays under 2 % for steps longer than {break_even_s:.3f} s")
    if s.out is not None:
        write_json(Path(s.out), result)
        print(f"wrote {s.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
