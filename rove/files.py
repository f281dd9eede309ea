"""Files that are whole or not there, and their hashes."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


def write_atomic(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let `write` fill a temporary file beside `path`; rename it once it is on disk."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON atomically; NaN and infinities are refused with a ValueError."""
    text = json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n"
    write_atomic(path, lambda file: file.write(text.encode()))


def sha256_of(path: Path) -> str:
    """Return the hex digest of a file's contents."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
