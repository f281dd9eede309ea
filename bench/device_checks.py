"""Check a device before it is trusted: against float64, cached, compiled, updated, resumed.

    python bench/device_checks.py --out checks.json

Each check prints its figure and its bound; the exit code is 1 if one is missed. The reference is
tests/oracle.py, an independent float64 model on the CPU.
"""

import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

import oracle  # noqa: E402
import timing  # noqa: E402

from model import GPT, GPTConfig  # noqa: E402
from rove import checkpoint as ckpt  # noqa: E402
from rove import device as dev  # noqa: E402
from rove.config import load  # noqa: E402
from rove.errors import user_errors  # noqa: E402
from rove.files import write_json  # noqa: E402
from rove.optim import make_optimizer, update  # noqa: E402
from train import OptimConfig  # noqa: E402

FP32_BOUND, BF16_BOUND, UPDATE_BOUND, PEAK_BOUND = 1e-4, 0.04, 1e-5, 1.02


@dataclass(frozen=True)
class Settings:
    length: int = 512
    """tokens of the sequences that are compared"""
    n_layer: int = 12
    """blocks of the model whose memory is measured"""
    n_embd: int = 768
    """its width, 64 for each head"""
    batch_size: int = 8
    """its sequences of 1,024 tokens"""
    out: str | None = None
    """JSON file of the figures"""


def against_float64(device: torch.device, length: int) -> dict[str, float]:
    """Return the root mean square error of logits in every mode, in units of their deviation."""
    found = {}
    for mode, values in oracle.CASES:
        config = oracle.wide(mode, factor=4.0, yarn_values=values)
        net, idx = oracle.lively(config), oracle.ids(config, 2, length)
        wanted = oracle.logits(net.state_dict(), config, idx)
        net = net.to(device)
        for dtype in (torch.float32, torch.bfloat16):
            with dev.autocast(device, dtype), torch.no_grad():
                got = net(idx.to(device))[0].double().cpu()
                cached = oracle.chunked(net, idx.to(device), length // 3).double().cpu()
            for how, tried in (("", got), (", cached", cached)):
                error = float((tried - wanted).square().mean().sqrt() / wanted.std())
                found[f"{mode}, values {values}, {dtype}{how}"] = error
    return found


def update_against_float64(device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest difference of weights and moments from float64's AdamW after updates.

    There are four: clipped, of NaN (to be passed over), clipped, not clipped. dtype: that of the
    training; in fp16 losses are scaled.
    """
    torch.manual_seed(2)
    weight = torch.nn.Parameter(torch.randn(64, 64, device=device))
    exact = torch.nn.Parameter(weight.detach().cpu().double())
    o, lr, scaler = OptimConfig(), 0.1, dev.make_scaler(device, dtype)
    optimizer = make_optimizer(torch.nn.ParameterList([weight]), o)
    plain = torch.optim.AdamW([exact], lr, (o.beta1, o.beta2), weight_decay=o.weight_decay)
    for size in (10.0, math.nan, 3.0, 1e-3):
        gradient = size * torch.randn(64, 64)
        weight.grad = scaler.scale(gradient.to(device))
        update(optimizer, scaler, lr, o.grad_clip)
        if math.isfinite(size):
            exact.grad = gradient.double()
            torch.nn.utils.clip_grad_norm_([exact], o.grad_clip)
            plain.step()
    pairs = [(weight, exact)]
    for key in ("exp_avg", "exp_avg_sq"):
        pairs.append((optimizer.state[weight][key], plain.state[exact][key]))
    pairs = [(a.detach().cpu().double(), b.detach()) for a, b in pairs]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def compiled_against_eager(device: torch.device, length: int) -> dict[str, float]:
    """Return differences in every mode, bf16: of losses, nats/token, and of gradients, relative."""
    found = {}
    for mode in oracle.MODES:
        net = oracle.lively(oracle.wide(mode, factor=4.0)).to(device)
        idx = oracle.ids(net.config, 2, length + 1).to(device)
        losses, gradients = [], []
        for _ in range(2):
            net.zero_grad()
            with dev.autocast(device, torch.bfloat16):
                loss = net(idx[:, :-1], idx[:, 1:])[1]
            loss.backward()
            losses.append(float(loss.detach()))
            gradients.append(torch.cat([p.grad.flatten().clone() for p in net.parameters()]))
            if len(losses) == 1:
                net.compile(fullgraph=True)
        found[f"{mode}, loss"] = abs(losses[0] - losses[1])
        off = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
        found[f"{mode}, gradient"] = float(off)
    return found


def resumed_against_straight(device: torch.device) -> float:
    """Return the largest difference of losses between four steps and two, a save, and two more."""
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 128, "vocab_size": 257, "block_size": 64}
    config = GPTConfig(pos_mode="rove", **sizes)  # type: ignore[arg-type]
    torch.manual_seed(1)
    batches = torch.randint(257, (4, 8, 65)).to(device)
    dtype, losses = dev.resolve_dtype("auto", device, 128), []
    with tempfile.TemporaryDirectory() as folder:
        for parts in ([range(4)], [range(2), range(2, 4)]):
            own = []
            for number, steps in enumerate(parts):
                torch.manual_seed(0)
                model = GPT(config).to(device)
                optimizer = make_optimizer(model, OptimConfig())
                scaler = dev.make_scaler(device, dtype)
                if number:
                    path = Path(folder) / "checkpoints/step_00000001.pt"
                    ckpt.restore(path, {}, model, optimizer, scaler)
                for step in steps:
                    with dev.autocast(device, dtype):
                        loss = model(batches[step][:, :-1], batches[step][:, 1:])[1]
                    scaler.scale(loss).backward()
                    update(optimizer, scaler, 6e-4, 1.0)
                    own.append(float(loss.detach()))
                save(folder, model, optimizer, scaler)
            losses.append(own)
    return max(abs(a - b) for a, b in zip(*losses, strict=True))


def save(folder: str, model: Any, optimizer: Any, scaler: Any) -> None:
    """Write a checkpoint of step 1 into a folder."""
    state: dict[str, Any] = dict.fromkeys(ckpt.KEYS) | {"format": ckpt.FORMAT, "step": 1}
    state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"scaler": scaler.state_dict(), "model_config": model.config.stored()}
    size = model.config.vocab_size
    tokenizer = {"name": "gpt2", "vocab_size": size, "sha256": None, "eot_id": size - 1}
    ckpt.save_checkpoint(Path(folder), state | {"tokenizer": tokenizer}, False, keep=1)


def peak_after_resume(device: torch.device, s: Settings) -> float | None:
    """Return a step's peak memory in a resumed run over that in a fresh one; None on a CPU."""
    if device.type != "cuda":
        return None
    config = GPTConfig(n_layer=s.n_layer, n_head=s.n_embd // 64, n_embd=s.n_embd, pos_mode="rove")
    x = torch.randint(50257, (s.batch_size, 1024), device=device)
    dtype = dev.resolve_dtype("auto", device, s.n_embd)
    peaks: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        for resumes in (False, True):
            model = GPT(config).to(device)
            optimizer, scaler = make_optimizer(model, OptimConfig()), dev.make_scaler(device, dtype)
            if resumes:
                path = Path(folder) / "checkpoints/step_00000001.pt"
                ckpt.restore(path, {}, model, optimizer, scaler)
            for _ in range(2):
                torch.cuda.reset_peak_memory_stats()
                with dev.autocast(device, dtype):
                    loss = model(x, x)[1]
                scaler.scale(loss).backward()
                update(optimizer, scaler, 6e-4, 1.0)
            peaks.append(torch.cuda.max_memory_allocated())
            save(folder, model, optimizer, scaler)
            del model, optimizer
            torch.cuda.empty_cache()
    return peaks[1] / peaks[0]


def main(argv: list[str]) -> None:
    """Run the checks; exit with 1 if one misses its bound."""
    s = load(Settings, argv, prog="bench/device_checks.py", description=__doc__)
    with user_errors():
        timing.check_settings(s)
        if s.n_embd % 64:
            raise ValueError(f"--n_embd {s.n_embd}: must be a multiple of 64, a head's width")
        if not 3 <= s.length <= 1024:
            raise ValueError(f"--length {s.length}: must be 3 to 1024")
    device = dev.resolve_device("auto")
    torch.manual_seed(0)
    errors = against_float64(device, s.length)
    compiled = compiled_against_eager(device, s.length)
    resumed, peak = resumed_against_straight(device), peak_after_resume(device, s)
    checks = [(name, error, FP32_BOUND if "float32" in name else BF16_BOUND)
              for name, error in errors.items()]  # fmt: skip
    for dtype in (torch.bfloat16, torch.float16):
        checks += [(f"updates, {dtype}", update_against_float64(device, dtype), UPDATE_BOUND)]
    checks += [(f"compiled, {what}", error, 3e-2) for what, error in compiled.items()]
    checks += [("losses after a resume", resumed, 1e-3)]
    checks += [] if peak is None else [("peak memory after resume", peak, PEAK_BOUND)]
    for name, value, bound in checks:
        print(f"  {'ok    ' if value <= bound else 'MISSED'} {name:48s} {value:.2e} <= {bound:g}")
    if s.out is not None:
        rows = []
        for name, value, bound in checks:
            kept = value if math.isfinite(value) else str(value)  # JSON has no NaN
            rows.append({"check": name, "value": kept, "bound": bound, "holds": value <= bound})
        write_json(Path(s.out), {"checks": rows, **timing.described(s, device, True)})
    if not all(value <= bound for _, value, bound in checks):  # NaN is never within a bound
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
