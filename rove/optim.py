"""The optimizer, its learning rate and its update: AdamW, linear warm-up, cosine, clipping."""

import math
from typing import Any

import torch
from torch import Tensor, nn


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


def update(
    optimizer: torch.optim.AdamW, scaler: torch.amp.GradScaler, lr: float, grad_clip: float
) -> Tensor:
    """Make one AdamW step with the gradients clipped to a norm of grad_clip (0: not clipped).

    Returns the norm before clipping, () float32. Weights and moments stay as they are where it is
    not finite (in fp16: where a gradient is not). Clipping and skipping are done by the fused step
    itself, on the device: no other pass that writes the gradients, no wait for the norm.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    scaler.unscale_(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.get_total_norm(p.grad for p in parameters if p.grad is not None)
    own: Any = optimizer  # what the fused step reads, as GradScaler hands it over
    own.grad_scale = (norm / grad_clip).clamp(min=1) if grad_clip else None  # it divides by this
    own.found_inf = 1 - norm.isfinite().float()  # in fp16 the scaler puts its own here
    scaler.step(optimizer)
    own.grad_scale = own.found_inf = None
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return norm
