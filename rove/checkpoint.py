"""Run folders: atomic checkpoints, strict loading, one writer.

A run folder holds config.yaml, metrics.jsonl, .lock, eval/ and checkpoints/, where
`step_00001000.pt` files lie beside `latest.json` and `best.json`, which name one of them with its
size and hash. A file appears under its name only when it is whole and on disk.
"""

import fcntl
import json
import pickle
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import torch
import yaml
from torch import Tensor, nn

from rove.config import flatten, load, to_dict
from rove.files import sha256_of, write_atomic, write_json

FORMAT = 1
KEYS = {
    *("format", "model", "model_config", "optimizer", "scaler", "step", "tokens", "rng"),
    *("tokenizer", "data", "best_val_loss", "wandb_run_id", "environment"),
}


def lock_run(run: Path) -> IO[str]:
    """Take the folder's only writer's place until the returned file is closed or the process ends.

    Raises ValueError while another process holds it. What a killed writer left half-written goes.
    """
    run.mkdir(parents=True, exist_ok=True)
    lock = (run / ".lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ValueError(f"{run}: another process is training here; end it first") from None
    for temporary in [*run.glob("*.tmp"), *run.glob("checkpoints/*.tmp")]:
        temporary.unlink()
    return lock


def find_run(
    run: Path, config: Any, resume: bool, fixed: tuple[str, ...], free: tuple[str, ...]
) -> Path | None:
    """Return the checkpoint to go on from, or None for a run that starts (or never saved).

    Raises ValueError when the folder holds a run and `resume` is false, or when a setting whose
    dotted key begins with one of `fixed` differs from the run's; other differences are printed,
    but for those in `free`.
    """
    if not any((run / name).exists() for name in ("config.yaml", "metrics.jsonl", "checkpoints")):
        return None
    if not resume:
        ways = "--train.resume auto continues it, another --out_dir starts a new one"
        raise ValueError(f"{run} holds a run: {ways}")
    if (run / "config.yaml").exists():
        saved = flatten(to_dict(load(type(config), ["--config", str(run / "config.yaml")])))
        for key, value in flatten(to_dict(config)).items():
            if value != saved[key] and key.startswith(fixed):
                raise ValueError(f"{key}={value}: the run in {run} has {saved[key]}; keep that")
            if value != saved[key] and key not in free:
                print(f"resume: {key} was {saved[key]}, is now {value}")
    return latest_path(run)


def save_checkpoint(run: Path, checkpoint: dict[str, Any], is_best: bool, keep: int) -> Path:
    """Write a checkpoint atomically, point latest.json (and best.json) at it, prune older ones.

    checkpoint: the keys of KEYS, plain types and tensors. The last `keep` and the best are kept;
    latest.json lists those before it too, so that they can be trusted if it fails.
    """
    assert set(checkpoint) == KEYS, KEYS ^ set(checkpoint)
    folder = run / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{checkpoint['step']:08d}.pt"
    sha256 = write_atomic(path, lambda file: torch.save(checkpoint, file))  # type: ignore[arg-type]
    entry = {"file": path.name, "step": checkpoint["step"], "size_bytes": path.stat().st_size}
    entry["sha256"] = sha256
    older = [old for old in _entries(folder) if old["file"] != path.name]
    if is_best:
        write_json(folder / "best.json", {**entry, "val_loss": checkpoint["best_val_loss"]})
    write_json(folder / "latest.json", {**entry, "older": older[:keep]})
    best = _pointer(folder / "best.json").get("file")
    kept = {path.name, best, *(old["file"] for old in older[: keep - 1])}
    for file in folder.glob("step_*.pt"):
        if file.name not in kept:
            file.unlink()
    return path


def try_to_save(run: Path, checkpoint: dict[str, Any], is_best: bool, keep: int) -> str | None:
    """Save as save_checkpoint does; return what went wrong with the disk, None if nothing."""
    try:
        save_checkpoint(run, checkpoint, is_best, keep)
        return None
    except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
        return " ".join(str(error).split())[:200] or repr(error)


def _entries(folder: Path) -> list[dict[str, Any]]:
    """Return the checkpoints that latest.json vouches for, the newest first."""
    latest = _pointer(folder / "latest.json")
    older = latest.pop("older", [])
    keys = {"file", "step", "size_bytes", "sha256"}
    return [dict(entry) for entry in (latest, *older) if keys <= set(entry)]


def _pointer(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def run_of(checkpoint: str | Path) -> Path:
    """Return the run folder of a checkpoint argument, or the folder that a lone file lies in."""
    path = Path(checkpoint)
    if path.is_dir():
        return path
    return path.parent.parent if path.parent.name == "checkpoints" else path.parent


def read_run_config(run: Path) -> dict[str, Any]:
    """Return config.yaml of a run folder as a plain dict; empty when there is none to read."""
    try:
        return dict(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, yaml.YAMLError):
        return {}


def latest_path(run: Path) -> Path | None:
    """Return the newest checkpoint of a run folder that can be trusted, None when it has none.

    It must have the size and hash that latest.json notes; otherwise, with a warning, the one
    before it is taken. Raises ValueError when there are some and none is whole.
    """
    folder = run / "checkpoints"
    for entry in _entries(folder):
        path = folder / entry["file"]
        right_size = path.exists() and path.stat().st_size == entry["size_bytes"]
        if right_size and sha256_of(path) == entry["sha256"]:
            return path
        warnings.warn(f"{path} is damaged or gone: trying the one before", stacklevel=2)
    for path in sorted(folder.glob("step_*.pt"), reverse=True):  # no latest.json to go by
        try:
            read_checkpoint(path)
            return path
        except ValueError as error:
            warnings.warn(str(error), stacklevel=2)
    if any(folder.glob("step_*.pt")):
        raise ValueError(f"{folder}: no checkpoint there is whole; train in another --out_dir")
    return None


def read_checkpoint(path: Path, trusted: bool = False) -> dict[str, Any]:
    """Read one checkpoint file onto the CPU as tensors and plain types; nothing in it runs.

    trusted: its hash has been compared; otherwise the file's own checksums are. Raises ValueError
    for a file that is no checkpoint, is damaged, or holds anything else.
    """
    try:
        if not trusted and (damaged := zipfile.ZipFile(path).testzip()):
            raise ValueError(f"checksum of {damaged}")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path}: refused, as it holds more than plain types") from error
    except (RuntimeError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path}: no checkpoint, or a damaged one ({error!r:.80})") from error
    if not _is_checkpoint(checkpoint):
        raise ValueError(f"{path}: not a checkpoint of this project, format {FORMAT}")
    return dict(checkpoint) | {"file": str(path)}


def _is_checkpoint(found: Any) -> bool:
    """Whether it has the keys of one, and what scripts read of them has the right types."""
    if not isinstance(found, dict) or KEYS - set(found) or type(found["format"]) is not int:
        return False
    dicts = all(isinstance(found[key], dict) for key in ("model", "model_config", "tokenizer"))
    return (
        dicts
        and found["format"] == FORMAT
        and all(isinstance(value, Tensor) for value in found["model"].values())
        and {"name", "vocab_size", "sha256", "eot_id"} <= set(found["tokenizer"])
        and found["tokenizer"]["vocab_size"] == found["model_config"].get("vocab_size")
    )


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a run folder's latest checkpoint or a checkpoint file; ValueError when neither."""
    path = Path(path)
    if path.is_file():
        return read_checkpoint(path)
    if not path.is_dir():
        raise ValueError(f"{path} does not exist; give a run folder or a checkpoint file")
    latest = latest_path(path)
    if latest is None:
        raise ValueError(f"{path} is no run folder with a checkpoint; give --out_dir of a run")
    return read_checkpoint(latest, trusted=True)


def restore(
    path: Path, fingerprint: dict[str, Any], model: nn.Module, optimizer: Any, scaler: Any
) -> dict[str, Any]:
    """Put a checkpoint into model, optimizer and (in fp16) scaler; return all but their states.

    Raises ValueError when it was trained on other data or in another order.
    """
    saved = read_checkpoint(path, trusted=True)
    if saved["data"] != fingerprint:
        raise ValueError(f"{path}: was trained on other data or in another order than asked for")
    model.load_state_dict(saved.pop("model"))
    optimizer.load_state_dict(saved.pop("optimizer"))
    scaler_state = saved.pop("scaler")
    if scaler_state["growth_interval"] == scaler.get_growth_interval():
        scaler.load_state_dict(scaler_state)
    return saved
