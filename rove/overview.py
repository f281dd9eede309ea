"""What a run says of itself: at its start what it is and will cost, at its end where things are."""

import shlex
from pathlib import Path
from typing import Any

from rove.words import duration, size

ACTIVATION_BYTES = 34  # per layer, token and channel in 16 bits, of which backward keeps copies
LOGIT_BYTES = 10  # per token and id: bf16, float32 and a gradient


def memory_bytes(model_config: Any, n_params: int, micro_batch_size: int, is_fp32: bool) -> float:
    """Estimate what training takes on each device: weights, gradients, AdamW, one micro-batch.

    16 bytes a parameter in float32, 2 more for its copy where products run in 16 bits; activations
    as Korthikanti et al. (arXiv 2205.05198) count them for attention that keeps no scores.
    """
    c = model_config
    tokens = micro_batch_size * c.block_size
    activations = tokens * c.n_layer * c.n_embd * ACTIVATION_BYTES * (2 if is_fp32 else 1)
    return n_params * (16 if is_fp32 else 18) + activations + tokens * c.vocab_size * LOGIT_BYTES


def at_start(
    config: Any, n_params: int, environment: dict[str, Any], data: Any, world_size: int,
    batch: tuple[int, int], run_flops: float,
) -> str:  # fmt: skip
    """Return the lines that a run begins with.

    environment: device, dtype and compile, as checkpoints note them. batch: sequences of a
    micro-step, micro-steps of a rank.
    """
    m, t = config.model, config.train
    micro_batch_size, grad_accum_steps = batch
    epochs = t.max_steps * t.tokens_per_step / data.n_tokens
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    parts = f"{ranks} x {grad_accum_steps} x {micro_batch_size} sequences"
    dtype = environment["dtype"]
    how = f"{environment['device']}, {dtype}, {'compiled' if environment['compile'] else 'eager'}"
    memory = memory_bytes(m, n_params, micro_batch_size, dtype == "torch.float32")
    n_kept = t.keep_checkpoints + 2  # the best, and one in the making
    disk = n_kept * 12 * n_params
    shape = f"{m.n_layer} layers, {m.n_head} heads, width {m.n_embd}, context {m.block_size}"
    lines = [
        f"model: {m.pos_mode}, {n_params:,} parameters ({shape}); {how}",
        f"data: {config.data.dir}, {data.n_tokens:,} tokens, {data.tokenizer['name']}",
        f"run: {t.max_steps:,} steps of {t.tokens_per_step:,} tokens = {parts} x {m.block_size}",
        f"cost: {run_flops:.1e} FLOPs, {epochs:.2f} epochs; about {size(memory)} of memory on each "
        "device, torch itself apart",
        f"files: {config.out_dir}: config.yaml, metrics.jsonl, up to {n_kept} checkpoints of "
        f"{size(12 * n_params)} ({size(disk)})",
    ]
    return "\n".join(lines)


def time_left(tok_per_s: float, steps_left: int, tokens_per_step: int) -> str:
    """Return how long a run will go on at a measured rate."""
    left = duration(steps_left * tokens_per_step / tok_per_s)
    return f"rate: {tok_per_s:,.0f} tokens/s, {left} to go at this rate"


def at_end(run: Path, best_val_loss: float) -> str:
    """Return the lines that a finished run ends with."""
    lines = [
        f"done: {run}, best val loss {best_val_loss:.4f} nats/token",
        f"there: {run}/metrics.jsonl, {run}/checkpoints (latest.json, best.json)",
        f"next: python sample.py --checkpoint {shlex.quote(str(run))}",
        f"      python eval.py perplexity --checkpoint {shlex.quote(str(run))}",
    ]
    return "\n".join(lines)
