"""Writing shards: a stream of ids cut into files that bear their names when they are whole."""

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from rove import shards
from rove.files import sha256_of
from rove.tokenizer import Ids

EMPTY = {"tokens": 0, "max_id": 0, "crc32": 0}


class SplitWriter:
    """Cuts one split's stream of ids into shards; a file bears its name only when complete."""

    def __init__(
        self,
        folder: Path,
        name: str,
        split: str,
        shard_tokens: int,
        eot_id: int,
        bytes_per_id: Ids | None,
    ) -> None:
        """bytes_per_id: (vocab_size,), None where the vocabulary is not at hand."""
        self.prefix, self.split = f"{name}_{split}_", split
        self.folder, self.shard_tokens = folder, shard_tokens
        self.eot_id, self.bytes_per_id = eot_id, bytes_per_id
        self.entries: list[dict[str, Any]] = []
        self.tokens = self.documents = 0

    def write(self, ids: Ids) -> None:
        """Append ids (n,) to the stream."""
        while ids.size:
            done = self.tokens % self.shard_tokens
            part, ids = np.split(ids, [self.shard_tokens - done])
            if not done:
                name = f"{self.prefix}{len(self.entries):06d}.bin"
                self.entries.append({"file": name, "split": self.split, **EMPTY})
            entry, data = self.entries[-1], part.astype("<u2").tobytes()
            with writing(self.folder / f"{entry['file']}.tmp", "ab" if done else "wb") as file:
                file.write(b"" if done else bytes(shards.HEADER_BYTES))
                file.write(data)
            entry["tokens"] += part.size
            entry["max_id"] = max(entry["max_id"], int(part.max()))
            if self.bytes_per_id is not None:
                n_bytes = int(self.bytes_per_id[part].sum())
                entry["text_bytes"] = entry.get("text_bytes", 0) + n_bytes
            entry["crc32"] = zlib.crc32(data, entry["crc32"])
            self.tokens += part.size
            self.documents += int(np.count_nonzero(part == self.eot_id))
            if done + part.size == self.shard_tokens:
                self.finish()

    def finish(self) -> None:
        """Give the shard in the making, if there is one, its header, its check and its name."""
        if not self.entries or "sha256" in self.entries[-1]:
            return
        entry = self.entries[-1]
        path = self.folder / f"{entry['file']}.tmp"
        with writing(path, "r+b") as file:
            file.write(shards.shard_header(entry["tokens"]))
        entry["sha256"] = sha256_of(path)
        if _crc32_of(path) != entry.pop("crc32"):
            raise ValueError(f"{path}: holds other bytes than were written; check the disk")
        path.replace(path.with_suffix(""))

    @property
    def finished_tokens(self) -> int:
        """Tokens in shards that are complete and checked."""
        return sum(entry["tokens"] for entry in self.entries if "sha256" in entry)

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, after all that was written is on the disk."""
        if self.entries and "sha256" not in self.entries[-1]:
            with writing(self.folder / f"{self.entries[-1]['file']}.tmp", "r+b"):
                pass
        return {"entries": self.entries, "documents": self.documents}

    def restore(self, state: dict[str, Any]) -> None:
        """Cut the folder back to a state; ValueError when files are missing, short or damaged."""
        for entry in state["entries"]:
            path, size = self.folder / entry["file"], shards.HEADER_BYTES + 2 * entry["tokens"]
            temporary = path.with_name(f"{path.name}.tmp")
            if "sha256" not in entry and path.exists():  # it was completed after the record
                path.replace(temporary)
            there = path if "sha256" in entry else temporary
            if not there.is_file() or there.stat().st_size < size:
                raise ValueError(f"{there}: is missing or too short")
            os.truncate(there, size)
            if "sha256" not in entry and _crc32_of(there) != entry["crc32"]:
                raise ValueError(f"{there}: is damaged")
        self.entries, self.documents = state["entries"], state["documents"]
        self.tokens = sum(entry["tokens"] for entry in self.entries)


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


def _crc32_of(path: Path) -> int:
    """Return the checksum of a shard's tokens."""
    value = 0
    with path.open("rb") as file:
        file.seek(shards.HEADER_BYTES)
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value
