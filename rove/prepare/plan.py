"""What preparing will cost, said before it starts: downloads, disk and its room, time."""

import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

from rove.prepare import hub
from rove.prepare.sources import Source
from rove.shards import HEADER_BYTES
from rove.tokenizer import Tokenizer
from rove.words import duration, size

BYTES_PER_TOKEN = {"gpt2": 4.5, "byte": 1.0}  # rough, for the estimate of size
GPT2_BYTES_PER_TOKEN_OF_CODE = 2.1
USUAL_BYTES_PER_S = 4e6  # of text in one process, where it cannot be measured
SHARE_OF_RATE = 0.8  # what several processes reach of it each, by bench/prepare.py


@dataclass(frozen=True)
class Plan:
    """What goes where and what it costs."""

    lines: list[str]
    needed: dict[Path, int]
    """bytes that will be written below each folder"""
    remedy: str = "make room, or set --out_dir to another disk"
    """where a disk has less room"""

    def check_room(self) -> None:
        """Raise ValueError when a disk has less room than is needed."""
        for folder, n_bytes, free in self._disks():
            if n_bytes > free:
                room = f"{size(n_bytes)} are needed, {size(free)} are free"
                raise ValueError(f"{folder}: {room}; {self.remedy}")

    def __str__(self) -> str:
        disks = [
            f"disk: {size(n_bytes)} needed on disk under {folder}, {size(free)} free"
            for folder, n_bytes, free in self._disks()
        ]
        return "\n".join(self.lines + disks)

    def _disks(self) -> list[tuple[Path, int, int]]:
        """Return (first folder, bytes needed, bytes free) of each disk."""
        disks: dict[int, tuple[Path, int, int]] = {}
        for folder, n_bytes in self.needed.items():
            there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
            before = disks.get(there.stat().st_dev)
            first, n_before = (before[0], before[1]) if before else (folder, 0)
            free = shutil.disk_usage(there).free
            disks[there.stat().st_dev] = first, n_before + n_bytes, free
        return list(disks.values())


def make_plan(
    source: Source,
    tokenizer_name: str,
    tokenizer: Tokenizer | None,
    folder: Path,
    num_workers: int,
    shard_tokens: int,
    n_files_done: int = 0,
) -> Plan:
    """Plan the preparation of a source; tokenizer: its rate is measured, None: the usual one.

    n_files_done: files that a stopped run has read and does not need again.
    """
    at = f" at {source.revision}" if source.revision else ""
    lines = [f"source: {source.dataset}{at}"]
    n_tokens, needed = expected_tokens(source, tokenizer_name), {}
    if not source.sizes:
        lines.append("files: size unknown, streamed")
    else:
        lines.append(f"files: {len(source.sizes)} files, {size(sum(source.sizes.values()))}")
    if source.downloads is not None:
        cache, todo = hub.cache_folder(), sorted(source.sizes)[n_files_done:]
        missing = [name for name in source.downloads.missing() if name in todo]
        sizes = sorted((source.sizes[name] for name in missing), reverse=True)
        lines.append(f"download: {len(missing)} files, {size(sum(sizes))}, to {cache}")
        lines += [f"  {name}, {size(source.sizes[name])}" for name in missing]
        at_once = (
            len(sizes) if source.downloads.keep else files_at_once(source, n_tokens, shard_tokens)
        )
        needed[cache] = sum(sizes[:at_once])
    if source.sizes:
        n_shards = max(2, -(-n_tokens // shard_tokens))
        lines.append(f"text: about {size(source.text_bytes)}, {n_tokens / 1e6:,.1f} M tokens")
        there = sum(path.stat().st_size for path in folder.glob("*.bin*"))
        needed[folder] = max(0, 2 * n_tokens + n_shards * HEADER_BYTES - there)
        room = size(2 * n_tokens)
        lines.append(f"output: about {room} in {n_shards} shards or one more, to {folder}")
    rate = USUAL_BYTES_PER_S if tokenizer is None else measure_rate(tokenizer)
    how = "assumed" if tokenizer is None else "measured here"
    work = f"{num_workers} workers, {tokenizer_name}, {rate / 1e6:,.1f} MB/s each ({how})"
    if source.sizes:
        took = duration(source.text_bytes / (SHARE_OF_RATE * rate * num_workers))
        work = f"about {took} of tokenizing, the download apart: {work}"
    made = Plan([*lines, f"time: {work}"], needed)
    if source.downloads is None:
        return made
    free = "use --delete_downloads, " if source.downloads.keep else ""
    return replace(made, remedy=f"make room, {free}or set HF_HOME or --out_dir to another disk")


def files_at_once(source: Source, n_tokens: int, shard_tokens: int) -> int:
    """Return how many files are there at most when they are freed on the way.

    One is read, one arrives, and the shard in the making holds text of the others.
    """
    return 2 + -(-shard_tokens * len(source.sizes) // max(n_tokens, 1))


def expected_tokens(source: Source, tokenizer_name: str) -> int:
    """Estimate the tokens of a source; 0 when its size is unknown."""
    per_token = BYTES_PER_TOKEN[tokenizer_name]
    if (source.dataset, tokenizer_name) == ("python-stdlib", "gpt2"):
        per_token = GPT2_BYTES_PER_TOKEN_OF_CODE
    return int(source.text_bytes / per_token)


def measure_rate(tokenizer: Tokenizer, seconds: float = 0.3) -> float:
    """Return the bytes per second that one process tokenizes of English text."""
    import pydoc_data.topics as topics

    texts = list(topics.topics.values())
    n_bytes, start, number = 0, time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        tokenizer.encode(texts[number % len(texts)])
        n_bytes += len(texts[number % len(texts)].encode())
        number += 1
    return n_bytes / (time.perf_counter() - start)
