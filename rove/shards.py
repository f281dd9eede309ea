"""Token shards on disk and the order in which training reads them.

A shard is the file format of llm.c and modded-nanogpt: a header of 256 little-endian int32
(magic, version, number of tokens, zeros) and then that many little-endian uint16 token ids.
`NAME_SPLIT_000000.bin` with SPLIT `train` or `val`; `manifest.json` beside the shards says what
they hold. A folder without a manifest is read by its headers.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from rove.manifest import MANIFEST, SHARD_NAME, UNFINISHED, compare_with_files, read_manifest
from rove.tokenizer import GPT2_EOT_ID, GPT2_VOCAB_SIZE

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 256 * 4

Tokens = np.ndarray[Any, np.dtype[Any]]


def shard_header(n_tokens: int) -> bytes:
    """Return the header of a shard that holds n_tokens, HEADER_BYTES long."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = MAGIC, VERSION, n_tokens
    return header.tobytes()


def read_shard(path: Path) -> Tokens:
    """Map a shard into memory: (n,) uint16, read-only.

    Raises ValueError, naming the file, when the header is not a shard's or the size is not what
    the header promises.
    """
    actual_bytes = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    if len(head) < HEADER_BYTES:
        raise ValueError(f"{path}: {actual_bytes} bytes is too short for a shard; prepare it again")
    magic, version, n_tokens = (int(x) for x in np.frombuffer(head, dtype="<i4")[:3])
    if (magic, version) != (MAGIC, VERSION):
        raise ValueError(
            f"{path}: not a token shard (magic {magic}, version {version}; "
            f"expected {MAGIC}, {VERSION})"
        )
    expected_bytes = HEADER_BYTES + 2 * n_tokens
    if n_tokens < 1 or actual_bytes != expected_bytes:
        raise ValueError(
            f"{path}: expected {expected_bytes} bytes for {n_tokens} tokens, found {actual_bytes}; "
            "the file is damaged: copy or prepare it again"
        )
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(n_tokens,))


@dataclass(frozen=True)
class TokenData:
    """One split of a data folder: its shards as one long sequence of token ids."""

    folder: Path
    files: tuple[Path, ...]
    shards: tuple[Tokens, ...]
    tokenizer: dict[str, Any]
    """name, vocab_size, sha256 and eot_id"""
    sha256: str
    """Hash of what the shards hold; independent of where they lie."""

    @cached_property
    def ends(self) -> Tokens:
        """Position after the last token of each shard in the concatenation: (n_shards,)."""
        return np.cumsum([shard.size for shard in self.shards])

    @property
    def n_tokens(self) -> int:
        return int(self.ends[-1])

    def read(self, start: int, stop: int) -> Tokens:
        """Return tokens [start, stop) as int64; ValueError for an id outside the vocabulary."""
        assert 0 <= start < stop <= self.n_tokens, (start, stop, self.n_tokens)
        first = int(np.searchsorted(self.ends, start, side="right"))
        parts = []
        for number in range(first, len(self.shards)):
            begin = int(self.ends[number]) - self.shards[number].size
            part = self.shards[number][max(start - begin, 0) : stop - begin].astype(np.int64)
            if part.max() >= self.tokenizer["vocab_size"]:
                raise ValueError(
                    f"{self.files[number]}: holds id {part.max()}, outside the vocabulary of "
                    f"{self.tokenizer['vocab_size']} ids ({self.tokenizer['name']})"
                )
            parts.append(part)
            if self.ends[number] >= stop:
                break
        return np.concatenate(parts)

    def windows(self, numbers: Iterable[int], block_size: int) -> Tokens:
        """Return windows as rows (B, block_size + 1) int64; a row's last token opens the next."""
        T = block_size
        return np.stack([self.read(i * T, (i + 1) * T + 1) for i in numbers])

    def n_windows(self, block_size: int) -> int:
        """Number of windows of block_size inputs, each with its targets one token on."""
        return (self.n_tokens - 1) // block_size


def open_split(
    folder: str | Path, split: str, log: Callable[[str], None] = lambda line: None
) -> TokenData:
    """Open the `train` or `val` shards of a folder, checking every file's size and header.

    Raises ValueError when the folder is missing, unfinished, holds no such shards, holds two data
    sets, disagrees with its manifest, or when a shard holds an id outside the vocabulary.
    `log` is told once when there is no manifest and the ids are taken to be GPT-2's.
    """
    folder = Path(folder)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"data folder {folder} {what}; make it with prepare_fineweb.py")
    if (folder / UNFINISHED).exists():
        raise ValueError(f"{folder}: preparation did not finish; run the same command again")
    manifest = read_manifest(folder)
    found = [(SHARD_NAME.fullmatch(path.name), path) for path in sorted(folder.glob("*.bin"))]
    by_name = {path.name: match for match, path in found if match}
    by_name = dict(sorted(by_name.items(), key=lambda item: int(item[1]["number"])))
    if manifest is None:
        if len({match["name"] for match in by_name.values()}) > 1:
            raise ValueError(f"{folder}: shards of several data sets and no {MANIFEST}")
        tokenizer: dict[str, Any] = {"name": "gpt2", "sha256": None}
        tokenizer |= {"vocab_size": GPT2_VOCAB_SIZE, "eot_id": GPT2_EOT_ID}
        entries = [{"file": name, "split": by_name[name]["split"]} for name in by_name]
    else:
        tokenizer = {**manifest["tokenizer"], "eot_id": manifest["eot_id"]}
        entries = manifest["shards"]
        compare_with_files(folder, set(by_name), entries)
    entries = [entry for entry in entries if entry["split"] == split]
    if not entries:
        raise ValueError(f"{folder}: no NAME_{split}_000000.bin; make it with prepare_fineweb.py")
    if manifest is None:
        log(f"{folder} has no {MANIFEST}: taking its ids to be GPT-2's ({GPT2_VOCAB_SIZE})")
    files = tuple(folder / entry["file"] for entry in entries)
    shards = tuple(read_shard(path) for path in files)
    for path, shard, entry in zip(files, shards, entries, strict=True):
        if entry.get("tokens", shard.size) != shard.size:
            raise ValueError(f"{path}: {shard.size} tokens, {MANIFEST} says {entry['tokens']}")
        if entry.get("max_id", 0) >= tokenizer["vocab_size"]:
            raise ValueError(
                f"{path}: holds id {entry['max_id']}, outside the vocabulary of "
                f"{tokenizer['vocab_size']} ids ({tokenizer['name']})"
            )
    return TokenData(folder, files, shards, tokenizer, _content_hash(shards, entries))


def _content_hash(shards: tuple[Tokens, ...], entries: list[dict[str, Any]]) -> str:
    """Hash the manifest's hashes; without them, sizes and the two ends of every shard."""
    digest = hashlib.sha256()
    for shard, entry in zip(shards, entries, strict=True):
        ends = shard[:4096].tobytes() + shard[-4096:].tobytes()
        digest.update(str(shard.size).encode() + str(entry.get("sha256", "")).encode() + ends)
    return digest.hexdigest()


@lru_cache(maxsize=2)
def window_order(n_windows: int, seed: int, epoch: int) -> Tokens:
    """Return the order in which an epoch visits the windows: (n_windows,) int64.

    It depends on (seed, epoch) alone. The windows are sorted by the raw words of a Philox
    generator, a counter-based cipher whose stream is fixed by its publication (Salmon et al.
    2011), so a new library version cannot change the order of a saved run.
    """
    words = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(n_windows)
    return np.argsort(words, kind="stable")


@dataclass(frozen=True)
class BatchOrder:
    """The endless order of training windows, the same for any ranks, micro-batch or restart."""

    n_windows: int
    seed: int

    def indices(self, start: int, stop: int) -> Iterator[int]:
        """Yield the windows of sequences [start, stop) of the endless order."""
        for number in range(start, stop):
            epoch, position = divmod(number, self.n_windows)
            yield int(window_order(self.n_windows, self.seed, epoch)[position])

    def part(self, step: int, sequences: int, part: int, n_parts: int) -> list[int]:
        """Return the windows of one of n_parts equal parts of update `step` (the first is 1)."""
        size = sequences // n_parts
        first = (step - 1) * sequences + part * size
        return list(self.indices(first, first + size))

    def fingerprint(self, n_first: int = 256) -> str:
        """Hash the first indices: equal for two runs that read the same windows in order."""
        first = np.fromiter(self.indices(0, n_first), dtype="<i8")
        return hashlib.sha256(first.tobytes()).hexdigest()


def split_batch(
    tokens_per_step: int, micro_batch_size: int, block_size: int, world_size: int
) -> tuple[int, int]:
    """Return (sequences of one forward pass on one rank, micro-steps per update).

    micro_batch_size is the most that memory takes: the largest number up to it that divides a
    rank's share is used. Raises ValueError with the nearest tokens_per_step that ranks divide.
    """
    unit = world_size * block_size
    if tokens_per_step % unit:
        below = tokens_per_step // unit * unit
        near = " or ".join(str(n) for n in (below, below + unit) if n)
        parts = f"{world_size} ranks x {block_size} tokens"
        raise ValueError(f"train.tokens_per_step={tokens_per_step}: not n x {parts}; try {near}")
    share = tokens_per_step // unit
    size = max(n for n in range(1, min(micro_batch_size, share) + 1) if share % n == 0)
    return size, share // size
