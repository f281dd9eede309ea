"""Train a GPT-2-class model with rotary positions, on one process or many.

    python train.py --config configs/demo.yaml --model.pos_mode rove --out_dir out/demo-rove
    torchrun --standalone --nproc_per_node=8 train.py --config configs/gpt2_124m.yaml \\
        --model.pos_mode rove --out_dir out/124m-rove

A run that was stopped goes on with `--train.resume auto`. Exit codes: 0 done; 1 failed, by a loss
that is not finite or a checkpoint that could not be saved among others; 2 bad settings or input;
128 + number of the signal (SIGTERM, SIGINT, SIGUSR1) that stopped it, after a checkpoint. (torchrun
exits with 1 whenever a worker fails.)
"""

import math
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from model import GPT, GPTConfig
from rove import checkpoint as ckpt
from rove import device as dev
from rove import distributed as dist
from rove import overview, runs
from rove.config import flatten, load, to_dict
from rove.errors import user_errors
from rove.files import check_folder, lock_folder
from rove.metrics import check_finite, fetch_losses, open_metrics
from rove.optim import learning_rate, make_optimizer, update
from rove.shards import BatchOrder, TokenData, open_split, split_batch
from rove.signals import StopSignals


@dataclass(frozen=True)
class DataConfig:
    dir: str = "data/stdlib"
    """folder of token shards that prepare_fineweb.py wrote"""


@dataclass(frozen=True)
class OptimConfig:
    lr: float = 6e-4
    """peak learning rate"""
    min_lr: float | None = None
    """learning rate of the last step; null: a tenth of lr"""
    weight_decay: float = 0.1
    """decay of matrices; vectors have none"""
    beta1: float = 0.9
    """AdamW's decay of the gradient's mean"""
    beta2: float = 0.95
    """AdamW's decay of the gradient's square"""
    grad_clip: float = 1.0
    """largest norm of the gradient; 0: no clipping"""
    warmup_steps: int = 715
    """steps of linear warm-up before the cosine"""


@dataclass(frozen=True)
class TrainConfig:
    max_steps: int = 18795
    """optimizer updates"""
    tokens_per_step: int = 524288
    """tokens of one update, over all ranks and micro-steps"""
    micro_batch_size: int = 16
    """most sequences in one forward pass of a rank; bounds memory, changes no result"""
    eval_interval: int = 1000
    """steps between evaluations"""
    eval_tokens: int = 10485760
    """validation tokens of one evaluation, at most the whole split"""
    checkpoint_interval: int = 1000
    """steps between checkpoints; the last step and every new best are saved too"""
    keep_checkpoints: int = 2
    """newest checkpoints to keep, beside the best"""
    log_interval: int = 10
    """steps between reads of the losses from the device; every step gets its line all the same"""
    dtype: dev.DtypeName = "auto"
    """of matrix products; auto: bfloat16 where it is native, else float16 on GPUs, else float32"""
    device: dev.DeviceName = "auto"
    """where to train; auto: cuda, else mps, else cpu"""
    compile: bool | Literal["auto"] = "auto"
    """torch.compile; auto: on GPUs, and on CPUs for long runs"""
    init_from: str | None = None
    """start from the weights of this run, checkpoint, export or GPT-2 folder; null: from chance"""
    resume: Literal["never", "auto"] = "never"
    """auto: continue the run in out_dir if there is one; torchrun's restarts always do"""
    on_save_error: Literal["continue", "stop"] = "continue"
    """when a checkpoint cannot be written: go on, and try at the next, or stop"""
    dist_timeout_s: float = 600.0
    """longest wait for another rank's gradients, in seconds"""


@dataclass(frozen=True)
class LogConfig:
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """what wandb does, beside metrics.jsonl"""
    wandb_project: str = "rove"
    """wandb project"""
    run_name: str | None = None
    """wandb run name; null: the folder's"""


@dataclass(frozen=True)
class Config:
    model: GPTConfig = field(default_factory=lambda: GPTConfig(vocab_size=None))
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    log: LogConfig = field(default_factory=LogConfig)
    out_dir: str = "out/run"
    """run folder"""
    seed: int = 1337
    """seed of weights, dropout and the order of the windows"""
    dry_run: bool = False
    """check settings and data, print what would run, and stop"""

    def __post_init__(self) -> None:
        for key, value in flatten(to_dict(self)).items():
            least = 1 if key.startswith("train.") else 0
            numeric = not key.startswith("model.") and isinstance(value, int | float)
            if numeric and value is not False and not least <= value < math.inf:
                raise ValueError(f"{key}={value}: must be at least {least}")
        o, T, n = self.optim, self.model.block_size, self.train.tokens_per_step
        if max(o.beta1, o.beta2) >= 1:
            raise ValueError(f"optim.beta1={o.beta1}, beta2={o.beta2}: must be below 1")
        if (o.min_lr or 0) > o.lr:
            raise ValueError(f"optim.min_lr={o.min_lr}: must be at most optim.lr={o.lr}")
        if self.model.factor != 1:
            why = "YaRN extends a trained model at evaluation; train at 1"
            raise ValueError(f"model.yarn_factor={self.model.factor}: {why}")
        split_batch(n, self.train.micro_batch_size, T, world_size=1)
        if self.seed >= 2**63:
            raise ValueError(f"seed={self.seed}: must be below 2^63")


def read_batch(
    data: TokenData, windows: list[int], T: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, each (B, T) int64 on the device, of these windows."""
    with user_errors():
        rows = torch.from_numpy(data.windows(windows, T))
    if device.type == "cuda":
        rows = rows.pin_memory()
    rows = rows.to(device, non_blocking=True)
    return rows[:, :-1], rows[:, 1:]


def evaluate(
    model: GPT, val: TokenData, n_windows: int, batch_size: int, world: dist.World, cast: Any
) -> float:
    """Return the mean loss in nats per token over validation windows 0 .. n_windows - 1.

    Ranks share the windows. Each window's sum is added up in float64, so that neither their
    number nor batch_size changes the result.
    """
    T, device = model.config.block_size, model.transformer.wte.weight.device
    own = list(range(world.rank, n_windows, world.size))
    total = 0.0
    model.eval()
    for first in range(0, len(own), batch_size):
        x, y = read_batch(val, own[first : first + batch_size], T, device)
        with cast():
            total += float(model.token_nll(x, y).sum(dim=1).cpu().double().sum())
    model.train()
    return sum(dist.gather(total)) / (n_windows * T)


def main(argv: list[str]) -> None:
    """Train as the command line says."""
    config = load(Config, argv, prog="train.py", description="Train GPT-2 with rotary positions.")
    t, T, run = config.train, config.model.block_size, Path(config.out_dir)
    world = dist.read_world()
    say = partial(dist.say, world)

    # What to run, checked before anything is written
    with user_errors():
        device = dev.resolve_device(t.device, world.local_rank)
        dev.keep_freed_memory(device)
        dtype = dev.resolve_dtype(t.dtype, device, config.model.n_embd)
        micro_batch_size, grad_accum_steps = split_batch(
            t.tokens_per_step, t.micro_batch_size, T, world.size
        )
        data, val = open_split(config.data.dir, "train", say), open_split(config.data.dir, "val")
        vocab_size = data.tokenizer["vocab_size"]
        if config.model.vocab_size not in (None, vocab_size):
            remedy = f"the data in {config.data.dir} has {vocab_size} ids; leave it null"
            raise ValueError(f"model.vocab_size={config.model.vocab_size}: {remedy}")
        config = replace(config, model=replace(config.model, vocab_size=vocab_size))
        n_val_windows = min(val.n_windows(T), max(t.eval_tokens // T, 1))
        for split in (data, val):
            if split.n_windows(T) < 1:
                short = f"{split.n_tokens} tokens are less than a window of block_size={T} + 1"
                raise ValueError(f"{split.files[0]}: {short}; lower it or prepare more text")
        order = BatchOrder(data.n_windows(T), config.seed)
        fingerprint: dict[str, Any] = {"train": data.sha256, "val": val.sha256}
        fingerprint |= {"order": order.fingerprint(), "seed": config.seed}
        fingerprint |= {"tokens_per_step": t.tokens_per_step}
        torch.manual_seed(config.seed)
        model = GPT(config.model).to(device)
        if t.init_from is not None and not (run / "checkpoints").exists():
            runs.start_from(t.init_from, model, data.tokenizer)
            say(f"weights: those of {t.init_from}")
        n_params = sum(p.numel() for p in model.parameters())
        flops_per_token = 6 * n_params + 12 * config.model.n_layer * config.model.n_embd * T
        run_flops = flops_per_token * t.tokens_per_step * t.max_steps
        compiles, notice = dev.resolve_compile(t.compile, device, run_flops / world.size)
        if config.optim.warmup_steps > t.max_steps:
            notice += f" warm-up ({config.optim.warmup_steps} steps) is longer than the run"
    environment = dev.environment(device, compiles) | {"dtype": str(dtype)}
    batch = (micro_batch_size, grad_accum_steps)
    say(overview.at_start(config, n_params, environment, data, world.size, batch, run_flops))
    if notice:
        say(f"notice: {notice.strip()}")

    # The run folder: a new run, or the one that is there and what it had reached
    with user_errors():
        dist.connect(world, device, t.dist_timeout_s)
        dist.on_main(world, partial(check_folder, "--out_dir", run))
        take = partial(lock_folder, run, "training")
        lock = None if config.dry_run else dist.on_main(world, take)  # held to the end
        fixed = ("model.", "seed", "train.tokens_per_step")
        resume = t.resume == "auto" or dist.has_started()
        found = dist.on_main(world, lambda: runs.find_run(run, config, resume, fixed, say))
        resume_from = dist.gather(found)[0]
        dist.note_start()
        optimizer, scaler = make_optimizer(model, config.optim), dev.make_scaler(device, dtype)
        start, best_val_loss, wandb_id, rng = 0, math.inf, None, []
        if resume_from is not None:
            expected = {"data": fingerprint, "model_config": config.model.stored()}
            saved = ckpt.restore(resume_from, expected, model, optimizer, scaler)
            start, best_val_loss, rng = saved["step"], saved["best_val_loss"], saved["rng"]
            wandb_id = saved["wandb_run_id"]
            say(f"resumed from {resume_from} at step {start}")
            for key, before in saved["environment"].items():
                if before != (now := environment.get(key)):
                    say(f"warning: {key} was {before}, is now {now}: results can differ")
            if start > t.max_steps:
                say(f"notice: that is beyond train.max_steps={t.max_steps}; nothing is trained")
        if config.dry_run:
            say("dry run: nothing is written")
            dist.disconnect()
            return
        log = partial(open_metrics, run, start, config, config.log, wandb_id)
        metrics = dist.on_main(world, log)
    if compiles:
        model.compile()
    ddp: Any = model
    if world.size > 1:
        devices = [device.index] if device.type == "cuda" else None
        ddp = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
        if device.type == "cpu":
            ddp.register_comm_hook(world.size, dist.mean_by_tensor)
    torch.manual_seed(config.seed + world.rank)  # dropout differs between ranks
    if world.rank < len(rng):  # last: nothing between here and the loop draws a number
        dev.set_rng_state(rng[world.rank], device)

    signals = StopSignals()

    # The loop; step is the number of updates done when its pass is over
    peak = dev.peak_flops(device)
    cast = partial(dev.autocast, device, dtype)
    pending: list[dict[str, Any]] = []  # steps whose losses are still on the device
    quiet = None if world.is_main else True  # None: shown on a terminal only
    bar = tqdm(total=t.max_steps, initial=start, unit="step", disable=quiet)
    clock, step, stop_signal, n_logged = time.perf_counter(), start, 0, 0
    for step in range(start + 1, t.max_steps + 1):
        loss_sum = torch.zeros((), device=device)
        for micro_step in range(grad_accum_steps):
            part, n_parts = micro_step * world.size + world.rank, grad_accum_steps * world.size
            windows = order.part(step, t.tokens_per_step // T, part, n_parts)
            x, y = read_batch(data, windows, T, device)
            syncs = world.size == 1 or micro_step == grad_accum_steps - 1
            with nullcontext() if syncs else ddp.no_sync():
                with cast():
                    loss = ddp(x, y)[1] / grad_accum_steps
                scaler.scale(loss).backward()
            loss_sum += loss.detach()
        lr = learning_rate(config.optim, t.max_steps, step)
        grad_norm = update(optimizer, scaler, lr, config.optim.grad_clip)
        row = {"step": step, "tokens": step * t.tokens_per_step, "train/loss": loss_sum}
        pending.append({**row, "lr": lr, "grad_norm": grad_norm})
        bar.update()

        stop_signal = dist.largest(signals.received)  # all ranks stop after the same step
        ends = step == t.max_steps or stop_signal > 0
        evaluates = step % t.eval_interval == 0 or step == t.max_steps
        saves = step % t.checkpoint_interval == 0 or ends
        if not (evaluates or saves or step % t.log_interval == 0):
            continue
        fetch_losses(pending, scaler)
        tok_per_s = len(pending) * t.tokens_per_step / (time.perf_counter() - clock)
        for row in pending:
            row["perf/tok_per_s"] = round(tok_per_s, 1)
            if peak is not None:
                row["perf/mfu"] = flops_per_token * tok_per_s / (peak * world.size)
        loss_now = pending[-1]["train/loss"]
        bar.set_postfix(loss=f"{loss_now:.4f}", tok_per_s=f"{tok_per_s:,.0f}")
        if (n_logged := n_logged + 1) == 2:  # the first includes compiling
            say(overview.time_left(tok_per_s, t.max_steps - step, t.tokens_per_step))
        if evaluates:
            val_loss = evaluate(model, val, n_val_windows, micro_batch_size, world, cast)
            check_finite(step, val_loss)
            pending[-1]["val/loss"] = val_loss
            losses = f"train loss {loss_now:.4f}, val loss {val_loss:.4f} nats/token"
            say(f"step {step}: {losses}, {tok_per_s:,.0f} tokens/s")
        is_best = evaluates and val_loss < best_val_loss
        if metrics:
            metrics.write(pending)
        pending = []
        if saves or is_best:
            state: dict[str, Any] = {"format": ckpt.FORMAT, "model_config": config.model.stored()}
            state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"scaler": scaler.state_dict(), "rng": dist.gather(dev.rng_state(device))}
            state |= {"step": step, "tokens": step * t.tokens_per_step, "data": fingerprint}
            best = val_loss if is_best else best_val_loss
            state |= {"tokenizer": data.tokenizer, "best_val_loss": best}
            state |= {"wandb_run_id": metrics and metrics.wandb.id, "environment": environment}
            fault = metrics and metrics.sync()
            if metrics and not fault:
                fault = ckpt.try_to_save(run, state, is_best, t.keep_checkpoints)
            fault = dist.gather(fault)[0]
            if fault and (ends or t.on_save_error == "stop"):
                raise SystemExit(f"error: step {step} is not saved: {fault}")
            if fault:
                say(f"warning: step {step} is not saved: {fault}; going on, the last save is good")
            best_val_loss = best_val_loss if fault else best
        if stop_signal and step < t.max_steps:
            say(f"stopped by signal {stop_signal} after step {step}; --train.resume auto goes on")
            break
        clock = time.perf_counter()

    bar.close()
    if metrics:
        metrics.close()
    del ddp  # freed after its group it can wait forever for the group's threads
    dist.disconnect()
    if stop_signal and step < t.max_steps:
        raise SystemExit(128 + stop_signal)
    say(overview.at_end(run, best_val_loss))
    del lock


if __name__ == "__main__":
    main(sys.argv[1:])
