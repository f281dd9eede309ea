"""Units of work: rows of text that one process reads and tokenizes, in the order of the source.

A row is (key, value of the column `text`); it is a document when the value is a non-empty string.
The key, "FILE#ROW" or a folder's name, decides whether the document is for validation.
"""

import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rove.tokenizer import Ids, Tokenizer

FORMATS = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".txt")
SPLITS = ("train", "val")
UNIT_CHARS = 1_000_000
UNIT_BYTES, UNIT_ROWS = 32_000_000, 1000  # of text in a parquet row group; more is cut at rows
BATCH_BYTES = 4_000_000

Row = tuple[str, Any]


class Unit(Protocol):
    """Some rows of a source."""

    def read(self) -> Iterator[Row]:
        """Yield the rows; ValueError, naming file and row, when they cannot be read."""


@dataclass(frozen=True)
class Rows:
    """Rows that are at hand."""

    rows: list[Row]

    def read(self) -> Iterator[Row]:
        return iter(self.rows)


@dataclass(frozen=True)
class ParquetRows:
    """Rows [start, stop) of a row group, read from the file where the unit is worked on."""

    path: Path
    name: str
    group: int
    first_row: int
    """number in the file of the group's row 0"""
    start: int
    stop: int
    batch_rows: int
    """rows to decode at once: few where documents are long"""

    def read(self) -> Iterator[Row]:
        row = self.first_row + self.start
        try:
            for value in self._values():
                yield f"{self.name}#{row}", value.as_py()
                row += 1
        except (ValueError, OSError, MemoryError) as error:
            raise ValueError(f"{self.path}, row {row}: {one_line(error)}") from error

    def _values(self) -> Iterator[Any]:
        """Yield the values, going on where the last unit of this group ended."""
        group, row, values = _reader.get("at", (None, 0, None))
        if group != (self.path, self.group) or row > self.start:
            columns = {"row_groups": [self.group], "columns": ["text"], "use_threads": False}
            batches = open_parquet(self.path).iter_batches(self.batch_rows, **columns)
            row, values = 0, (value for batch in batches for value in batch.column(0))
        _reader.clear()
        for value in islice(values, self.stop - row):
            if row >= self.start:
                yield value
            row += 1
        _reader["at"] = (self.path, self.group), row, values


_reader: dict[str, Any] = {}  # of this process: (group, next row, its values) read last


@dataclass
class Encoded:
    """What became of a unit."""

    ids: dict[str, Ids]
    """by split, the end-of-text id before each document: (n,) uint16"""
    invalid: dict[str, dict[str, int]] = field(default_factory=dict)
    """rows left out, by file: how many, and the number of the first"""


def encode_unit(tokenizer: Tokenizer, unit: Unit, val_fraction: float) -> Encoded:
    """Read and tokenize a unit; documents whose key hashes below val_fraction are for val."""
    parts: dict[str, list[Ids]] = {split: [] for split in SPLITS}
    result, eot = Encoded({}), np.array([tokenizer.eot_id], dtype=np.uint16)
    for key, text in unit.read():
        if isinstance(text, str) and text:
            split = "val" if hash_fraction(key) < val_fraction else "train"
            try:
                parts[split] += [eot, tokenizer.encode(text)]
            except ValueError as error:
                raise ValueError(f"{key}: cannot be tokenized: {one_line(error)}") from error
        else:
            name, _, row = key.rpartition("#")
            result.invalid.setdefault(name, {"rows": 0, "first": int(row)})["rows"] += 1
    empty = np.empty(0, dtype=np.uint16)
    result.ids = {split: np.concatenate([empty, *parts[split]]) for split in SPLITS}
    return result


def hash_fraction(key: str) -> float:
    """Return a number in [0, 1) that depends on the key alone."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def describe_invalid(invalid: dict[str, dict[str, int]]) -> str:
    """Say how many rows were null, empty or no text, with the file and row of the first."""
    return "; ".join(
        f"{name}: is empty"
        if name.endswith(".txt")
        else f"{name}: {found['rows']} rows without text, the first is row {found['first']}"
        for name, found in sorted(invalid.items())
    )


def sizes() -> list[int]:
    """Return what decides where a file is cut into units."""
    return [UNIT_CHARS, UNIT_BYTES, UNIT_ROWS]


def units_of(name: str, path: Path) -> Iterator[Unit]:
    """Cut a file of one of FORMATS into units; its rows have keys NAME#ROW, counted from 0."""
    if path.suffix == ".parquet":
        yield from _parquet_units(name, path)
    elif path.suffix == ".txt":
        yield Rows([(f"{name}#0", _utf8(path.read_bytes(), str(path)))])
    else:
        yield from grouped((f"{name}#{row}", value) for row, value in _json_rows(path))


def grouped(rows: Iterator[Row]) -> Iterator[Rows]:
    """Gather rows into units of about UNIT_CHARS characters."""
    group: list[Row] = []
    n_chars = 0
    for key, value in rows:
        group.append((key, value))
        n_chars += len(value) if isinstance(value, str) else 1
        if n_chars >= UNIT_CHARS:
            yield Rows(group)
            group, n_chars = [], 0
    if group:
        yield Rows(group)


def open_parquet(path: Path) -> Any:
    """Open a parquet file; ValueError when it is none, is cut, or has no column `text`."""
    try:
        return _open_parquet(path, path.stat().st_mtime_ns)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: {one_line(error)}") from error


@lru_cache(maxsize=1)  # a worker reads many row groups of one file
def _open_parquet(path: Path, mtime_ns: int) -> Any:
    import pyarrow.parquet

    try:
        # with a buffer, pages are read one by one; without, whole column chunks
        file = pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
    except (ValueError, OSError) as error:
        raise ValueError(f"no complete parquet file: {one_line(error)}") from error
    if "text" not in (columns := file.schema_arrow.names):
        raise ValueError(f"no column 'text'; columns are {', '.join(columns)}")
    return file


def parquet_text_bytes(path: Path) -> int:
    """Return the bytes of a parquet file's text column, uncompressed."""
    return sum(_text_bytes(open_parquet(path).metadata.row_group(n)) for n in _groups(path))


def _groups(path: Path) -> range:
    return range(open_parquet(path).metadata.num_row_groups)


def _text_bytes(group: Any) -> int:
    columns = (group.column(n) for n in range(group.num_columns))
    return sum(c.total_uncompressed_size for c in columns if c.path_in_schema == "text")


def _parquet_units(name: str, path: Path) -> Iterator[ParquetRows]:
    first_row, metadata = 0, open_parquet(path).metadata
    for number in _groups(path):
        group = metadata.row_group(number)
        # the size of a column that is stored as a dictionary says nothing, hence the rows
        n_bytes, n_rows = _text_bytes(group), group.num_rows
        n_parts = min(max(1, -(-n_bytes // UNIT_BYTES), -(-n_rows // UNIT_ROWS)), n_rows)
        batch_rows = int(min(64, max(1, BATCH_BYTES * n_rows // max(n_bytes, 1))))
        for part in range(n_parts):
            start, stop = (n_rows * n // n_parts for n in (part, part + 1))
            yield ParquetRows(path, name, number, first_row, start, stop, batch_rows)
        first_row += group.num_rows


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
                    raise ValueError(f"{where}: invalid JSON: {one_line(error)}") from error
                if not isinstance(value, dict):
                    raise ValueError(f"{where}: not a JSON object")
                if "text" not in value and not seen:
                    raise ValueError(f"{where}: no column 'text'; columns are {', '.join(value)}")
                seen = True
                yield row, value.get("text")
    except (OSError, UnicodeError) as error:  # a name that is no UTF-8 is not opened
        remedy = "get the file again, or leave it out of --files"
        raise ValueError(f"{path}: {one_line(error)}; {remedy}") from error


def _utf8(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 at byte {error.start}; convert it") from error


def one_line(error: BaseException) -> str:
    """Return an error's text without line breaks."""
    return " ".join(str(error).split())
