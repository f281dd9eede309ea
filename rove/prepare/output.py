"""A folder of shards in the making: both splits, and the record from which a stopped run goes on.

The record is `manifest.json.unfinished`: what is prepared, the position in the source, and what has
been written up to it. A run that goes on cuts back what was written after its last record.
"""

import json
import re
from pathlib import Path
from typing import Any

from rove import shards
from rove.files import write_json
from rove.prepare import units
from rove.prepare.writer import SplitWriter
from rove.tokenizer import Tokenizer
from rove.words import differences


class Output:
    """A folder of shards in the making."""

    def __init__(
        self, folder: Path, name: str, settings: dict[str, Any], tokenizer: Tokenizer
    ) -> None:
        self.folder, self.name, self.settings = folder, name, settings
        self.tokenizer, self.bytes_per_id = tokenizer, tokenizer.token_bytes()
        self.revision: str | None = None
        self._clear()

    def _clear(self) -> None:
        n, eot_id, sizes = self.settings["shard_tokens"], self.tokenizer.eot_id, self.bytes_per_id
        self.splits = {
            split: SplitWriter(self.folder, self.name, split, n, eot_id, sizes)
            for split in ("train", "val")
        }
        self.position = (0, 0)
        self.invalid: dict[str, dict[str, int]] = {}
        self.ends: list[Any] = []
        """[file, tokens of train and val when it was read] of files not yet in complete shards"""

    def open(self, record: dict[str, Any], revision: str | None) -> None:
        """Go on from a record ({}: from the start); the folder then holds nothing else of ours."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.revision = revision
        if record.get("splits"):
            try:
                self._restore(record)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                if n_complete(record):
                    raise ValueError(
                        f"{self.folder}: cannot go on ({error}); put it back, or remove the folder "
                        f"and its {n_complete(record)} complete shards to start over"
                    ) from error
                print(f"notice: {error}; starting over")
                self._clear()
        listed = {entry["file"] for w in self.splits.values() for entry in w.entries}
        remove_remains(self.folder, record, listed)
        foreign = sorted(p for p in self.folder.glob("*.bin") if p.name not in listed)
        if foreign:
            raise ValueError(f"{foreign[0]} belongs to no known data set; choose another --out_dir")
        self.save(self.position)

    def _restore(self, record: dict[str, Any]) -> None:
        if record["units"] != units.sizes():  # positions count units
            raise ValueError("it was begun by another version")
        for split, writer in self.splits.items():
            writer.restore(record["splits"][split])
        first, second = record["position"]
        self.position = (first, second)
        self.invalid, self.ends = record["invalid"], record["ends"]

    def save(self, position: tuple[int, int]) -> None:
        """Record that everything up to a position of the source is written."""
        self.position = position
        content: dict[str, Any] = {
            "name": self.name,
            "settings": self.settings,
            "revision": self.revision,
        }
        content |= {"position": list(position), "invalid": self.invalid, "ends": self.ends}
        content["units"] = units.sizes()
        content["splits"] = {split: writer.state() for split, writer in self.splits.items()}
        write_json(self.folder / shards.UNFINISHED, content)

    @property
    def tokens(self) -> int:
        """Tokens of both splits so far."""
        return sum(writer.tokens for writer in self.splits.values())

    @property
    def n_complete(self) -> int:
        """Number of complete shards."""
        return sum("sha256" in e for writer in self.splits.values() for e in writer.entries)

    def note_invalid(self, invalid: dict[str, dict[str, int]]) -> None:
        """Count rows that were left out."""
        for name, found in invalid.items():
            self.invalid.setdefault(name, {**found, "rows": 0})["rows"] += found["rows"]

    def note_end(self, name: str) -> None:
        """Remember that all of a file is written."""
        self.ends.append([name, *(writer.tokens for writer in self.splits.values())])

    def take_complete(self) -> list[str]:
        """Return, once, the files whose text lies in complete and checked shards alone."""
        done = [writer.finished_tokens for writer in self.splits.values()]
        is_done = [all(n <= m for n, m in zip(end[1:], done, strict=True)) for end in self.ends]
        complete = [end[0] for end, is_so in zip(self.ends, is_done, strict=True) if is_so]
        self.ends = [end for end, is_so in zip(self.ends, is_done, strict=True) if not is_so]
        return complete

    def finish(self, why_empty: str) -> None:
        """Complete the last shards; ValueError with why_empty when a split holds nothing."""
        for split, writer in self.splits.items():
            if not writer.tokens:
                raise ValueError(f"no document fell to the split {split} ({why_empty}")
            writer.finish()


def read_record(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the record of an unfinished folder, {} when there is none.

    Of other settings it is the name alone. Raises ValueError when it is damaged, or is of other
    settings and some of its shards are complete.
    """
    path = folder / shards.UNFINISHED
    if not path.exists():
        return {}
    try:
        record = dict(json.loads(path.read_text(encoding="utf-8")))
        shards_done, name = n_complete(record), str(record["name"])
        different = differences(dict(record["settings"]), settings)
        there = set(record) | set(record["splits"])
        if missing := {"revision", "position", "invalid", "ends", "train", "val"} - there:
            raise ValueError(f"without {', '.join(sorted(missing))}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: damaged ({error!r:.60}); remove the folder first") from error
    if different and shards_done:
        raise ValueError(
            f"{folder} holds {shards_done} shards of an unfinished data set with {different}; "
            "prepare it with the same settings, or remove the folder first"
        )
    return {"name": name} if different else record


def n_complete(record: dict[str, Any]) -> int:
    """Return the number of complete shards in a record."""
    entries = (entry for split in record["splits"].values() for entry in split["entries"])
    return sum("sha256" in entry for entry in entries)


def remove_remains(folder: Path, record: dict[str, Any], listed: set[str]) -> None:
    """Remove what a stopped run has written beyond its record, and the manifest."""
    if not record:
        return
    (folder / shards.MANIFEST).unlink(missing_ok=True)
    own = re.compile(re.escape(record["name"]) + r"_(train|val)_\d+\.bin(\.tmp)?")
    for path in folder.iterdir():
        if own.fullmatch(path.name) and path.name.removesuffix(".tmp") not in listed:
            path.unlink()


def is_prepared(folder: Path, settings: dict[str, Any]) -> bool:
    """Say whether the folder holds what is asked for; ValueError if it holds another data set."""
    manifest = None if (folder / shards.UNFINISHED).exists() else shards.read_manifest(folder)
    if manifest is None:
        return False
    if different := differences(manifest.get("settings") or {}, settings):
        raise ValueError(
            f"{folder} holds another data set: {different}; "
            "choose another --out_dir, or remove the folder first"
        )
    for split in ("train", "val"):
        shards.open_split(folder, split)
    return True
