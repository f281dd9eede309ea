"""Files that are whole or not there, their hashes, and folders with one writer."""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


class HashingFile:
    """A file to write, which hashes on the way: reading a checkpoint back would cost a second."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        """Write bytes."""
        self.sha256.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        """Hand what is buffered to the system."""
        self.file.flush()


def write_atomic(path: Path, write: Callable[[HashingFile], object]) -> str:
    """Let `write` fill a temporary file beside `path`; rename it once it is on disk.

    Returns the sha256 of what was written. When anything fails, a full disk above all, the
    temporary file goes and `path` stays as it was.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            hashing = HashingFile(file)
            write(hashing)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return hashing.sha256.hexdigest()


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


def check_folder(flag: str, folder: Path) -> None:
    """Raise ValueError, naming the flag, for a folder that cannot be made or written to."""
    there = next(p for p in (folder, *folder.absolute().parents) if os.path.lexists(p))
    if not there.is_dir():
        what = "is a file" if there.exists() else "is a link to nothing"
        which = "" if there == folder else f"{there} "
        raise ValueError(f"{flag} {folder}: {which}{what}; name a folder")
    if not os.access(there, os.W_OK):
        raise ValueError(f"{flag} {folder}: may not write in {there}; name another folder")


def lock_folder(folder: Path, what: str) -> IO[str]:
    """Make a folder and take its only writer's place until the returned file is closed.

    Raises ValueError while another process holds it; what: what that one does there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / ".lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ValueError(f"{folder}: another process is {what} here; end it first") from None
    return lock
