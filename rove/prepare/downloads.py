"""Downloads from the Hugging Face hub ahead of their use, which go on where they were cut."""

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from rove.files import sha256_of
from rove.prepare import hub

BLOCK_BYTES = 1 << 18  # written at once; the most that a cut connection loses


@dataclass
class Downloads:
    """Files of one commit of a data set, fetched in threads: the one asked for and the next.

    They go into the hub's cache (HF_HOME), as if its client had fetched them, or into a folder. The
    client itself starts a file anew in each process, so the bytes are fetched here, in ranges.
    """

    repo: str
    commit: str
    files: dict[str, hub.HubFile]
    """by path in the repository"""
    keep: bool = True
    """leave the files where they are after `free`, and fetch more of them at once"""
    folder: Path | None = None
    """where to put the files in place of the cache"""
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
        if not self.keep and (path := self._there(name)):
            path.resolve().unlink(missing_ok=True)  # the link last: it leads to what is left
            path.unlink(missing_ok=True)

    def missing(self) -> list[str]:
        """Return the names of the files that are not on this machine yet."""
        return [name for name in sorted(self.files) if self._there(name) is None]

    def _there(self, name: str) -> Path | None:
        """Return where a file lies, or None."""
        if self.folder is not None:
            path = self.folder / name
            return path if path.is_file() else None
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.repo, name, revision=self.commit, repo_type="dataset")
        return Path(found) if isinstance(found, str) else None

    def _fetch(self, name: str, found: "Future[Path]") -> None:
        try:
            with hub.errors(self.repo):
                found.set_result(hub.patiently(lambda: self._download(name), f"{self.repo}/{name}"))
        except BaseException as error:
            found.set_exception(error)

    def _download(self, name: str) -> Path:
        if path := self._there(name):
            return path
        file = self.files[name]
        if self.folder is not None:
            return _fetch_ranges(self.repo, self.commit, name, file, self.folder / name)
        from huggingface_hub import hf_hub_download

        if file.sha256 is not None:  # the cache keeps such files under their hash
            blobs = hub.cache_folder() / f"datasets--{self.repo.replace('/', '--')}" / "blobs"
            if not (blob := blobs / file.sha256).exists():
                _fetch_ranges(self.repo, self.commit, name, file, blob)
        return Path(  # finds the blob and links to it
            hf_hub_download(self.repo, name, repo_type="dataset", revision=self.commit)
        )


def _fetch_ranges(repo: str, commit: str, name: str, file: hub.HubFile, path: Path) -> Path:
    """Fetch a file to a path, from where an earlier try was cut (PATH.part); check size and hash.

    Raises an error of requests, or ConnectionError when the file arrived damaged.
    """
    import requests
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    part = path.with_name(f"{path.name}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    have = part.stat().st_size if part.exists() else 0
    url = hf_hub_url(repo, name, repo_type="dataset", revision=commit)
    headers = {**build_hf_headers(), "Range": f"bytes={have}-", "Accept-Encoding": "identity"}
    if have < file.size:
        with requests.get(url, headers=headers, stream=True, timeout=(10, 60)) as response:
            response.raise_for_status()
            is_rest = response.status_code == requests.codes.partial_content
            with part.open("ab" if is_rest else "wb") as target:
                for block in response.iter_content(BLOCK_BYTES):
                    target.write(block)
    size = part.stat().st_size
    if size < file.size:
        raise ConnectionError(f"{name} was cut at {size} of {file.size} bytes")
    if size > file.size or file.sha256 not in (None, sha256_of(part)):
        part.unlink()
        raise ConnectionError(f"{name} arrived damaged ({size} of {file.size} bytes)")
    part.replace(path)
    return path
