"""Where text comes from: local files, the standard library, data sets of the Hugging Face hub.

A source yields (key, text) pairs in an order that depends on the source alone. The key decides
whether a document is for validation, so it names the document without saying where it lies.
"""

import glob
import io
import json
import os
import platform
import sysconfig
import time
import tokenize
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

FORMATS = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".txt")
TEXT_RATIO = {".parquet": 1.6, ".gz": 3.0, ".zst": 3.0}  # rough, for the estimate of size
FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
FINEWEB_FOLDER = "sample/10BT"
FINEWEB_VAL_TOKENS = 100_000_000
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
MAX_RETRIES = 5


@dataclass
class Source:
    """Documents and what identifies them."""

    dataset: str
    revision: str | None
    """What fixes the contents: a commit, a Python version, None for files"""
    sizes: dict[str, int]
    """Bytes of each file by relative name; empty where nothing is known before reading"""
    read: Callable[[], Iterator[tuple[str, Any]]] = field(repr=False)
    """Yields (key, value of the row); a document is a non-empty string"""
    invalid: dict[str, dict[str, int]] = field(default_factory=dict)
    """Rows left out, by file: how many and the first; filled while reading"""

    def documents(self) -> Iterator[tuple[str, str]]:
        """Yield (key, text) of every document; ValueError when there is none."""
        n_documents = 0
        for key, text in self.read():
            if isinstance(text, str) and text:
                n_documents += 1
                yield key, text
            else:
                name, _, row = key.rpartition("#")
                self.invalid.setdefault(name, {"rows": 0, "first": int(row)})["rows"] += 1
        if not n_documents:
            raise ValueError(f"{self.dataset}: no row holds text ({self.skipped() or 'no rows'})")

    def skipped(self) -> str:
        """Say how many rows were null, empty or no text, with the file and row of the first."""
        return "; ".join(
            f"{name}: {found['rows']} rows without text, the first is row {found['first']}"
            for name, found in sorted(self.invalid.items())
        )

    def text_bytes(self) -> int:
        """Estimate the bytes of text from the sizes of the files."""
        return int(sum(n * TEXT_RATIO.get(Path(f).suffix, 1) for f, n in self.sizes.items()))


def local_files(pattern: str) -> Source:
    """Take the files that match a pattern (`**` for any depth), sorted; ValueError if unfit."""
    found = (Path(p).absolute() for p in glob.glob(os.path.expanduser(pattern), recursive=True))
    paths = sorted({path for path in found if path.is_file()})
    if not paths:
        raise ValueError(f"--files {pattern}: matches no file; give a pattern like 'dir/*.parquet'")
    root = Path(os.path.commonpath([path.parent for path in paths]))
    files = {path.relative_to(root).as_posix(): path for path in paths}
    for path in paths:
        if not path.name.endswith(FORMATS):
            raise ValueError(f"{path}: extension is none of {', '.join(FORMATS)}; narrow --files")
        if path.suffix == ".parquet":
            _open_parquet(path)
    sizes = {name: path.stat().st_size for name, path in files.items()}
    return Source("files", None, sizes, lambda: _rows(sorted(files.items())))


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

    def read() -> Iterator[tuple[str, Any]]:
        for name in sorted(files):
            try:
                with tokenize.open(files[name]) as file:  # honours the coding cookie
                    text = file.read()
            except (SyntaxError, UnicodeDecodeError) as error:
                raise ValueError(f"{files[name]}: {error}") from error
            if text:
                yield str(PurePosixPath(name).parent) if "/" in name else name, text

    sizes = {name: path.stat().st_size for name, path in files.items()}
    return Source("python-stdlib", platform.python_version(), sizes, read)


def hub_dataset(name: str, revision: str) -> Source:
    """Stream the split `train` of a hub data set."""
    commit = _resolve(name, revision)

    def read() -> Iterator[tuple[str, Any]]:
        with _hub_errors(name):
            import datasets

            rows = datasets.load_dataset(name, revision=commit, split="train", streaming=True)
            for number, row in enumerate(rows):
                if "text" not in row:
                    raise ValueError(f"no column 'text'; columns are {', '.join(row)}")
                yield f"{name}#{number}", row["text"]

    return Source(name, commit, {}, read)


def fineweb_edu(revision: str) -> Source:
    """Take FineWeb-Edu's 10 B token sample, downloading each file as its turn comes."""
    commit = _resolve(FINEWEB_EDU, revision)
    with _hub_errors(FINEWEB_EDU):
        from huggingface_hub import HfApi, hf_hub_download

        where: dict[str, Any] = {"repo_id": FINEWEB_EDU, "repo_type": "dataset", "revision": commit}
        tree: Any = HfApi().list_repo_tree(path_in_repo=FINEWEB_FOLDER, **where)
        sizes = {item.path: item.size for item in tree if item.path.endswith(".parquet")}
        if not sizes:
            raise ValueError(f"no parquet file under {FINEWEB_FOLDER} at revision {commit}")

    def read() -> Iterator[tuple[str, Any]]:
        for name in sorted(sizes):
            with _hub_errors(FINEWEB_EDU):
                path = hf_hub_download(filename=name, **where)
            yield from _rows([(name, Path(path))])

    return Source(FINEWEB_EDU, commit, sizes, read)


def _resolve(repo: str, revision: str) -> str:
    """Return the commit that a branch, tag or commit of a data set stands for."""
    with _hub_errors(repo):
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        attempt = 0
        while True:
            try:
                return str(HfApi().dataset_info(repo, revision=revision, timeout=10).sha)
            except HfHubHTTPError as error:  # this call of the client does not back off by itself
                if error.response.status_code != 429 or attempt == MAX_RETRIES:
                    raise
                wait = error.response.headers.get("Retry-After", "")
                time.sleep(int(wait) if wait.isdecimal() else 2**attempt)
                attempt += 1


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """Turn what the hub's clients raise, which shares no base class, into one line."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {_line(error)[:300]}"
        raise ValueError(f"cannot read data set {repo} from the hub: {reason}") from error


def _rows(files: Iterable[tuple[str, Path]]) -> Iterator[tuple[str, Any]]:
    """Yield (name#row, value of the column `text`) of files in turn, rows counted from 0."""
    for name, path in files:
        if path.suffix == ".parquet":
            rows = _parquet_rows(path)
        elif path.suffix == ".txt":
            rows = enumerate([_utf8(path.read_bytes(), str(path))])
        else:
            rows = _json_rows(path)
        for row, text in rows:
            yield f"{name}#{row}", text


def _open_parquet(path: Path) -> Any:
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: no complete parquet file: {_line(error)}") from error
    if "text" not in (columns := file.schema_arrow.names):
        raise ValueError(f"{path}: no column 'text'; columns are {', '.join(columns)}")
    return file


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    row, file = 0, _open_parquet(path)
    try:
        for batch in file.iter_batches(batch_size=256, columns=["text"]):
            for value in batch.column(0):
                yield row, value.as_py()
                row += 1
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}, row {row}: {_line(error)}") from error


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow

    compression = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
    seen = False
    try:
        with pyarrow.input_stream(str(path), compression=compression) as stream:
            # Bytes are split at "\n" alone, never at U+2028.
            for row, data in enumerate(io.BufferedReader(stream)):
                where = f"{path}, line {row + 1}"
                line = _utf8(data, where)
                if line.isspace():
                    continue
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{where}: invalid JSON: {_line(error)}") from error
                if not isinstance(value, dict):
                    raise ValueError(f"{where}: not a JSON object")
                if "text" not in value and not seen:
                    raise ValueError(f"{where}: no column 'text'; columns are {', '.join(value)}")
                seen = True
                yield row, value.get("text")
    except OSError as error:
        raise ValueError(f"{path}: {_line(error)}") from error


def _utf8(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 at byte {error.start}") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
