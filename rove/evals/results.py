"""Result files: where they go, and what an evaluation that was killed had measured already."""

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rove import distributed as dist
from rove.evals.schema import EVALUATIONS, check_result
from rove.files import check_folder, write_json


def result_path(out: str | None, run: Path, name: str, pos_mode: str, yarn_values: str) -> Path:
    """Return `out`, or a file under the run's eval folder; its folder is made.

    Raises ValueError, before anything is measured, when it cannot be written.
    """
    orig = "_orig" if yarn_values == "orig" else ""
    path = Path(out) if out else run / "eval" / f"{name}_{pos_mode}{orig}.json"
    make_room(path, EVALUATIONS)
    return path


def make_room(path: Path, kinds: tuple[str, ...]) -> None:
    """Make the folder of a result file; ValueError where a result cannot be written.

    A file that is there may be replaced when it is a result of one of `kinds`, and nothing else.
    """
    if path.is_dir():
        raise ValueError(f"--out {path}: is a folder; name a file")
    if os.path.lexists(path) and _kind_of(path) not in kinds:
        what = f"holds something else than a result of eval.py ({', '.join(kinds)})"
        raise ValueError(f"{path}: {what}; give another --out, or move that file away")
    check_folder("--out", path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)


def _kind_of(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())["kind"] if path.is_file() else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def read_result(path: Path) -> dict[str, Any]:
    """Return what a result file holds; ValueError for a file that is none."""
    try:
        return check_result(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a result of eval.py ({error})") from None


class Partial:
    """The parts of a result, kept beside its file as they come, until all are there.

    `identity` says what is measured; parts that were measured of anything else have another file.
    """

    def __init__(self, path: Path, identity: dict[str, Any], world: dist.World) -> None:
        text = json.dumps(identity, sort_keys=True)
        self.identity, self.world = json.loads(text), world
        name = f"{path.name}.{hashlib.sha256(text.encode()).hexdigest()[:8]}.partial"
        self.path = path.with_name(name)
        self.parts: dict[str, Any] = dist.gather(self._read() if world.is_main else {})[0]

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            return dict(found["parts"]) if found["identity"] == self.identity else {}
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return {}

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return the part of this name: as measured before, or now by `measure`, on all ranks."""
        if name not in self.parts:
            self.parts[name] = measure()
            if self.world.is_main:
                write_json(self.path, {"identity": self.identity, "parts": self.parts})
        return self.parts[name]

    def finish(self, path: Path, content: dict[str, Any]) -> None:
        """Write the whole result and remove the parts.

        A result of other settings that stands there is moved to a folder `older` beside it.
        """
        if self.world.is_main:
            content = content | {"identity": self.identity}
            _move_aside(path, self.identity)
            write_json(path, content)
            self.path.unlink(missing_ok=True)


def _move_aside(path: Path, identity: dict[str, Any]) -> None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["identity"] == identity:
            return
        stamp = re.sub(r"\W", "", str(found["created"]))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return
    (path.parent / "older").mkdir(exist_ok=True)
    path.replace(path.parent / "older" / f"{path.stem}_{stamp}.json")
