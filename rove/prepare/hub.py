"""Files of the Hugging Face hub: the commit of a branch, patient downloads ahead of their use.

The hub's own client does the work, so HF_TOKEN, HF_HOME and HF_ENDPOINT mean what they mean
everywhere, and a download that was cut goes on where it stopped.
"""

import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rove.files import sha256_of
from rove.prepare.units import one_line

MAX_RETRIES = 8  # with the waits below about four minutes
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
BUSY = (408, 425, 429, 500, 502, 503, 504)
NETWORK_MODULES = ("httpx", "httpcore", "requests", "urllib3")  # clients of old and new versions

T = TypeVar("T")


@dataclass(frozen=True)
class HubFile:
    """What the hub says of a file."""

    size: int
    sha256: str | None


@dataclass
class Downloads:
    """Files of one commit of a data set, fetched in threads: the one asked for and the next."""

    repo: str
    commit: str
    files: dict[str, HubFile]
    """by path in the repository"""
    keep: bool = True
    """leave the files in the hub's cache after `free`, and fetch more of them at once"""
    local_dir: Path | None = None
    """folder for the files in place of the cache"""
    _found: dict[str, "Future[Path]"] = field(default_factory=dict)

    def get(self, name: str) -> Path:
        """Wait for a file; ValueError when it cannot be had. Those after it are fetched too."""
        names = sorted(self.files)
        first = names.index(name)
        for wanted in names[first : first + (4 if self.keep else 2)]:
            if wanted not in self._found:
                found: Future[Path] = Future()
                self._found[wanted] = found
                # a daemon: an interrupted program does not wait for gigabytes to arrive
                threading.Thread(target=self._fetch, args=(wanted, found), daemon=True).start()
        return self._found[name].result()

    def free(self, name: str) -> None:
        """Remove a file that is done with, unless files are kept."""
        if not self.keep and (path := self._cached(name)):
            blob = path.resolve()
            path.unlink()
            blob.unlink(missing_ok=True)

    def missing(self) -> list[str]:
        """Return the names of the files that are not on this machine yet."""
        return [name for name in sorted(self.files) if self._cached(name) is None]

    def _cached(self, name: str) -> Path | None:
        if self.local_dir is not None:
            path = self.local_dir / name
            return path if path.is_file() else None
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.repo, name, revision=self.commit, repo_type="dataset")
        return Path(found) if isinstance(found, str) else None

    def _fetch(self, name: str, found: "Future[Path]") -> None:
        try:
            with errors(self.repo):
                found.set_result(patiently(lambda: self._download(name), f"{self.repo}/{name}"))
        except BaseException as error:
            found.set_exception(error)

    def _download(self, name: str) -> Path:
        from huggingface_hub import hf_hub_download

        path = Path(
            hf_hub_download(
                repo_id=self.repo, repo_type="dataset", revision=self.commit, filename=name,
                local_dir=self.local_dir,
            )
        )  # fmt: skip
        file, size = self.files[name], path.stat().st_size
        if size != file.size or file.sha256 not in (None, sha256_of(path)):
            path.resolve().unlink()
            path.unlink(missing_ok=True)
            raise ConnectionError(f"{name} arrived damaged ({size} of {file.size} bytes)")
        return path


def resolve(repo: str, revision: str) -> str:
    """Return the commit that a branch, tag or commit of a data set stands for."""
    if re.fullmatch("[0-9a-f]{40}", revision):
        return revision
    with errors(repo):
        from huggingface_hub import HfApi

        info = lambda: HfApi().dataset_info(repo, revision=revision, timeout=10)  # noqa: E731
        return str(patiently(info, repo, first_contact=True).sha)


def list_files(repo: str, commit: str, folder: str, suffix: str) -> dict[str, HubFile]:
    """Return the files of a folder ("": the top) by how their names end; ValueError if none."""
    where: dict[str, Any] = {"repo_type": "dataset", "revision": commit}
    with errors(repo):
        from huggingface_hub import HfApi

        tree = lambda: list(HfApi().list_repo_tree(repo, folder or None, **where))  # noqa: E731
        items: list[Any] = [i for i in patiently(tree, repo) if i.path.endswith(suffix)]
        if not items:
            raise ValueError(f"no {suffix} file in {folder or 'it'} at revision {commit}")
    return {i.path: HubFile(i.size, i.lfs.sha256 if i.lfs else None) for i in items}


def cache_folder() -> Path:
    """Return where the hub's client keeps downloads (HF_HOME)."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def patiently(call: Callable[[], T], what: str, first_contact: bool = False) -> T:
    """Call until it succeeds; a busy hub or a cut connection is tried again, later and later.

    first_contact: a connection that cannot be made at all is an error at once.
    """
    for attempt in range(MAX_RETRIES + 1):
        try:
            return call()
        except Exception as error:
            busy = _status(error) in BUSY
            again = busy or (_is_cut(error) and not first_contact)
            if not again or attempt == MAX_RETRIES:
                raise
            wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**attempt) * random.uniform(0.5, 1)
            wait_s = max(wait_s, min(_retry_after_s(error), 5 * LONGEST_WAIT_S))
            reason = f"{type(error).__name__}, {one_line(error)[:100]}"
            print(f"{what}: {reason}; trying again in {wait_s:.1f} s", file=sys.stderr)
        time.sleep(wait_s)
    raise AssertionError("unreachable")


@contextmanager
def errors(repo: str) -> Iterator[None]:
    """Turn what the hub's clients raise, which shares no base class, into one line."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)[:300]}"
        raise ValueError(f"cannot read data set {repo} from the hub: {reason}") from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _status(error: Exception) -> int | None:
    """Return the HTTP status behind an error, or None."""
    responses = (getattr(link, "response", None) for link in _chain(error))
    return next((r.status_code for r in responses if r is not None), None)


def _retry_after_s(error: Exception) -> float:
    for link in _chain(error):
        if (response := getattr(link, "response", None)) is not None:
            wait = response.headers.get("Retry-After", "")
            return float(wait) if wait.isdecimal() else 0.0
    return 0.0


def _is_cut(error: Exception) -> bool:
    """Say whether the connection failed; an answer of the hub, such as "not found", is no such."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    links = list(_chain(error))
    if _status(error) is not None or any(isinstance(i, OfflineModeIsEnabled) for i in links):
        return False
    return any(
        isinstance(link, ConnectionError | TimeoutError)
        or type(link).__module__.startswith(NETWORK_MODULES)
        or "Consistency check failed" in str(link)
        or type(link) is RuntimeError  # hf_xet's
        for link in links
    )
