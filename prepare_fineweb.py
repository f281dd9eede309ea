"""Turn text into token shards: FineWeb-Edu, any other text, or the embedded corpus.

    python prepare_fineweb.py --tokenizer byte                    to data/stdlib-byte
    python prepare_fineweb.py --source fineweb-edu                to data/fineweb_edu_10B
    python prepare_fineweb.py --source pretokenized              to data/finewebedu10B-gpt2
    python prepare_fineweb.py --source files --files 'books/**/*.jsonl.zst' --out_dir data/books
    python prepare_fineweb.py verify data/stdlib-byte
    python prepare_fineweb.py stats data/stdlib-byte

Every document is preceded by the end-of-text id and may cross from one shard into the next. What
is written depends on the source and the settings alone, not on the number of workers. The same
command goes on with a run that was stopped; a finished data set is never overwritten.
"""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rove import shards
from rove.config import load
from rove.errors import user_errors
from rove.files import check_folder, lock_folder, write_json
from rove.prepare import checks, hub, plan, pretokenized, sources
from rove.prepare.downloads import Downloads
from rove.prepare.long_docs import write_long_docs
from rove.prepare.output import Output, is_prepared, read_record
from rove.prepare.run import write_shards
from rove.prepare.units import SPLITS, describe_invalid
from rove.tokenizer import Tokenizer, load_tokenizer

DESCRIPTION = """Turn text into token shards. `verify DIR` compares the shards of a folder with its
manifest, `stats DIR` counts what they hold."""
WRITER_VERSION = 1
PRETOKENIZED = "kjj0/finewebedu10B-gpt2"
RECORDED = ("source", "dataset", "revision", "tokenizer", "val_fraction", "shard_tokens")
USED_BY = {  # settings that some sources alone heed
    "files": ("files",),
    "dataset": ("hub", "pretokenized"),
    "revision": ("hub", "fineweb-edu", "pretokenized"),
    "val_fraction": ("files", "hub", "python-stdlib"),
    "local_dir": ("fineweb-edu",),
    "delete_downloads": ("fineweb-edu",),
    "num_shards": ("pretokenized",),
    "shard_tokens": ("files", "hub", "python-stdlib", "fineweb-edu"),
}


@dataclass(frozen=True)
class Settings:
    source: Literal["python-stdlib", "fineweb-edu", "pretokenized", "files", "hub"] = (
        "python-stdlib"
    )
    """Where the text comes from; pretokenized: shards of GPT-2's ids that others have made"""
    files: str | None = None
    """Glob pattern of .parquet, .jsonl, .jsonl.gz, .jsonl.zst (column text) or .txt; for files"""
    dataset: str | None = None
    """Name of a data set on the Hugging Face hub (split train, column text); for hub, pretokenized
    (kjj0/finewebedu10B-gpt2 when left out)"""
    revision: str = "main"
    """Branch, tag or commit; for hub, fineweb-edu and pretokenized"""
    local_dir: str | None = None
    """Folder of FineWeb-Edu's parquet files, in place of a download; for fineweb-edu"""
    delete_downloads: bool = False
    """Remove each downloaded file once the shards of its text are checked; for fineweb-edu"""
    num_shards: int | None = None
    """Training shards to fetch; all when left out; for pretokenized"""
    tokenizer: Literal["gpt2", "byte"] = "gpt2"
    """gpt2 has 50257 ids; byte has 257 and needs no vocabulary"""
    out_dir: str | None = None
    """Folder of the shards; when left out data/NAME, or data/NAME-byte for that tokenizer"""
    num_workers: int | None = None
    """Tokenizing processes; one per core when left out, 1 starts none"""
    shard_tokens: int = 100_000_000
    """Tokens in each shard but the last of a split"""
    val_fraction: float = 0.1
    """Part of the documents that is for validation; not for fineweb-edu and pretokenized"""
    long_docs: int | None = None
    """Also write the validation documents of at least so many tokens to OUT_DIR/long_docs_N"""
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
        if self.local_dir and (self.delete_downloads or self.revision != "main"):
            raise ValueError("--local_dir downloads nothing: no --revision, no --delete_downloads")
        if self.source == "pretokenized" and self.tokenizer != "gpt2":
            raise ValueError("--source pretokenized has GPT-2's ids; leave --tokenizer out")
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"--val_fraction {self.val_fraction}: give a number between 0 and 1")
        if not 1 <= self.shard_tokens < 2**31:
            raise ValueError(f"--shard_tokens {self.shard_tokens}: give 1 to {2**31 - 1}")
        for key in ("num_workers", "num_shards", "long_docs"):
            if (value := getattr(self, key)) is not None and value < 1:
                raise ValueError(f"--{key} {value}: give 1 or more")

    @property
    def name(self) -> str:
        """First part of the shards' names."""
        names = {"python-stdlib": "stdlib", "fineweb-edu": "fineweb_edu", "files": "files"}
        return names.get(self.source) or re.sub(r"[^A-Za-z0-9.-]+", "_", str(self.dataset))

    @property
    def folder(self) -> Path:
        name = "fineweb_edu_10B" if self.source == "fineweb-edu" else self.name
        if self.source == "pretokenized":
            name = (self.dataset or PRETOKENIZED).rpartition("/")[2]
        return Path(self.out_dir or f"data/{name}{'-byte' if self.tokenizer == 'byte' else ''}")

    def recorded(self) -> dict[str, Any]:
        """Return what decides the contents of the shards, for the manifest."""
        keys = (*RECORDED, "num_shards") if self.source == "pretokenized" else RECORDED
        local = {"local_files": True} if self.local_dir else {}
        return {key: getattr(self, key) for key in keys} | local


def open_source(settings: Settings, commit: str | None) -> sources.Source:
    """Open what is to be read; commit: where a run that was stopped had begun."""
    if settings.source == "python-stdlib":
        return sources.python_stdlib()
    if settings.source == "files":
        return sources.local_files(str(settings.files))
    if settings.source == "hub":
        return sources.hub_dataset(str(settings.dataset), commit or settings.revision)
    if settings.local_dir:
        return sources.fineweb_edu_files(Path(settings.local_dir))
    return sources.fineweb_edu(commit or settings.revision, keep=not settings.delete_downloads)


def prepare(settings: Settings) -> None:
    """Prepare a folder of shards, or go on with it, or find it finished."""
    folder, record = settings.folder, settings.recorded()
    source = None
    if settings.source in ("files", "python-stdlib") or settings.local_dir:
        source = open_source(settings, None)
        record["input"] = source.fingerprint()
    if is_prepared(folder, record):
        print(f"{folder}: already prepared")
    else:
        check_folder("--out_dir", folder)  # a finished one may be read-only
        if settings.source == "pretokenized":
            fetch_shards(settings, folder, record)
        else:
            make_shards(settings, folder, record, source)
    if settings.long_docs and not settings.dry_run:
        with lock_folder(folder, "preparing"):
            write_long_docs(folder, settings.long_docs, settings.shard_tokens)
    if not settings.dry_run:
        config = "gpt2_124m" if settings.tokenizer == "gpt2" else "demo"
        data = shlex.quote(str(folder))
        print(f"next: python train.py --config configs/{config}.yaml --data.dir {data}")


def open_tokenizer(settings: Settings) -> Tokenizer | None:
    """Load the tokenizer; None in a dry run where it would have to be downloaded."""
    try:
        return load_tokenizer(settings.tokenizer, allow_download=not settings.dry_run)
    except ValueError:
        if not settings.dry_run:
            raise
        return None


def fetch_shards(settings: Settings, folder: Path, record: dict[str, Any]) -> None:
    """Fetch shards that others have made."""
    repo = settings.dataset or PRETOKENIZED
    commit = read_record(folder, record).get("revision") or hub.resolve(repo, settings.revision)
    files = pretokenized.choose(repo, commit, settings.num_shards)
    downloads = Downloads(repo, commit, files, folder=folder / pretokenized.PARTS)
    if start(pretokenized.make_plan(downloads, folder), settings):
        with lock_folder(folder, "preparing"):
            if not is_prepared(folder, record):  # by another process, while this one planned
                unfinished = read_record(folder, record)
                finish(folder, pretokenized.fetch(downloads, folder, record, unfinished))


def make_shards(
    settings: Settings, folder: Path, record: dict[str, Any], source: sources.Source | None
) -> None:
    """Tokenize a source into shards, from where a run that was stopped had come."""
    num_workers = settings.num_workers or os.cpu_count() or 1
    tokenizer = open_tokenizer(settings)
    unfinished = read_record(folder, record)
    source = source or open_source(settings, unfinished.get("revision"))
    made = plan.make_plan(
        source, settings.tokenizer, tokenizer, folder, num_workers, settings.shard_tokens,
        n_files_done=unfinished.get("position", [0])[0],
    )  # fmt: skip
    if not start(made, settings) or tokenizer is None:
        return
    n_expected = plan.expected_tokens(source, settings.tokenizer)
    with lock_folder(folder, "preparing"):
        if is_prepared(folder, record):  # by another process, while this one planned
            return
        output = Output(folder, settings.name, record, tokenizer)
        output.open(read_record(folder, record), source.revision)
        share = settings.val_fraction
        manifest = write_shards(output, source, tokenizer, num_workers, share, n_expected)
        finish(folder, {**manifest, "settings": record})
    if output.invalid:
        print(f"skipped: {describe_invalid(output.invalid)}")


def start(made: plan.Plan, settings: Settings) -> bool:
    """Print the plan; say whether to go on. ValueError when a disk is too small."""
    print(made, flush=True)
    if settings.dry_run:
        print("dry run: nothing is written")
        return False
    made.check_room()
    return True


def finish(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, which makes the folder one to train on, and say what is in it."""
    write_json(folder / shards.MANIFEST, {**manifest, "writer_version": WRITER_VERSION})
    (folder / shards.UNFINISHED).unlink()
    counts = {
        split: sum(e["tokens"] for e in manifest["shards"] if e["split"] == split)
        for split in SPLITS
    }
    print(f"{folder}: " + ", ".join(f"{split} {n:,} tokens" for split, n in counts.items()))


def main(argv: Sequence[str]) -> None:
    """Prepare, or run `verify DIR` or `stats DIR`."""
    command = {"verify": checks.verify, "stats": checks.stats}.get(argv[0] if argv else "")
    with user_errors():
        if command is None or "-h" in argv or "--help" in argv:
            prepare(load(Settings, argv, prog="prepare_fineweb.py", description=DESCRIPTION))
        elif len(argv) != 2 or not argv[1]:
            raise ValueError(f"give one folder: prepare_fineweb.py {argv[0]} DIR")
        else:
            command(Path(argv[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
