"""Time the training step: rope, rove and, from a checkout of the user's, nanoGPT, taking turns.

    python bench/train_step.py --peer ../nanoGPT --out step.json
    python bench/train_step.py --n_layer 12 --n_head 12 --n_embd 768 --block_size 512 --batch_size 2
    python bench/train_step.py --profile trace.json

A step is what train.py does between two batches: forward and backward of every micro-batch,
clipping, AdamW. Precision is what `auto` picks; our sides are compiled unless --compile false. The
peer's step is timed as its README runs it on a CPU (float32, eager), and given our precision and
the compiler too (on a GPU only so). The share is of model FLOPs (6 N + 12 n_layer n_embd T a token,
N with the head, attention counted whole) in the rate of 2048^3 products, timed in the same turns.
"""

import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import timing  # noqa: E402

from model import GPT, GPTConfig  # noqa: E402
from rove import device as dev  # noqa: E402
from rove.config import load  # noqa: E402
from rove.errors import user_errors  # noqa: E402
from rove.files import write_json  # noqa: E402
from rove.optim import make_optimizer, update  # noqa: E402
from train import OptimConfig  # noqa: E402

PLAIN, FAST = "nanoGPT, fp32, eager", "nanoGPT, cast, compiled"


@dataclass(frozen=True)
class Settings:
    n_layer: int = 6
    """transformer blocks"""
    n_head: int = 6
    """attention heads"""
    n_embd: int = 384
    """width"""
    block_size: int = 256
    """tokens of a sequence"""
    batch_size: int = 8
    """sequences of a micro-batch"""
    grad_accum_steps: int = 1
    """micro-batches of a step"""
    dtype: dev.DtypeName = "auto"
    """of matrix products"""
    compile: bool = True
    """compile our sides"""
    peer: str | None = None
    """checkout of nanoGPT"""
    repeats: int = 10
    """timed steps of each side"""
    profile: str | None = None
    """file for a trace of one rove step, for chrome://tracing or ui.perfetto.dev"""
    out: str | None = None
    """JSON file of the result"""


def make_step(s: Settings, side: str) -> Callable[[], None]:
    """Return a call that makes one update of a side: rope, rove or one of the peer's."""
    torch.manual_seed(0)
    device = dev.resolve_device("auto")
    dtype = dev.resolve_dtype(s.dtype, device, s.n_embd)
    shape = (s.batch_size, s.block_size + 1)
    drawn = [torch.randint(50257, shape, device=device) for _ in range(s.grad_accum_steps)]
    batches = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in drawn]
    sizes = {"n_layer": s.n_layer, "n_head": s.n_head, "n_embd": s.n_embd}
    casts = side != PLAIN
    if side in ("rope", "rove"):
        dev.keep_freed_memory(device)
        model: Any = GPT(GPTConfig(block_size=s.block_size, pos_mode=side, **sizes)).to(device)  # type: ignore[arg-type]
        optimizer: Any = make_optimizer(model, OptimConfig())
        if s.compile:
            model.compile()
    else:
        model = timing.peer_gpt(str(s.peer), block_size=s.block_size, **sizes).to(device)
        optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device.type)
        model = torch.compile(model) if casts else model

    scaler = dev.make_scaler(device, dtype)

    def step() -> None:
        for x, y in batches:
            with dev.autocast(device, dtype) if casts else nullcontext():
                loss = model(x, y)[1] / len(batches)
            scaler.scale(loss).backward()
        if side in ("rope", "rove"):
            update(optimizer, scaler, 6e-4, 1.0)
            return
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def main(argv: list[str]) -> None:
    """Print medians and ratios of all sides."""
    s = load(Settings, argv, prog="bench/train_step.py", description=__doc__)
    with user_errors():
        timing.check_settings(s)
        device = dev.resolve_device("auto")
        dtype = dev.resolve_dtype(s.dtype, device, s.n_embd)
        names = ["rope", "rove"]
        if s.peer is not None:
            timing.peer_module(s.peer, "model.py")
            names += [PLAIN, FAST] if device.type == "cpu" else [FAST]
        sides: dict[str, Any] = {name: partial(make_step, s, name) for name in names}
        products = partial(timing.make_products, dtype, device.type)
        times = timing.alternate(sides | {"products": products}, s.repeats, 2, device.type)
    config = GPTConfig(n_layer=s.n_layer, n_head=s.n_head, n_embd=s.n_embd)
    n_params = sum(p.numel() for p in GPT(config).parameters())
    tokens = s.grad_accum_steps * s.batch_size * s.block_size
    flops = tokens * (6 * n_params + 12 * s.n_layer * s.n_embd * s.block_size)
    rate = 2 * 2048**3 / statistics.median(times.pop("products"))
    base = PLAIN if PLAIN in times else "rope"
    result = timing.summary(times, base, flops_per_step=flops, matmul_flops_per_s=rate,
                     dtype=str(dtype), **timing.described(s, device, s.compile))  # fmt: skip
    how = f"{dtype}, {'compiled' if s.compile else 'eager'}"
    print(f"{n_params:,} parameters, {tokens:,} tokens a step, {how}")
    print(f"products at {rate / 1e9:.0f} GFLOP/s")
    timing.show(result, base)
    if PLAIN in times:
        others = {name: own for name, own in times.items() if name != PLAIN}
        timing.show(timing.summary(others, FAST), FAST)
    for name in times:
        result[name]["share_of_matmul_rate"] = flops / result[name]["median_s"] / rate
        print(f"  {name:28s} {result[name]['share_of_matmul_rate']:.0%} of the products' rate")
    cost = result["rove"]["median_s"] / result["rope"]["median_s"]
    result["rove_over_rope"] = cost
    print(f"a rove step takes {cost:.3f} times a rope step")
    if s.profile is not None:
        step = make_step(s, "rove")
        step()
        with torch.profiler.profile() as trace:
            step()
        trace.export_chrome_trace(s.profile)
        print(f"wrote {s.profile}")
    if s.out is not None:
        write_json(Path(s.out), result)
        print(f"wrote {s.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
