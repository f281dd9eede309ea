"""Looking at a finished folder: its shards against the manifest, and what they hold."""

from pathlib import Path
from typing import Any

import numpy as np

from rove import shards
from rove.files import sha256_of
from rove.tokenizer import Ids, Tokenizer, load_tokenizer

N_FREQUENT = 20


def verify(folder: Path) -> None:
    """Compare every shard with the manifest; ValueError names the first that differs."""
    from tqdm import tqdm

    for split in splits_of(folder):
        shards.open_split(folder, split)
    manifest = shards.read_manifest(folder)
    if manifest is None:
        raise ValueError(f"{folder}: no {shards.MANIFEST}, nothing to verify against")
    for entry in tqdm(manifest["shards"], unit="shard", disable=None):
        if sha256_of(folder / entry["file"]) != entry.get("sha256"):
            raise ValueError(
                f"{folder / entry['file']}: contents differ from what {shards.MANIFEST} says; "
                "copy or prepare it again"
            )
    print(f"{folder}: {len(manifest['shards'])} shards are as {shards.MANIFEST} says")


def stats(folder: Path) -> None:
    """Print what each split holds; documents are counted by their end-of-text ids."""
    for split in splits_of(folder):
        data = shards.open_split(folder, split)
        tokenizer = tokenizer_of(data)
        counts, lengths = count_ids(data), document_lengths(data)
        n_bytes = 0 if tokenizer is None else int(counts @ tokenizer.token_bytes())
        per_token = f"{n_bytes / data.n_tokens:.3f}" if n_bytes else "unknown"
        print(
            f"{split}: {len(data.files)} shards, {lengths.size:,} documents, "
            f"{data.n_tokens:,} tokens, {per_token} bytes/token, "
            f"{data.n_tokens / max(lengths.size, 1):,.1f} tokens/document"
        )
        print(f"  most frequent: {', '.join(_frequent(counts, tokenizer))}")
        print("  tokens of a document      documents           share of tokens")
        for line in histogram(lengths):
            print(f"  {line}")


def splits_of(folder: Path) -> list[str]:
    """Return the splits that a folder has shards of; all of them when it has none."""
    names = [path.name for path in folder.glob("*.bin")] if folder.is_dir() else []
    found = {match["split"] for name in names if (match := shards.SHARD_NAME.fullmatch(name))}
    return sorted(found) or ["train", "val"]


def count_ids(data: shards.TokenData) -> Ids:
    """Return how often each id occurs: (vocab_size,) int64."""
    size = data.tokenizer["vocab_size"]
    counts = np.zeros(2**16, dtype=np.int64)
    for shard in data.shards:
        counts += np.bincount(shard, minlength=2**16)
    if counts[size:].any():
        wrong = size + int(np.flatnonzero(counts[size:])[0])
        raise ValueError(f"{data.folder}: holds id {wrong}, outside the vocabulary of {size} ids")
    return counts[:size]


def document_starts(data: shards.TokenData) -> Ids:
    """Return where the end-of-text ids stand in the concatenation: (n_documents,) int64."""
    starts, ends = [np.empty(0, dtype=np.int64)], [0, *data.ends.tolist()]
    for shard, offset in zip(data.shards, ends, strict=False):
        starts.append(np.flatnonzero(shard == data.tokenizer["eot_id"]) + offset)
    return np.concatenate(starts)


def document_lengths(data: shards.TokenData) -> Ids:
    """Return the tokens of each document, its end-of-text id not counted: (n_documents,) int64."""
    return np.diff(document_starts(data), append=data.n_tokens) - 1


def histogram(lengths: Ids) -> list[str]:
    """Return a line for each power of two: documents of that length and their share of tokens."""
    lines, total = [], max(int(lengths.sum()), 1)
    exponents = np.zeros(lengths.size, dtype=np.int64)
    exponents[lengths > 0] = np.log2(lengths[lengths > 0]).astype(np.int64) + 1
    for exponent in range(int(exponents.max(initial=0)) + 1):
        own = lengths[exponents == exponent]
        if own.size:
            low, high = (2 ** (exponent - 1), 2**exponent - 1) if exponent else (0, 0)
            part = own.size / lengths.size
            lines.append(
                f"{low:>9,} to {high:>9,} {own.size:>13,} {part:>8.2%} {own.sum() / total:>12.2%}"
            )
    return lines


def tokenizer_of(data: shards.TokenData) -> Tokenizer | None:
    """Load the tokenizer of a split; None, with a word on why, when it cannot be had."""
    try:
        return load_tokenizer(data.tokenizer["name"])
    except ValueError as error:
        print(f"notice: {error}")
        return None


def _frequent(counts: Ids, tokenizer: Tokenizer | None) -> list[str]:
    order = [int(i) for i in np.argsort(-counts, kind="stable")[:N_FREQUENT] if counts[i]]
    total: Any = counts.sum()
    return [
        f"{i if tokenizer is None else repr(tokenizer.decode([i]))} {counts[i] / total:.2%}"
        for i in order
    ]
