"""Shards that others have made: fetched from the hub, checked, described by a manifest."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from rove import shards
from rove.files import sha256_of, write_json
from rove.prepare import hub
from rove.prepare.downloads import Downloads
from rove.prepare.output import remove_remains
from rove.prepare.plan import Plan
from rove.prepare.units import SPLITS
from rove.tokenizer import GPT2_EOT_ID, GPT2_VOCAB_SIZE
from rove.words import size

PARTS = "downloads"  # folder in the folder, for what is on its way


def choose(repo: str, commit: str, num_shards: int | None) -> dict[str, hub.HubFile]:
    """Return the validation shards of a data set and its first num_shards training shards."""
    files = hub.list_files(repo, commit, "", ".bin")
    matches = {name: shards.SHARD_NAME.fullmatch(name) for name in sorted(files)}
    names = {split: [n for n, m in matches.items() if m and m["split"] == split]
             for split in ("train", "val")}  # fmt: skip
    for split, found in names.items():
        if not found:
            raise ValueError(f"{repo} has no NAME_{split}_NUMBER.bin at {commit}")
    if num_shards is not None and num_shards > len(names["train"]):
        raise ValueError(f"--num_shards {num_shards}: {repo} has {len(names['train'])}")
    return {name: files[name] for name in names["val"] + names["train"][:num_shards]}


def make_plan(downloads: Downloads, folder: Path) -> Plan:
    """Plan the download; what a stopped run has fetched into the folder is there already."""
    missing = [name for name in downloads.missing() if not (folder / name).is_file()]
    total, left = (
        sum(downloads.files[name].size for name in names) for names in (downloads.files, missing)
    )
    lines = [
        f"source: {downloads.repo} at {downloads.commit}",
        f"files: {len(downloads.files)} shards, {size(total)}",
        f"download: {len(missing)} shards, {size(left)}, to {folder}",
    ]
    return Plan(lines, {folder: left})


def fetch(
    downloads: Downloads, folder: Path, settings: dict[str, Any], record: dict[str, Any]
) -> dict[str, Any]:
    """Download and check the shards; return their manifest. ValueError names a bad shard.

    record: that of a run that was stopped. Files arrive in FOLDER/downloads and are moved when they
    are checked.
    """
    from tqdm import tqdm

    entries: list[dict[str, Any]] = [
        entry for split in record.get("splits", {}).values() for entry in split["entries"]
    ]
    done = {e["file"] for e in entries if _size(folder / e["file"]) == e["size_bytes"]}
    entries = [entry for entry in entries if entry["file"] in done]
    remove_remains(folder, record, done | set(downloads.files))
    ours = done | (set(downloads.files) if record else set())
    if foreign := sorted(path for path in folder.glob("*.bin") if path.name not in ours):
        raise ValueError(f"{foreign[0]} belongs to no known data set; choose another --out_dir")
    for name in tqdm(sorted(downloads.files), unit="shard", disable=None):
        if name not in done:
            entries.append(_check(downloads.get(name), name))
            (folder / PARTS / name).replace(folder / name)
        splits = {s: {"entries": [e for e in entries if e["split"] == s]} for s in SPLITS}
        content = {"name": name.split("_")[0], "settings": settings, "splits": splits}
        content |= {"revision": downloads.commit, "position": [0, 0], "invalid": {}, "ends": []}
        write_json(folder / shards.UNFINISHED, content)
    shutil.rmtree(folder / PARTS, ignore_errors=True)
    documents = dict.fromkeys(SPLITS, 0)
    for entry in entries:
        documents[entry["split"]] += entry.pop("documents")
        del entry["size_bytes"]
    return {
        "dataset": downloads.repo,
        "revision": downloads.commit,
        "tokenizer": {"name": "gpt2", "vocab_size": GPT2_VOCAB_SIZE, "sha256": None},
        "eot_id": GPT2_EOT_ID,
        "documents": documents,
        "shards": sorted(entries, key=lambda entry: (entry["split"], entry["file"])),
        "settings": settings,
    }


def _check(path: Path, name: str) -> dict[str, Any]:
    """Return what is to be recorded of a shard that has arrived; remove it if it is none."""
    try:
        ids = shards.read_shard(path)
        if (max_id := int(ids.max())) >= GPT2_VOCAB_SIZE:
            raise ValueError(f"{path}: holds id {max_id}, outside GPT-2's vocabulary")
    except ValueError:
        path.unlink()
        raise
    match = shards.SHARD_NAME.fullmatch(name)
    assert match is not None
    return {
        "file": name,
        "split": match["split"],
        "tokens": int(ids.size),
        "max_id": max_id,
        "sha256": sha256_of(path),
        "size_bytes": path.stat().st_size,
        "documents": int(np.count_nonzero(ids == GPT2_EOT_ID)),
    }


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None
