"""Folders of shards: streams cut into files, the mark of an unfinished one, checks and counts."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from rove import shards
from rove.config import flatten
from rove.files import sha256_of, write_atomic
from rove.tokenizer import Tokenizer

EMPTY = {"tokens": 0, "max_id": 0, "text_bytes": 0}


class SplitWriter:
    """Cuts one split's stream of ids into shards; a file bears its name only when complete."""

    def __init__(
        self, folder: Path, name: str, split: str, shard_tokens: int, tokenizer: Tokenizer
    ) -> None:
        self.prefix, self.split = f"{name}_{split}_", split
        self.folder, self.shard_tokens = folder, shard_tokens
        self.eot_id, self.bytes_per_id = tokenizer.eot_id, tokenizer.token_bytes()
        self.entries: list[dict[str, Any]] = []
        self.tokens = self.documents = 0

    def write(self, ids: shards.Tokens) -> None:
        """Append ids (n,) to the stream."""
        while ids.size:
            done = self.tokens % self.shard_tokens
            part, ids = np.split(ids, [self.shard_tokens - done])
            if not done:
                name = f"{self.prefix}{len(self.entries):06d}.bin"
                self.entries.append({"file": name, "split": self.split, **EMPTY})
            entry = self.entries[-1]
            with writing(self.folder / f"{entry['file']}.tmp", "ab" if done else "wb") as file:
                file.write(b"" if done else bytes(shards.HEADER_BYTES))
                file.write(part.astype("<u2").tobytes())
            entry["tokens"] += part.size
            entry["max_id"] = max(entry["max_id"], int(part.max()))
            entry["text_bytes"] += int(self.bytes_per_id[part].sum())
            self.tokens += part.size
            self.documents += int(np.count_nonzero(part == self.eot_id))
            if done + part.size == self.shard_tokens:
                self.finish()

    def finish(self) -> None:
        """Give the shard in the making, if there is one, its header and its name."""
        if not self.entries or "sha256" in self.entries[-1]:
            return
        entry = self.entries[-1]
        path = self.folder / f"{entry['file']}.tmp"
        with writing(path, "r+b") as file:
            file.write(shards.shard_header(entry["tokens"]))
        entry["sha256"] = sha256_of(path)
        path.replace(path.with_suffix(""))


@contextmanager
def writing(path: Path, mode: str) -> Iterator[IO[bytes]]:
    """Open a file to write; an OSError (no space, no permission) names it."""
    try:
        with path.open(mode) as file:
            yield file
            if mode != "ab":
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def is_prepared(folder: Path, record: dict[str, Any]) -> bool:
    """Say whether the folder holds what is asked for; ValueError if it holds another data set."""
    manifest = None if (folder / shards.UNFINISHED).exists() else shards.read_manifest(folder)
    if manifest is None:
        return False
    there, asked = flatten(manifest.get("settings") or {}), flatten(record)
    different = [
        f"{key} {there.get(key)} (asked: {asked.get(key)})"
        for key in sorted(there | asked)
        if there.get(key) != asked.get(key)
    ]
    if different:
        raise ValueError(
            f"{folder} holds another data set: {', '.join(different)}; "
            "choose another --out_dir, or remove the folder first"
        )
    for split in ("train", "val"):
        shards.open_split(folder, split)
    return True


def start(folder: Path, name: str) -> None:
    """Mark the folder as unfinished, without the remains of a run that was stopped in it."""
    folder.mkdir(parents=True, exist_ok=True)
    marker = folder / shards.UNFINISHED
    if marker.exists():
        (folder / shards.MANIFEST).unlink(missing_ok=True)
        own = re.escape(marker.read_text()) + r"_(train|val)_\d+\.bin(\.tmp)?"
        for path in folder.iterdir():
            if re.fullmatch(own, path.name):
                path.unlink()
    if foreign := sorted(folder.glob("*.bin")):
        raise ValueError(f"{foreign[0]} belongs to no known data set; choose another --out_dir")
    write_atomic(marker, lambda file: file.write(name.encode()))


def verify(folder: Path) -> None:
    """Compare every shard with the manifest; ValueError names the first that differs."""
    manifest = shards.read_manifest(folder)
    if manifest is None:
        raise ValueError(f"{folder}: no {shards.MANIFEST}, nothing to verify against")
    for split in sorted({entry["split"] for entry in manifest["shards"]}):
        shards.open_split(folder, split)
    for entry in manifest["shards"]:
        if sha256_of(folder / entry["file"]) != entry.get("sha256"):
            raise ValueError(
                f"{folder / entry['file']}: contents differ from what {shards.MANIFEST} says; "
                "copy or prepare it again"
            )
    print(f"{folder}: {len(manifest['shards'])} shards are as {shards.MANIFEST} says")


def stats(folder: Path) -> None:
    """Print what each split holds; documents are counted by their end-of-text ids."""
    manifest = shards.read_manifest(folder) or {"shards": []}
    for split in ("train", "val"):
        data = shards.open_split(folder, split)
        n_docs = sum(np.count_nonzero(shard == data.tokenizer["eot_id"]) for shard in data.shards)
        n_bytes = sum(e.get("text_bytes", 0) for e in manifest["shards"] if e["split"] == split)
        per_token = f"{n_bytes / data.n_tokens:.3f}" if n_bytes else "unknown"
        print(
            f"{split}: {len(data.files)} shards, {n_docs:,} documents, {data.n_tokens:,} tokens, "
            f"{per_token} bytes/token, {data.n_tokens / max(n_docs, 1):,.1f} tokens/document"
        )
