"""What the benchmarks share: sides that take turns, medians and ratios, a peer's code by path."""

import contextlib
import importlib.util
import multiprocessing
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rove import device as dev
from rove.tracking import git_commit

Times = dict[str, list[float]]


Make = Callable[[], Callable[[], object]]  # in its own process: prepare, return what is timed


def alternate(sides: dict[str, Make], repeats: int, warm_up: int = 1, device: str = "cpu") -> Times:
    """Return the seconds of `repeats` calls of each side, taken in turns after warm_up rounds.

    Turns, because a machine's speed drifts: only ratios of medians from one run mean anything; in
    an order that is drawn anew for each round, so that nobody always follows the same one. Each
    side lives in a process of its own, so that none profits from what another sets or allocates.
    """
    context = multiprocessing.get_context("spawn")
    workers = {}
    for name, make in sides.items():
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(make, there, device), daemon=True)
        process.start()
        there.close()
        workers[name] = (process, here)
    times: Times = {name: [] for name in sides}
    try:
        order, draw = list(workers.items()), random.Random(0)
        for number in range(warm_up + repeats):
            draw.shuffle(order)
            for name, (_, pipe) in order:
                pipe.send("go")
                seconds = pipe.recv()
                if number >= warm_up:
                    times[name].append(seconds)
    except (EOFError, ConnectionError):
        process = workers[name][0]
        process.join(30)
        killed = f"was ended by signal {-(process.exitcode or 0)}, 9 may be for want of memory"
        how = killed if (process.exitcode or 0) < 0 else "failed; its traceback stands above"
        raise ValueError(f"side {name!r} {how}") from None
    finally:
        for process, pipe in workers.values():
            pipe.close()
            process.join(30)
    return times


def _serve(make: Make, pipe: Any, device: str) -> None:
    side = make()
    with contextlib.suppress(EOFError):
        while pipe.recv():
            start = time.perf_counter()
            side()
            if device != "cpu":
                torch.accelerator.synchronize()
            pipe.send(time.perf_counter() - start)


def summary(times: Times, base: str, **more: Any) -> dict[str, Any]:
    """Return by side the median, spread (quartiles) and how many times faster than `base` it is.

    Ratios are those of the medians; `faster_low` and `faster_high` are the quartiles of the ratios
    within a round.
    """
    result: dict[str, Any] = {"base": base, **more}
    for name, own in times.items():
        ratios = [b / x for b, x in zip(times[base], own, strict=True)]
        low, high = (_quartile(ratios, q) for q in (1, 3))
        median = statistics.median(own)
        result[name] = {
            "median_s": median,
            "quartiles_s": [_quartile(own, 1), _quartile(own, 3)],
            "faster": statistics.median(times[base]) / median,
            "faster_low": low,
            "faster_high": high,
            "times_s": own,
        }
    return result


def _quartile(values: list[float], number: int) -> float:
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=4, method="inclusive")[number - 1]


def show(result: dict[str, Any], base: str) -> None:
    """Print a line for each side of a summary."""
    for name, row in result.items():
        if isinstance(row, dict) and "median_s" in row:
            spread = f"[{row['faster_low']:.2f}, {row['faster_high']:.2f}]"
            ratio = f"{row['faster']:6.2f} x {spread} as fast as {base}" if name != base else ""
            print(f"  {name:28s} {row['median_s'] * 1e3:10.1f} ms  {ratio}")


def described(settings: Any, device: torch.device, compiles: bool = False) -> dict[str, Any]:
    """Return what a JSON of figures says of itself: settings, machine, versions, commits."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text(encoding="utf-8").splitlines() if cpu.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    peer = getattr(settings, "peer", None)
    return {
        "settings": vars(settings),
        "device": dev.environment(device, compiles),
        "cpu": models[0] if models else platform.processor(),
        "python": platform.python_version(),
        "commit": git_commit(),
        "peer_commit": git_commit(Path(peer)) if peer is not None else None,
    }


def make_products(dtype: torch.dtype, device: str, size: int = 2048) -> Callable[[], object]:
    """Return a call that multiplies two square matrices, 2 size^3 FLOPs: the device's ceiling."""
    a = torch.randn(size, size, device=device).to(dtype)
    return lambda: torch.mm(a, a)


def peer_module(folder: str, file: str) -> Any:
    """Import one file of a peer's checkout under a name of its own, writing nothing there.

    ValueError if it has none, or one that cannot be imported.
    """
    path = Path(folder) / file
    if not path.is_file():
        raise ValueError(f"--peer {folder}: has no {file}; give a checkout of nanoGPT")
    spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever is wrong with their file
        raise ValueError(f"--peer {folder}: {file} cannot be imported: {error!r:.120}") from error
    finally:
        sys.dont_write_bytecode = writes
    if not (hasattr(module, "GPT") and hasattr(module, "GPTConfig")):
        raise ValueError(f"--peer {folder}: {file} has no GPT; give a checkout of nanoGPT")
    return module


def check_settings(settings: Any) -> None:
    """Raise ValueError for a size below 1, heads that do not divide, or a folder that is not there.

    Sides are made in other processes, whose errors are tracebacks, and an --out that cannot be
    written would lose what was measured.
    """
    for key, value in vars(settings).items():
        if type(value) is int and value < 1:
            raise ValueError(f"--{key} {value}: must be at least 1")
    n_embd, n_head = getattr(settings, "n_embd", 64), getattr(settings, "n_head", 1)
    if n_embd % (2 * n_head):
        raise ValueError(f"--n_embd {n_embd}: must be --n_head {n_head} times an even number")
    why = dev.missing_compiler(dev.resolve_device("auto"))
    if getattr(settings, "compile", False) and why:
        raise ValueError(f"--compile true: {why}; install one or use --compile false")
    files = [getattr(settings, key, None) for key in ("out", "profile")]
    if None not in files and Path(files[0]).absolute() == Path(files[1]).absolute():
        raise ValueError(f"--out and --profile {files[0]}: name two files")
    for key in ("out", "profile"):
        if (file := getattr(settings, key, None)) is None:
            continue
        if Path(file).is_dir() or not os.access(Path(file).parent, os.W_OK):
            raise ValueError(f"--{key} {file}: cannot be written; name a file in a folder")


def peer_gpt(folder: str, **sizes: Any) -> Any:
    """Return nanoGPT's model of these sizes, without biases, as its train.py makes it."""
    module = peer_module(folder, "model.py")
    return module.GPT(module.GPTConfig(dropout=0.0, bias=False, vocab_size=50304, **sizes))
