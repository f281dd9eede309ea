"""The optimizer and its learning rate: AdamW, linear warm-up, cosine."""

import math
from typing import Any

import torch
from torch import nn


def learning_rate(o: Any, max_steps: int, step: int) -> float:
    """Return the rate of update `step` (the first is 1): linear warm-up, then a cosine to min_lr.

    o: settings lr, min_lr (None: a tenth of lr) and warmup_steps.
    """
    if step <= o.warmup_steps:
        return o.lr * step / o.warmup_steps
    min_lr = o.lr / 10 if o.min_lr is None else o.min_lr
    progress = (step - o.warmup_steps) / (max_steps - o.warmup_steps)
    return min_lr + 0.5 * (o.lr - min_lr) * (1 + math.cos(math.pi * progress))


def make_optimizer(model: nn.Module, o: Any) -> torch.optim.AdamW:
    """Return fused AdamW that decays matrices and leaves vectors alone.

    o: settings lr, beta1, beta2 and weight_decay.
    """
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    assert len(matrices) + len(vectors) == len(list(model.parameters()))
    groups = [
        {"params": matrices, "weight_decay": o.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, o.lr, (o.beta1, o.beta2), fused=True)
