"""What an evaluation will cost: FLOPs of forward passes, and the time that these take here."""

import time
from collections.abc import Callable
from typing import Any

import torch

from rove.words import duration


def forward_flops(config: Any, length: int, n_scored: int) -> float:
    """Return the FLOPs of one window: the trunk, causal attention, the head where it is needed.

    config: n_layer, n_embd and vocab_size of the model.
    """
    C, n_layer = config.n_embd, config.n_layer
    trunk = 24 * n_layer * C * C * length
    attention = 2 * n_layer * C * length * length
    return float(trunk + attention + 2 * config.vocab_size * C * n_scored)


def measured_rate(config: Any, forward: Callable[[torch.Tensor], Any]) -> float:
    """Return FLOPs per second of a forward pass over one window of the training context."""
    idx = torch.zeros(1, config.block_size, dtype=torch.int64)
    times = []
    for _ in range(2):
        start = time.perf_counter()
        forward(idx)
        times.append(time.perf_counter() - start)
    return forward_flops(config, config.block_size, config.block_size) / min(times)


def describe(flops: float, rate: float) -> str:
    """Return FLOPs and the time that they take at a rate, in words."""
    return f"{flops:.1e} FLOPs, about {duration(flops / rate)} at {rate:.1e} FLOP/s"
