"""Checkpoints: written atomically, trusted by their hash, read without running anything.

`checkpoints/step_00001000.pt` files lie beside `latest.json` and `best.json`, which name one of
them with its size and hash. A file appears under its name only when it is whole and on disk.
"""

import json
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rove.export.folder import is_export, read_export
from rove.files import sha256_of, write_atomic, write_json
from rove.gpt2 import HUB, fetch, read_gpt2
from rove.words import differences

FORMAT = 1
STEP_FILE = re.compile(r"step_\d{8,}\.pt")
KEYS = {
    *("format", "model", "model_config", "optimizer", "scaler", "step", "tokens", "rng"),
    *("tokenizer", "data", "best_val_loss", "wandb_run_id", "environment"),
}


def save_checkpoint(run: Path, checkpoint: dict[str, Any], is_best: bool, keep: int) -> Path:
    """Write a checkpoint atomically, point latest.json (and best.json) at it, prune older ones.

    checkpoint: the keys of KEYS, plain types and tensors. The last `keep` and the best are kept;
    latest.json lists them, so that they can be trusted if the newest or best.json fails. When it
    fails, nothing is pruned.
    """
    assert set(checkpoint) == KEYS, KEYS ^ set(checkpoint)
    folder = run / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    step = checkpoint["step"]
    path = folder / f"step_{step:08d}.pt"
    before = vouched_entries(folder)
    best = _entry(_pointer(folder / "latest.json", "best"))
    best = best or _entry(_pointer(folder / "best.json"))
    try:
        sha256 = write_atomic(path, lambda file: torch.save(checkpoint, file))  # type: ignore[arg-type]
        size_bytes = path.stat().st_size
        entry = {"file": path.name, "step": step, "size_bytes": size_bytes, "sha256": sha256}
        if is_best:
            best = entry | {"val_loss": checkpoint["best_val_loss"]}
        before = [old for old in before if old["step"] < step]
        latest = entry | {"older": before[: max(keep - 1, 1)], "best": best}
        write_json(folder / "latest.json", latest)
    except BaseException:  # checkpoints that nothing vouches for would pile up
        path.unlink(missing_ok=True)
        raise
    if best != _pointer(folder / "best.json"):
        write_json(folder / "best.json", best or {})
    kept = {old["file"] for old in (entry, *before[: keep - 1], best) if old}
    for file in step_files(folder):
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


def step_files(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder that bear our names, the newest first."""
    found = (path for path in folder.glob("step_*.pt") if STEP_FILE.fullmatch(path.name))
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(path.stem.split("_")[1])


def _entry(value: Any) -> dict[str, Any] | None:
    """Return what latest.json or best.json says of a checkpoint, None where that makes no sense."""
    types = {"file": str, "step": int, "size_bytes": int, "sha256": str}
    if not isinstance(value, dict) or any(type(value.get(k)) is not t for k, t in types.items()):
        return None
    return value if STEP_FILE.fullmatch(value["file"]) else None


def vouched_entries(folder: Path) -> list[dict[str, Any]]:
    """Return the checkpoints that latest.json and best.json vouch for, the newest first."""
    latest = _pointer(folder / "latest.json")
    older = latest.get("older")
    named = [latest, *(older if isinstance(older, list) else []), latest.get("best")]
    named.append(_pointer(folder / "best.json"))
    found = {entry["file"]: entry for entry in map(_entry, named[::-1]) if entry}
    return sorted(found.values(), key=lambda entry: int(entry["step"]), reverse=True)


def _pointer(path: Path, key: str | None = None) -> dict[str, Any]:
    """Return the JSON object in a file, or the one under a key of it; empty when there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return dict(content if key is None else content[key])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}


def latest_path(run: Path) -> Path | None:
    """Return the newest checkpoint of a run folder that can be trusted, None when it has none.

    It must have the size and hash that latest.json or best.json notes; otherwise, with a warning,
    the one before it is taken. Where latest.json itself is damaged or gone, files that nothing
    vouches for are taken by the checksums in them. ValueError when there are some and none is
    whole.
    """
    folder = run / "checkpoints"
    vouched = {entry["file"]: entry for entry in vouched_entries(folder)}
    named = [folder / name for name in vouched]
    others = [path for path in step_files(folder) if path.name not in vouched]
    if newest_entry(folder) is None and others:
        warnings.warn(f"{folder / 'latest.json'} is damaged or gone", stacklevel=2)
        candidates = sorted([*named, *others], key=step_of, reverse=True)
    else:
        candidates = [*named, *others]
    for path in candidates:
        if path.name in vouched and _is_as_noted(path, vouched[path.name]):
            return path
        try:
            if path.name not in vouched:
                read_checkpoint(path)
                return path
            warnings.warn(f"{path} is damaged or gone: trying the one before", stacklevel=2)
        except ValueError as error:
            warnings.warn(str(error), stacklevel=2)
    if candidates:
        remedy = f"train in another --out_dir, or remove {folder} to start over"
        raise ValueError(f"{folder}: no checkpoint there is whole; {remedy}")
    return None


def _is_as_noted(path: Path, entry: dict[str, Any]) -> bool:
    right_size = path.exists() and path.stat().st_size == entry["size_bytes"]
    return right_size and sha256_of(path) == entry["sha256"]


def newest_entry(folder: Path) -> dict[str, Any] | None:
    """Return what latest.json says of the newest checkpoint; None when it is damaged or gone."""
    return _entry(_pointer(folder / "latest.json"))


def read_checkpoint(path: Path, trusted: bool = False, mmap: bool = False) -> dict[str, Any]:
    """Read one checkpoint file onto the CPU as tensors and plain types; nothing in it runs.

    trusted: its hash has been compared; otherwise the file's own checksums are. mmap: leave in the
    file what is not looked at. Raises ValueError for a file that is no checkpoint, is damaged, or
    holds anything else.
    """
    try:
        if not trusted and (damaged := zipfile.ZipFile(path).testzip()):
            raise ValueError(f"checksum of {damaged}")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path}: refused, as it holds more than plain types") from error
    except Exception as error:  # damaged files make zipfile and torch raise many kinds
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


def load_checkpoint(path: str | Path, mmap: bool = False) -> dict[str, Any]:
    """Read a run folder's latest checkpoint, a checkpoint file, an export or a GPT-2 folder.

    hub:OWNER/NAME is a GPT-2 folder to fetch. Raises ValueError when it is none of them. What an
    export or GPT-2 does not know is None.
    """
    path = fetch(str(path).removeprefix(HUB)) if str(path).startswith(HUB) else Path(path)
    if path.is_file():
        try:
            return read_checkpoint(path, mmap=mmap)
        except ValueError as error:
            raise ValueError(f"{error}{_folder_hint(path)}") from error
    if not path.is_dir():
        raise ValueError(f"{path} does not exist; give a run, a checkpoint file or an export")
    if _is_gpt2(path):
        return {**dict.fromkeys(KEYS), "format": FORMAT, **read_gpt2(path)}
    if is_export(path) and not (path / "checkpoints").exists():
        return {**dict.fromkeys(KEYS), "format": FORMAT, **read_export(path)}
    latest = latest_path(path)
    if latest is None:
        hint = _folder_hint(path) or "; give --out_dir of a run"
        raise ValueError(f"{path} is no run folder with a checkpoint{hint}")
    return read_checkpoint(latest, trusted=True, mmap=mmap)


def _is_gpt2(folder: Path) -> bool:
    return _pointer(folder / "config.json").get("model_type") == "gpt2"


def _folder_hint(path: Path) -> str:
    """Return "; give FOLDER" where a path lies in a run, an export or a GPT-2 folder."""
    for folder in path.parents[:2]:
        if (folder / "checkpoints").is_dir() or is_export(folder) or _is_gpt2(folder):
            return f"; give the folder {folder}"
    return ""


def restore(
    path: Path, expected: dict[str, Any], model: nn.Module, optimizer: Any, scaler: Any
) -> dict[str, Any]:
    """Put a checkpoint into model, optimizer and (in fp16) scaler; return all but their states.

    expected: its `data` and `model_config`. Raises ValueError when one of them is another.
    """
    saved = read_checkpoint(path, trusted=True)
    for key, value in expected.items():
        if different := differences({key: saved[key]}, {key: value}):
            remedy = "go on with what it has, or give another --out_dir"
            raise ValueError(f"{path}: its {key} differ: {different}; {remedy}")
    model.load_state_dict(saved.pop("model"))
    own = [
        {key: group[key] for key in ("betas", "weight_decay")} for group in optimizer.param_groups
    ]
    optimizer.load_state_dict(saved.pop("optimizer"))
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        group.update(settings)  # as asked for now, which can differ from what was saved
    scaler_state = saved.pop("scaler")
    if scaler.is_enabled() and scaler_state.get("growth_interval") == scaler.get_growth_interval():
        scaler.load_state_dict(scaler_state)
    return saved
