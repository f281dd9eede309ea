"""Which device, precision and compiler a script uses: `auto` resolved, the impossible refused."""

import ctypes
import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

DeviceName = Literal["auto", "cpu", "cuda", "mps"]
DtypeName = Literal["auto", "bfloat16", "float16", "float32"]
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # mallopt's names, of malloc.h
CPU_BF16_WIDTH = 128  # narrower models train faster in fp32: casts outweigh the products
CPU_COMPILE_FLOPS = 1e15  # below this a CPU run ends before compiling (20 to 45 s) has paid

# dense bf16 (fp16 on V100 and T4) FLOP/s, from the vendors' data sheets, by a part of the name
PEAK_FLOPS = {
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12,
    "L40S": 362e12, "A10G": 70e12, "RTX 4090": 165e12, "RTX 3090": 71e12, "V100": 125e12,
    "T4": 65e12,
}  # fmt: skip


def resolve_device(name: DeviceName, local_rank: int = 0) -> torch.device:
    """Return the device that `name` asks for; ValueError when this machine has none."""
    has = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        takes_mps = has["mps"] and torch_version() >= (2, 13) and local_rank == 0
        name = "cuda" if has["cuda"] else "mps" if takes_mps else "cpu"
    if not has[name]:
        raise ValueError(f"device={name}: not available here; try {[k for k in has if has[k]]}")
    if name == "mps" and torch_version() < (2, 13):
        raise ValueError("device=mps: needs torch 2.13; older ones do not clip in fused AdamW")
    if name != "cuda":
        return torch.device(name)
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank}: only {torch.cuda.device_count()} GPUs here; "
            "lower --nproc_per_node"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def torch_version() -> tuple[int, int]:
    """Return torch's major and minor version."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def keep_freed_memory(device: torch.device) -> None:
    """On a CPU under glibc, keep freed blocks for the next step instead of giving them back.

    By default malloc maps each block over 32 MB anew, and the kernel fills it with zeros page by
    page: that was half of the time of a step with GPT-2's vocabulary.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if device.type == "cpu" else None
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


def cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bf16 matrices natively (AVX512-BF16 or AMX)."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)


def resolve_dtype(name: DtypeName, device: torch.device, n_embd: int) -> torch.dtype:
    """Return the autocast dtype of training; ValueError names what works on the device.

    auto: bf16 on a GPU that has it, else fp16; on a CPU bf16 where it is native and the model at
    least CPU_BF16_WIDTH wide; else fp32.
    """
    if device.type == "cuda":
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        works = ["bfloat16", "float16", "float32"] if bf16 else ["float16", "float32"]
    else:
        works = ["float32", "bfloat16"] if device.type == "cpu" else ["float32"]
    if name == "auto":
        wide = device.type == "cpu" and n_embd >= CPU_BF16_WIDTH and cpu_has_bf16()
        name = "bfloat16" if wide else works[0]  # type: ignore[assignment]
    if name not in works:
        raise ValueError(f"dtype={name}: not on this {device.type}; works: {', '.join(works)}")
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(name, torch.float32)


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Return the context in which matrix products run in `dtype`."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def make_scaler(device: torch.device, dtype: torch.dtype) -> torch.amp.GradScaler:
    """Return the scaler that keeps small gradients from vanishing in fp16; elsewhere idle."""
    return torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)


def rng_state(device: torch.device) -> dict[str, torch.Tensor | None]:
    """Return the states of the generators that dropout draws from."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def set_rng_state(state: dict[str, torch.Tensor | None], device: torch.device) -> None:
    """Put back what rng_state returned, as far as this device has it."""
    assert state["cpu"] is not None
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def missing_compiler(device: torch.device) -> str | None:
    """Return why torch.compile cannot run here, or None when it can."""
    names = ["g++", "clang++", "c++"] if device.type == "cpu" else ["gcc", "clang", "cc"]
    wanted = os.environ.get("CXX" if device.type == "cpu" else "CC")
    if any(shutil.which(name) for name in ([wanted] if wanted else names)):
        return None
    return f"no C compiler found ({wanted or ', '.join(names)})"


def resolve_compile(
    setting: bool | Literal["auto"], device: torch.device, run_flops: float
) -> tuple[bool, str]:
    """Return whether to compile, and a notice to print where no compiler is installed.

    auto: on a GPU; on a CPU for runs of at least CPU_COMPILE_FLOPS. An explicit true without a
    compiler is a ValueError with the reason.
    """
    reason = missing_compiler(device)
    if setting is True and reason:
        raise ValueError(f"compile=true: {reason}; install one or use --train.compile false")
    pays = device.type == "cuda" or (device.type == "cpu" and run_flops >= CPU_COMPILE_FLOPS)
    compiles = setting is True or (setting == "auto" and pays and reason is None)
    return compiles, f"{reason}: running without torch.compile" if reason else ""


def peak_flops(device: torch.device) -> float | None:
    """Return the device's dense half-precision peak in FLOP/s, or None when it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


def environment(device: torch.device, compiles: bool) -> dict[str, str | int | bool]:
    """Return what may change a run's rounding, in words that two equal machines share."""
    if device.type == "cuda":
        kind = torch.cuda.get_device_name(device)
    else:
        kind = f"{device.type} {getattr(torch.backends.cpu, 'get_cpu_capability', str)()}"
    threads = torch.get_num_threads()
    return {
        "torch": str(torch.__version__),
        "device": kind,
        "threads": threads,
        "compile": compiles,
    }
