"""Time what checkpoints cost: saving a 124M run's state against the steps between two saves.

    python bench/checkpoint.py --dir /path/on/the/disk/that/matters --out checkpoint.json

Saves the full state (weights, both AdamW moments) several times as training does (temporary file,
fsync, rename, hash) and times micro-steps of 124M on this device in the precision that `auto`
picks. The share is saves x save time / (saves x save time + steps x step time), with a save for
every checkpoint_interval and, at worst, one for every eval_interval.
"""

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from model import GPT, GPTConfig  # noqa: E402
from rove import checkpoint as ckpt  # noqa: E402
from rove import device as dev  # noqa: E402
from rove.config import load, user_errors  # noqa: E402
from rove.files import write_json  # noqa: E402
from rove.optim import make_optimizer  # noqa: E402
from train import Config  # noqa: E402


@dataclass(frozen=True)
class Settings:
    dir: str | None = None
    """folder to save into; null: a temporary one"""
    repeats: int = 5
    """saves and micro-steps to time; medians count"""
    micro_batch_size: int = 2
    """sequences of 1,024 tokens in a timed micro-step"""
    world_size: int = 8
    """devices like this one that would share a step"""
    out: str | None = None
    """JSON file of the result"""


def main(argv: list[str]) -> None:
    """Print save time, step time and the share of the first in training."""
    s = load(Settings, argv, prog="bench/checkpoint.py", description=__doc__)
    config, device = Config(), dev.resolve_device("auto")
    model = GPT(GPTConfig(pos_mode="rove")).to(device)
    dtype = dev.resolve_dtype("auto", device, model.config.n_embd)
    optimizer, scaler = make_optimizer(model, config.optim), dev.make_scaler(device, dtype)
    x = torch.randint(50257, (s.micro_batch_size, 1024), device=device)
    step_times_s, save_times_s = [], []
    for _ in range(s.repeats):
        start = time.perf_counter()
        with dev.autocast(device, dtype):
            model(x, x)[1].backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        step_times_s.append(time.perf_counter() - start)
    optimizer.step()
    state = dict.fromkeys(ckpt.KEYS) | {"format": ckpt.FORMAT, "best_val_loss": 0.0}
    state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"scaler": scaler.state_dict(), "model_config": model.config.stored()}
    with user_errors(), tempfile.TemporaryDirectory(dir=s.dir) as folder:
        for number in range(s.repeats):
            start = time.perf_counter()
            ckpt.save_checkpoint(Path(folder), state | {"step": number}, True, keep=1)
            save_times_s.append(time.perf_counter() - start)
        size_bytes = sum(file.stat().st_size for file in Path(folder).rglob("step_*.pt"))
    t = config.train
    micro_steps = t.tokens_per_step / (s.micro_batch_size * 1024 * s.world_size)
    save_s, step_s = statistics.median(save_times_s), statistics.median(step_times_s) * micro_steps
    result = {"size_bytes": size_bytes, "save_s": save_s, "save_times_s": save_times_s,
              "step_s": step_s, "world_size": s.world_size, "dtype": str(dtype)}  # fmt: skip
    for key in ("checkpoint_interval", "eval_interval"):
        interval_s = getattr(t, key) * step_s
        result[f"share_at_{key}"] = save_s / (save_s + interval_s)
        print(f"a save every {getattr(t, key)} steps: {result[f'share_at_{key}']:.3%} of the time")
    print(f"save {save_s:.2f} s for {size_bytes / 1e9:.2f} GB; step {step_s:.2f} s on {device}")
    break_even_s = save_s * 0.98 / 0.02 / t.checkpoint_interval
    print(f"the share stays under 2 % for steps longer than {break_even_s:.3f} s")
    if s.out:
        write_json(Path(s.out), result)


if __name__ == "__main__":
    main(sys.argv[1:])
