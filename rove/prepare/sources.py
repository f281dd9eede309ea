"""Where text comes from: local files, the standard library, data sets of the Hugging Face hub.

A source yields units of rows in an order that depends on the source alone.
"""

import glob
import hashlib
import json
import os
import platform
import shlex
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from rove.prepare import hub
from rove.prepare.downloads import Downloads
from rove.prepare.units import (
    FORMATS,
    Row,
    Unit,
    grouped,
    open_parquet,
    parquet_text_bytes,
    units_of,
)

TEXT_RATIO = {".parquet": 1.6, ".gz": 3.0, ".zst": 3.0}  # rough, for the estimate of size
FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
FINEWEB_FOLDER = "sample/10BT"
FINEWEB_VAL_TOKENS = 100_000_000
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}

Position = tuple[int, int]
"""number of a file, number of a unit in it"""
Units = Iterator[tuple[Position, Unit]]


@dataclass(frozen=True)
class Source:
    """Units of text and what identifies them."""

    dataset: str
    revision: str | None
    """What fixes the contents: a commit, a Python version, None for files"""
    sizes: dict[str, int]
    """Bytes of each file by relative name; empty where nothing is known before reading"""
    text_bytes: int
    """estimate of the bytes of text"""
    units: Callable[[Position], Units]
    """Yields (position after the unit, unit) from a position on"""
    downloads: Downloads | None = None
    """the files that come from the hub, one by one"""
    n_val_tokens: int = 0
    """tokens at the start that are for validation; 0: documents are chosen by a hash"""
    single: str = ""
    """the path, as it was given, where all is one local file"""

    def fingerprint(self) -> dict[str, Any]:
        """Return names and sizes of the input, in short."""
        listing = json.dumps(sorted(self.sizes.items())).encode()
        return {
            "revision": self.revision,
            "files": len(self.sizes),
            "bytes": sum(self.sizes.values()),
            "names_and_sizes_sha256": hashlib.sha256(listing).hexdigest(),
        }


def local_files(pattern: str) -> Source:
    """Take the files that match a pattern (`**` for any depth), sorted; ValueError if unfit."""
    pattern = os.path.expanduser(pattern)
    if Path(pattern).is_dir():
        inside = shlex.quote(os.path.join(glob.escape(pattern), "*"))
        raise ValueError(f"--files {pattern}: is a folder; give {inside}")
    names = [pattern] if Path(pattern).is_file() else glob.glob(pattern, recursive=True)
    found = (Path(name).absolute() for name in names)
    paths = sorted({path for path in found if path.is_file()})
    if not paths:
        raise ValueError(f"--files {pattern}: matches no file; give a pattern like 'dir/*.parquet'")
    root = Path(os.path.commonpath([path.parent for path in paths]))
    for path in paths:
        if not path.name.endswith(FORMATS):
            raise ValueError(f"{path}: extension is none of {', '.join(FORMATS)}; narrow --files")
    source = _from_files("files", {path.relative_to(root).as_posix(): path for path in paths})
    single = next(name for name in names if Path(name).is_file()) if len(paths) == 1 else ""
    return replace(source, single=single)


def fineweb_edu_files(folder: Path) -> Source:
    """Take FineWeb-Edu's parquet files from a folder, as they lie on the hub or directly in it."""
    inner = folder / FINEWEB_FOLDER
    paths = sorted((inner if inner.is_dir() else folder).glob("*.parquet"))
    if not paths:
        raise ValueError(f"--local_dir {folder}: no parquet files there or in {FINEWEB_FOLDER}")
    files = {f"{FINEWEB_FOLDER}/{path.name}": path for path in paths}
    return replace(_from_files(FINEWEB_EDU, files), n_val_tokens=FINEWEB_VAL_TOKENS)


def fineweb_edu(revision: str, keep: bool) -> Source:
    """Take FineWeb-Edu's 10 B token sample from the hub, its files downloaded ahead of their turn.

    keep: leave them in the hub's cache; else only a few are there at any time.
    """
    commit = hub.resolve(FINEWEB_EDU, revision)
    files = hub.list_files(FINEWEB_EDU, commit, FINEWEB_FOLDER, ".parquet")
    downloads = Downloads(FINEWEB_EDU, commit, files, keep=keep)
    sizes = {name: file.size for name, file in files.items()}
    n_bytes = int(TEXT_RATIO[".parquet"] * sum(sizes.values()))
    units = _file_units(sorted(files), downloads.get)
    return Source(FINEWEB_EDU, commit, sizes, n_bytes, units, downloads, FINEWEB_VAL_TOKENS)


def python_stdlib() -> Source:
    """Take the modules of the running interpreter's standard library, without tests.

    Near-copies lie side by side, so the key is a module's folder (its name at the top level).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files: dict[str, Path] = {}
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - SKIPPED_FOLDERS
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            if path.stat().st_size:  # an empty __init__.py is no document
                files[path.relative_to(root).as_posix()] = path

    def rows() -> Iterator[Row]:
        for name in sorted(files):
            try:
                with tokenize.open(files[name]) as file:  # honours the coding cookie
                    text = file.read()
            except (SyntaxError, UnicodeDecodeError) as error:
                raise ValueError(f"{files[name]}: {error}") from error
            if text:
                yield str(PurePosixPath(name).parent) if "/" in name else name, text

    sizes = {name: path.stat().st_size for name, path in files.items()}
    version = platform.python_version()
    return Source("python-stdlib", version, sizes, sum(sizes.values()), _row_units(rows))


def hub_dataset(name: str, revision: str) -> Source:
    """Stream the split `train` of a hub data set."""
    commit = hub.resolve(name, revision)

    def rows() -> Iterator[Row]:
        with hub.errors(name):
            import datasets

            stream = datasets.load_dataset(name, revision=commit, split="train", streaming=True)
            for number, row in enumerate(stream):
                if "text" not in row:
                    raise ValueError(f"no column 'text'; columns are {', '.join(row)}")
                yield f"{name}#{number}", row["text"]

    return Source(name, commit, {}, 0, _row_units(rows))


def _from_files(dataset: str, files: dict[str, Path]) -> Source:
    sizes, n_bytes = {name: path.stat().st_size for name, path in files.items()}, 0.0
    for name, path in files.items():
        if path.suffix == ".parquet":
            open_parquet(path)  # a bad one is found before an hour of work, not after
            n_bytes += parquet_text_bytes(path)
        else:
            n_bytes += TEXT_RATIO.get(path.suffix, 1) * sizes[name]
    units = _file_units(sorted(files), lambda name: files[name])
    return Source(dataset, None, sizes, int(n_bytes), units)


def _file_units(names: list[str], path_of: Callable[[str], Path]) -> Callable[[Position], Units]:
    """Return Source.units of files in turn; a file is asked for when its turn comes."""

    def units(start: Position) -> Units:
        for number in range(start[0], len(names)):
            skipped = start[1] if number == start[0] else 0
            rest = islice(units_of(names[number], path_of(names[number])), skipped, None)
            last = None
            for position, unit in enumerate(rest, skipped + 1):
                if last is not None:
                    yield (number, position - 1), last
                last = unit
            if last is not None:  # the file is done, and need not be there any more
                yield (number + 1, 0), last

    return units


def _row_units(rows: Callable[[], Iterator[Row]]) -> Callable[[Position], Units]:
    """Return Source.units of one stream of rows, read anew up to a position."""

    def units(start: Position) -> Units:
        for number, unit in enumerate(islice(grouped(rows()), start[1], None), start[1] + 1):
            yield (0, number), unit

    return units
