"""manifest.json: what the shards of a folder hold."""

import json
import re
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
UNFINISHED = "manifest.json.unfinished"  # present while prepare writes; such a folder is refused
SHARD_NAME = re.compile(r"(?P<name>[^/\\]+)_(?P<split>train|val)_(?P<number>\d+)\.bin")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the folder's manifest, or None when it has none; ValueError when it is unreadable."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        _check_manifest(manifest)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: not a manifest of this project ({error!r:.100})") from error
    return dict(manifest)


def _check_manifest(manifest: Any) -> None:
    """Raise an error when a manifest lacks what scripts read, or holds something else there."""
    tokenizer, shards = manifest["tokenizer"], manifest["shards"]
    numbers = [tokenizer["vocab_size"], manifest["eot_id"]]
    for shard in shards:
        if f"_{shard['split']}_" not in shard["file"] or not SHARD_NAME.fullmatch(shard["file"]):
            raise ValueError(f"shard {shard['file']}")
        numbers += [shard.get(key, 0) for key in ("tokens", "max_id", "text_bytes")]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a count that is no whole number")
    if not manifest["eot_id"] < tokenizer["vocab_size"] <= 2**16 or not tokenizer["name"]:
        raise ValueError(f"tokenizer {tokenizer}, end-of-text {manifest['eot_id']}")
    if not isinstance(tokenizer["name"], str) or type(tokenizer.get("sha256")) not in (
        str,
        type(None),
    ):
        raise ValueError(f"tokenizer {tokenizer}")
    if not shards or len({shard["file"] for shard in shards}) < len(shards):
        raise ValueError("no shards, or one listed twice")
    if not isinstance(manifest.get("settings", {}), dict):
        raise ValueError("settings")


def compare_with_files(folder: Path, names: set[str], entries: list[dict[str, Any]]) -> None:
    """Raise ValueError for a listed shard that is not there, and for one that is not listed."""
    listed = {entry["file"] for entry in entries}
    if missing := sorted(listed - names):
        raise ValueError(f"{folder / missing[0]}: listed in {MANIFEST} but missing")
    if extra := sorted(names - listed):
        raise ValueError(f"{folder / extra[0]}: not listed in {MANIFEST}; move it elsewhere")
