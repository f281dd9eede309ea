"""What the Hugging Face hub says of a data set, asked patiently, and its faults in one line.

The hub's own client does the asking, so HF_TOKEN, HF_HOME and HF_ENDPOINT mean what they mean
everywhere.
"""

import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rove.prepare.units import one_line

MAX_RETRIES = 8  # with the waits below about four minutes
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
LIST_S = 60.0  # longest wait for the names of the files
BUSY = (408, 425, 429, 500, 502, 503, 504)
NETWORK_MODULES = ("httpx", "httpcore", "requests", "urllib3")  # clients of old and new versions

T = TypeVar("T")


@dataclass(frozen=True)
class HubFile:
    """What the hub says of a file."""

    size: int
    sha256: str | None


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
        listed = patiently(lambda: _within(LIST_S, tree), repo)
        items: list[Any] = [i for i in listed if i.path.endswith(suffix)]
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


def _within(seconds: float, call: Callable[[], T]) -> T:
    """Call in a thread; TimeoutError when it takes longer. Not every call of the client has one."""
    found: Future[T] = Future()

    def work() -> None:
        try:
            found.set_result(call())
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return found.result(seconds)
    except FutureTimeout:
        raise TimeoutError(f"no answer in {seconds:g} s") from None


@contextmanager
def errors(repo: str) -> Iterator[None]:
    """Turn what the hub's clients raise, which shares no base class, into one line."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)[:300]}"
        if _status(error) in (401, 403):
            reason += "; set HF_TOKEN, or accept the data set's terms on its page"
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
