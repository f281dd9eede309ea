"""Shards that others have made: fetched from the hub, checked, described by a manifest."""

import contextlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from rove import shards
from rove.files import sha256_of, write_json
from rove.prepare import hub
from rove.prepare.plan import Plan, show_size
from rove.tokenizer import GPT2_EOT_ID, GPT2_VOCAB_SIZE


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


def make_plan(downloads: hub.Downloads, folder: Path) -> Plan:
    """Plan the download."""
    missing = downloads.missing()
    total, left = (
        sum(downloads.files[name].size for name in names) for names in (downloads.files, missing)
    )
    lines = [
        f"source: {downloads.repo} at {downloads.commit}",
        f"files: {len(downloads.files)} shards, {show_size(total)}",
        f"download: {len(missing)} shards, {show_size(left)}, to {folder}",
    ]
    return Plan(lines, {folder: left})


def fetch(downloads: hub.Downloads, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Download and check the shards; return their manifest. ValueError names a bad shard."""
    from tqdm import tqdm

    folder.mkdir(parents=True, exist_ok=True)
    if foreign := sorted(p for p in folder.glob("*.bin") if p.name not in downloads.files):
        raise ValueError(f"{foreign[0]} belongs to no known data set; choose another --out_dir")
    record = {"name": "", "settings": settings, "revision": downloads.commit, "splits": {}}
    write_json(folder / shards.UNFINISHED, record)
    entries, documents = [], {"train": 0, "val": 0}
    for name in tqdm(sorted(downloads.files), unit="shard", disable=None):
        ids = shards.read_shard(downloads.get(name))
        if (max_id := int(ids.max())) >= GPT2_VOCAB_SIZE:
            raise ValueError(f"{folder / name}: holds id {max_id}, outside GPT-2's vocabulary")
        split = "val" if "_val_" in name else "train"
        documents[split] += int(np.count_nonzero(ids == GPT2_EOT_ID))
        entry = {"file": name, "split": split, "tokens": int(ids.size), "max_id": max_id}
        entries.append({**entry, "sha256": sha256_of(folder / name)})
    shutil.rmtree(folder / ".cache" / "huggingface", ignore_errors=True)  # the client's notes
    with contextlib.suppress(OSError):
        (folder / ".cache").rmdir()
    return {
        "dataset": downloads.repo,
        "revision": downloads.commit,
        "tokenizer": {"name": "gpt2", "vocab_size": GPT2_VOCAB_SIZE, "sha256": None},
        "eot_id": GPT2_EOT_ID,
        "documents": documents,
        "shards": sorted(entries, key=lambda entry: (entry["split"], entry["file"])),
        "settings": settings,
    }
