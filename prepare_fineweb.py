"""Turn text into token shards: FineWeb-Edu, any other text, or the embedded corpus.

    python prepare_fineweb.py --tokenizer byte                    to data/stdlib-byte
    python prepare_fineweb.py --source fineweb-edu                to data/fineweb_edu_10B
    python prepare_fineweb.py --source files --files 'books/**/*.jsonl.zst' --out_dir data/books
    python prepare_fineweb.py verify data/stdlib-byte
    python prepare_fineweb.py stats data/stdlib-byte

Every document is preceded by the end-of-text id and may cross from one shard into the next. What
is written depends on the source and the settings alone, not on the number of workers. A run that
was stopped starts over with the same command; a finished data set is never overwritten.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rove import shards, sources
from rove.config import load, user_errors
from rove.files import write_json
from rove.tokenizer import Tokenizer, encode_batches, load_tokenizer
from rove.writer import SplitWriter, is_prepared, start, stats, verify

DESCRIPTION = """Turn text into token shards. `verify DIR` compares the shards of a folder with its
manifest, `stats DIR` counts them."""
WRITER_VERSION = 1
BATCH_CHARS = 1_000_000
BYTES_PER_TOKEN = {"gpt2": 4.5, "byte": 1.0}  # rough, for the estimate of size
GPT2_BYTES_PER_TOKEN_OF_CODE = 2.1
RECORDED = ("source", "dataset", "revision", "tokenizer", "val_fraction", "shard_tokens")
USED_BY = {  # settings that some sources alone heed
    "files": ("files",),
    "dataset": ("hub",),
    "revision": ("hub", "fineweb-edu"),
    "val_fraction": ("files", "hub", "python-stdlib"),
}


@dataclass(frozen=True)
class Settings:
    source: Literal["python-stdlib", "fineweb-edu", "files", "hub"] = "python-stdlib"
    """Where the text comes from"""
    files: str | None = None
    """Glob pattern of .parquet, .jsonl, .jsonl.gz, .jsonl.zst (column text) or .txt; for files"""
    dataset: str | None = None
    """Name of a data set on the Hugging Face hub (split train, column text); for hub"""
    revision: str = "main"
    """Branch, tag or commit; for hub and fineweb-edu"""
    tokenizer: Literal["gpt2", "byte"] = "gpt2"
    """gpt2 has 50257 ids; byte has 257 and needs no vocabulary"""
    out_dir: str | None = None
    """Folder of the shards; when left out data/NAME, or data/NAME-byte for that tokenizer"""
    num_workers: int | None = None
    """Tokenizing processes; one per core when left out, 1 starts none"""
    shard_tokens: int = 100_000_000
    """Tokens in each shard but the last of a split"""
    val_fraction: float = 0.1
    """Part of the documents that is for validation; not for fineweb-edu"""
    dry_run: bool = False
    """Say what would be done and write nothing"""

    def __post_init__(self) -> None:
        for key, used_by in USED_BY.items():
            if getattr(self, key) != getattr(Settings, key) and self.source not in used_by:
                raise ValueError(f"--{key} has no effect with --source {self.source}; leave it out")
        if self.source in ("files", "hub"):
            needed = "files" if self.source == "files" else "dataset"
            if not getattr(self, needed):
                raise ValueError(f"--source {self.source} needs --{needed}")
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"--val_fraction {self.val_fraction}: give a number between 0 and 1")
        if not 1 <= self.shard_tokens < 2**31:
            raise ValueError(f"--shard_tokens {self.shard_tokens}: give 1 to {2**31 - 1}")
        if self.num_workers is not None and self.num_workers < 1:
            raise ValueError(f"--num_workers {self.num_workers}: give 1 or more")

    @property
    def name(self) -> str:
        """First part of the shards' names."""
        names = {"python-stdlib": "stdlib", "fineweb-edu": "fineweb_edu", "files": "files"}
        return names.get(self.source) or re.sub(r"[^A-Za-z0-9.-]+", "_", str(self.dataset))

    @property
    def folder(self) -> Path:
        name = "fineweb_edu_10B" if self.source == "fineweb-edu" else self.name
        return Path(self.out_dir or f"data/{name}{'-byte' if self.tokenizer == 'byte' else ''}")


def open_source(settings: Settings) -> sources.Source:
    if settings.source == "python-stdlib":
        return sources.python_stdlib()
    if settings.source == "files":
        return sources.local_files(str(settings.files))
    if settings.source == "hub":
        return sources.hub_dataset(str(settings.dataset), settings.revision)
    return sources.fineweb_edu(settings.revision)


def batches(source: sources.Source, settings: Settings) -> Iterator[tuple[str, list[str]]]:
    """Yield (split, about BATCH_CHARS characters of documents), each split in its order."""
    texts: dict[str, list[str]] = {"train": [], "val": []}
    n_chars = {"train": 0, "val": 0}
    for key, text in source.documents():
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        is_val = int.from_bytes(digest[:8], "big") < settings.val_fraction * 2**64
        split = "val" if is_val and settings.source != "fineweb-edu" else "train"
        texts[split].append(text)
        n_chars[split] += len(text)
        if n_chars[split] >= BATCH_CHARS:
            yield split, texts[split]
            texts[split], n_chars[split] = [], 0
    yield from ((split, rest) for split, rest in texts.items() if rest)


def plan(source: sources.Source, settings: Settings, folder: Path, num_workers: int) -> str:
    """Say what goes where and what it will cost."""
    n_bytes, n_tokens = sum(source.sizes.values()), expected_tokens(source, settings)
    disk = 2 * n_tokens + (n_bytes if settings.source == "fineweb-edu" else 0)
    size = f"{len(source.sizes)} files, {n_bytes / 1e6:,.1f} MB" if source.sizes else "size unknown"
    if source.sizes:
        size += f", about {n_tokens / 1e6:,.1f} M tokens and {disk / 1e6:,.1f} MB on disk"
    what = " ".join(filter(None, (source.dataset, source.revision)))
    return f"{what}: {size}; {settings.tokenizer}, {num_workers} workers, to {folder}"


def expected_tokens(source: sources.Source, settings: Settings) -> int:
    per_token = BYTES_PER_TOKEN[settings.tokenizer]
    if (settings.source, settings.tokenizer) == ("python-stdlib", "gpt2"):
        per_token = GPT2_BYTES_PER_TOKEN_OF_CODE
    return int(source.text_bytes() / per_token)


def prepare(settings: Settings) -> None:
    folder = settings.folder
    num_workers = settings.num_workers or os.cpu_count() or 1
    record: dict[str, Any] = {key: getattr(settings, key) for key in RECORDED}
    source = None
    if settings.source in ("files", "python-stdlib"):
        source = open_source(settings)
        listing = json.dumps(sorted(source.sizes.items())).encode()
        record["input"] = {
            "revision": source.revision,
            "files": len(source.sizes),
            "bytes": sum(source.sizes.values()),
            "names_and_sizes_sha256": hashlib.sha256(listing).hexdigest(),
        }
    if is_prepared(folder, record):
        print(f"{folder}: already prepared")
        return
    if not settings.dry_run:
        tokenizer = load_tokenizer(settings.tokenizer, allow_download=True)
    source = source or open_source(settings)
    print(plan(source, settings, folder, num_workers), flush=True)
    if settings.dry_run:
        print("dry run: nothing is written")
        return
    start(folder, settings.name)
    manifest = write_shards(folder, source, settings, tokenizer, num_workers)
    manifest["settings"] = record
    write_json(folder / shards.MANIFEST, manifest)
    (folder / shards.UNFINISHED).unlink()
    if source.invalid:
        print(f"skipped: {source.skipped()}")
    sizes = ", ".join(
        f"{split} {sum(e['tokens'] for e in manifest['shards'] if e['split'] == split):,} tokens"
        for split in ("train", "val")
    )
    config = "gpt2_124m" if settings.tokenizer == "gpt2" else "demo"
    train = f"python train.py --config configs/{config}.yaml --data.dir {folder}"
    print(f"{folder}: {sizes}; next: {train}")


def write_shards(
    folder: Path,
    source: sources.Source,
    settings: Settings,
    tokenizer: Tokenizer,
    num_workers: int,
) -> dict[str, Any]:
    """Write every shard of both splits and return what the manifest says of them."""
    from tqdm import tqdm

    writers = {
        split: SplitWriter(folder, settings.name, split, settings.shard_tokens, tokenizer)
        for split in ("train", "val")
    }
    n_head = sources.FINEWEB_VAL_TOKENS if settings.source == "fineweb-edu" else 0
    n_expected = expected_tokens(source, settings) or None
    encoded = encode_batches(tokenizer, batches(source, settings), num_workers)
    with closing(encoded), tqdm(total=n_expected, unit="tok", unit_scale=True, disable=None) as bar:
        for split, ids in encoded:
            head, rest = np.split(ids, [max(0, n_head - writers["val"].tokens)])
            writers["val"].write(head)
            writers[split].write(rest)
            bar.update(ids.size)
    for split, writer in writers.items():
        writer.finish()
        if not writer.tokens:
            raise ValueError(
                f"no document fell to the split {split} (--val_fraction {settings.val_fraction}); "
                "give more documents or another --val_fraction"
            )
    return {
        "dataset": source.dataset,
        "revision": source.revision,
        "tokenizer": {key: getattr(tokenizer, key) for key in ("name", "vocab_size", "sha256")},
        "eot_id": tokenizer.eot_id,
        "documents": {split: writer.documents for split, writer in writers.items()},
        "invalid_rows": source.invalid,
        "shards": writers["train"].entries + writers["val"].entries,
        "writer_version": WRITER_VERSION,
    }


def main(argv: Sequence[str]) -> None:
    commands = {"verify": verify, "stats": stats}
    command = commands.get(argv[0] if argv else "")
    try:
        with user_errors():
            if command is None or "-h" in argv or "--help" in argv:
                prepare(load(Settings, argv, prog="prepare_fineweb.py", description=DESCRIPTION))
            elif len(argv) != 2:
                raise ValueError(f"give one folder: prepare_fineweb.py {argv[0]} DIR")
            else:
                command(Path(argv[1]))
    except KeyboardInterrupt:
        print("interrupted; the same command starts over", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main(sys.argv[1:])
