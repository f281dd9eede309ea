"""The data of CORE: a folder that holds eval_data/CATEGORY/FILE.jsonl, here or fetched as a zip.

core.yaml and eval_meta_data.csv beside eval_data/ may be missing; where they are, they must agree
with the table in `tasks`.
"""

import json
import stat
import tempfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from tqdm import tqdm

from rove.evals.core.tasks import (
    BY_LABEL,
    LM,
    MC,
    SC,
    TASKS,
    Task,
    check_baselines,
    check_yaml,
    closest_label,
)
from rove.files import sha256_of, write_json
from rove.words import names_in

LAYOUT = "a bundle holds eval_data/CATEGORY/FILE.jsonl, such as eval_data/" + TASKS[0].file
MARKER = ".bundle.json"  # in an unpacked bundle: the hash of its zip
TIMEOUT_S = (10, 60)  # to connect, and between two pieces
# by kind of task: the texts of a record, and its list of options, which has a gold beside it
FIELDS: dict[str, tuple[tuple[str, ...], str | None]] = {
    MC: (("query",), "choices"),
    SC: (("continuation",), "context_options"),
    LM: (("context", "continuation"), None),
}
Record = dict[str, Any]


def find_tasks(bundle: Path, names: str | None = None) -> tuple[list[Task], list[str]]:
    """Return the tasks whose data is there, in table order, and the labels of those without.

    names: labels such as "copa,piqa", or None for all 22; with names, only these are returned.
    Raises ValueError for an unknown label, for a named task without data, for a folder without any
    data, and where the bundle's own tables disagree with the table here.
    """
    labels = list(BY_LABEL) if names is None else names_in("tasks", names)
    for label in labels:
        if label not in BY_LABEL:
            near = closest_label(label)
            raise ValueError(f"tasks={names!r}: {label!r} is no task; did you mean {near!r}?")
    if (bundle / "core.yaml").is_file():
        check_yaml(bundle / "core.yaml")
    if (bundle / "eval_meta_data.csv").is_file():
        check_baselines(bundle / "eval_meta_data.csv")
    missing = [task.label for task in TASKS if not task_path(bundle, task).is_file()]
    if len(missing) == len(TASKS):
        raise ValueError(f"bundle={bundle}: has no task's data; {LAYOUT}")
    for label in labels if names is not None else ():
        if label in missing:
            path = task_path(bundle, BY_LABEL[label])
            raise ValueError(f"tasks={names!r}: {label} has no data; looked for {path}")
    found = [task for task in TASKS if task.label in labels and task.label not in missing]
    return found, missing


def task_path(bundle: Path, task: Task) -> Path:
    """Return where a task's data stands in a bundle."""
    return bundle / "eval_data" / task.file


def load_items(path: Path, task: Task) -> list[Record]:
    """Return the records of a task's file in file order, their strings untouched.

    Lines end at "\\n" alone: U+2028 and the like stand inside strings. Blank lines are skipped.
    Raises ValueError with file name and line number for what is not a record of this kind of task.
    """
    items: list[Record] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        try:
            text = line.decode("utf-8").strip()
            if not text:
                continue
            item = json.loads(text)
            _check_record(item, task)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number}: not UTF-8 at byte {error.start}") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON: {error}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        items.append(item)
    if not items:
        raise ValueError(f"{path}: has no items; {task.label} needs at least {task.n_shots + 1}")
    return items


def _check_record(item: Any, task: Task) -> None:
    if not isinstance(item, dict):
        raise ValueError(f"expected an object of {task.kind}, got {item!r:.60}")
    texts, options = FIELDS[task.kind]
    for key in (*texts, *((options, "gold") if options else ())):
        if key not in item:
            raise ValueError(f"{key} is missing; a record of {task.kind} has it")
    for key in texts:
        if not isinstance(item[key], str):
            raise ValueError(f"{key}: expected text, got {item[key]!r:.60}")
    if options is None:
        return
    found, gold = item[options], item["gold"]
    if not isinstance(found, list) or not all(isinstance(option, str) for option in found):
        raise ValueError(f"{options}: expected a list of texts, got {found!r:.60}")
    if len(found) < 2:
        raise ValueError(f"{options}: expected at least 2, got {len(found)}")
    if type(gold) is not int or not 0 <= gold < len(found):
        raise ValueError(f"gold: expected a number from 0 to {len(found) - 1}, got {gold!r:.60}")


def download(url: str, sha256: str, folder: Path) -> Path:
    """Fetch a zipped bundle, unpack it as `folder`, and return the folder that holds eval_data/.

    url: http://, https:// or file://. sha256: hex digest of the zip, checked before anything is
    unpacked. `folder` appears whole or not at all; where it holds the bundle of this hash already,
    nothing is requested. Raises ValueError for whatever goes wrong on the way.
    """
    wanted = sha256.strip().lower()
    if len(wanted) != 64 or not set(wanted) <= set("0123456789abcdef"):
        raise ValueError(f"sha256={sha256!r}: must be 64 hex digits, the hash of the zip")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        found = _unpacked_hash(folder)
        if found != wanted:
            holds = f"the bundle with sha256 {found}" if found else "something else"
            raise ValueError(f"{folder}: holds {holds}, not {wanted}; name another folder")
        return _data_root(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as temporary:
        archive, unpacked = Path(temporary, "bundle.zip"), Path(temporary, "bundle")
        _fetch(url, archive)
        found = sha256_of(archive)
        if found != wanted:
            raise ValueError(f"{url}: expected sha256 {wanted}, found {found}")
        _unpack(url, archive, unpacked)
        _data_root(unpacked, url)
        write_json(unpacked / MARKER, {"sha256": wanted})
        unpacked.rename(folder)
    return _data_root(folder)


def _unpacked_hash(folder: Path) -> str | None:
    try:
        content = json.loads((folder / MARKER).read_bytes())
    except (OSError, ValueError):
        return None
    found = content.get("sha256") if isinstance(content, dict) else None
    return found if isinstance(found, str) else None


def _data_root(folder: Path, shown: str | None = None) -> Path:
    """Return the folder itself or its only top folder, whichever holds eval_data/."""
    for data in (folder / "eval_data", *sorted(folder.glob("*/eval_data"))):
        if data.is_dir():
            return data.parent
    raise ValueError(f"{shown or folder}: has no eval_data/; {LAYOUT}")


def _fetch(url: str, path: Path) -> None:
    """Write what the URL holds to a file."""
    import requests

    parts = urlsplit(url)
    if parts.scheme == "file":
        source = Path(url2pathname(parts.path))
        if not source.is_file():
            raise ValueError(f"{url}: there is no such file")
        path.write_bytes(source.read_bytes())
        return
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"{url}: must begin with https://, http:// or file://")
    try:
        with requests.get(url, stream=True, timeout=TIMEOUT_S) as response, path.open("wb") as file:
            if not response.ok:
                raise ValueError(f"{url}: HTTP status {response.status_code} {response.reason}")
            size = int(response.headers.get("Content-Length", 0)) or None
            with tqdm(total=size, unit="B", unit_scale=True, disable=None) as bar:
                for piece in response.iter_content(1 << 20):
                    bar.update(file.write(piece))
    except requests.RequestException as error:
        raise ValueError(f"{url}: no answer, or not a whole one ({type(error).__name__})") from None


def _unpack(url: str, archive: Path, folder: Path) -> None:
    """Unpack a zip into a new folder; ValueError if a member would lie elsewhere or is a link."""
    try:
        with zipfile.ZipFile(archive) as file:
            for member in file.infolist():
                _check_member(url, member)
            file.extractall(folder)
    except (zipfile.BadZipFile, RuntimeError, EOFError, zlib.error) as error:
        raise ValueError(f"{url}: not a zip that can be read: {error}") from None


def _check_member(url: str, member: zipfile.ZipInfo) -> None:
    name = member.orig_filename  # filename is what zipfile has made of it
    paths = PurePosixPath(name), PureWindowsPath(name)
    if any(path.is_absolute() or path.drive or path.root or ".." in path.parts for path in paths):
        raise ValueError(f"{url}: refused, as {name!r} would be unpacked outside of the folder")
    if stat.S_ISLNK(member.external_attr >> 16):
        raise ValueError(f"{url}: refused, as {name!r} is a link")
