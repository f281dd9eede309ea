"""Time tokenizing a parquet file into shards, against build-nanogpt's fineweb.py, taking turns.

    python bench/prepare.py --files 'sample/*.parquet' --peer ../build-nanogpt --out prepare.json

Without --files, a parquet file is made of lines of the interpreter's standard library, drawn at
random. The peer's script runs as it is, with its hub data set and its number of processes replaced
at run time; both must write equally many tokens. Beside them runs tiktoken alone in one thread
(encode_ordinary, texts in memory); a side's share of that rate times the processes includes its
start.
"""

import glob
import multiprocessing
import os
import random
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import numpy as np  # noqa: E402
import timing  # noqa: E402
import torch  # noqa: E402

from rove.config import load  # noqa: E402
from rove.errors import user_errors  # noqa: E402
from rove.files import write_json  # noqa: E402
from rove.manifest import read_manifest  # noqa: E402


@dataclass(frozen=True)
class Settings:
    files: str | None = None
    """parquet files with a column `text`, a pattern; null: made from the standard library"""
    text_mb: int = 40
    """MB of text in the file that is made"""
    num_workers: int = 2
    """processes of either side"""
    peer: str | None = None
    """checkout of build-nanogpt"""
    repeats: int = 3
    """timed runs of each side"""
    out: str | None = None
    """JSON file of the result"""


def make_parquet(path: Path, text_mb: int) -> None:
    """Write documents of random lines, some 5 kB each, in row groups as FineWeb's files have."""
    import pyarrow
    from pyarrow import parquet

    files = sorted(Path(os.__file__).parent.glob("*.py"))
    lines = [line for file in files for line in file.read_text("utf-8").splitlines(True)]
    draw, texts, n_bytes = random.Random(0), [], 0
    while n_bytes < text_mb * 1e6:
        texts.append("".join(draw.choices(lines, k=draw.randint(20, 250))))
        n_bytes += len(texts[-1])
    parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=1000)


def check_parquet(file: str) -> None:
    """Raise ValueError for a file that is no parquet with a column `text`."""
    from pyarrow import ArrowException, parquet

    try:
        names = parquet.read_schema(file).names
    except (ArrowException, OSError) as error:
        raise ValueError(f"--files {file}: no parquet file: {str(error):.100}") from error
    if "text" not in names:
        raise ValueError(f"--files {file}: has no column text, only {', '.join(names)}")


def make_tiktoken(files: list[str]) -> Callable[[], object]:
    """Return a call that encodes all texts with tiktoken in one thread."""
    from pyarrow import parquet

    from rove.tokenizer import load_tokenizer

    encode = load_tokenizer("gpt2").encoding.encode_ordinary
    texts = [t for file in files for t in parquet.read_table(file)["text"].to_pylist() if t]
    return lambda: sum(len(encode(text)) for text in texts)


def make_ours(pattern: str, num_workers: int, counted: Path) -> Callable[[], object]:
    """Return a call that prepares the files with prepare_fineweb.py; `counted`: for its tokens."""

    def prepare() -> None:
        command = [sys.executable, str(ROOT / "prepare_fineweb.py"), "--source", "files"]
        command += ["--files", pattern, "--tokenizer", "gpt2", "--num_workers", str(num_workers)]
        with tempfile.TemporaryDirectory() as folder:
            command += ["--out_dir", f"{folder}/shards"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            manifest = read_manifest(Path(folder) / "shards") or {}
            counted.write_text(str(sum(shard["tokens"] for shard in manifest["shards"])))

    return prepare


def make_peers(
    files: list[str], num_workers: int, peer: str, counted: Path
) -> Callable[[], object]:
    """Return a call that runs the peer's script in a process of its own."""

    def prepare() -> None:
        command = [sys.executable, __file__, "run-peer", peer, str(num_workers), str(counted)]
        command += files
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"--peer {peer}: {done.stderr.strip().splitlines()[-1]:.200}")

    return prepare


def run_peer(peer: str, num_workers: int, counted: Path, files: list[str]) -> None:
    """Run fineweb.py on local files: from a copy, as it writes beside itself."""
    import datasets
    import tiktoken

    from rove.tokenizer import load_tokenizer

    multiprocessing.set_start_method("fork")
    encoding, real = load_tokenizer("gpt2").encoding, datasets.load_dataset
    tiktoken.get_encoding = lambda name: encoding
    os.cpu_count = lambda: 2 * num_workers  # it takes half of them
    with tempfile.TemporaryDirectory() as folder:
        local: Any = partial(real, "parquet", data_files=files, split="train", cache_dir=folder)
        datasets.load_dataset = lambda *_, **__: local()
        script = shutil.copy(Path(peer) / "fineweb.py", folder)
        runpy.run_path(script, run_name="__main__")
        written = Path(folder).rglob("*.npy")
        counted.write_text(str(sum(np.load(path, mmap_mode="r").size for path in written)))


def main(argv: list[str]) -> None:
    """Print the time of each side."""
    s = load(Settings, argv, prog="bench/prepare.py", description=__doc__)
    with user_errors(), tempfile.TemporaryDirectory() as name:
        timing.check_settings(s)
        if s.peer is not None and not (Path(s.peer) / "fineweb.py").is_file():
            raise ValueError(
                f"--peer {s.peer}: has no fineweb.py; give a checkout of build-nanogpt"
            )
        if s.files is None:
            make_parquet(Path(name) / "stdlib.parquet", s.text_mb)
        pattern = s.files or f"{name}/stdlib.parquet"
        files = sorted(glob.glob(pattern))
        if not files:
            raise ValueError(f"--files {pattern}: no such files")
        for file in files:
            check_parquet(file)
        n_file_bytes = sum(Path(file).stat().st_size for file in files)
        sides: dict[str, Any] = {"tiktoken, one thread": partial(make_tiktoken, files)}
        counted = {side: Path(name) / side for side in ("prepare_fineweb.py", "build-nanogpt")}
        ours, theirs = counted.values()
        sides[ours.name] = partial(make_ours, pattern, s.num_workers, ours)
        if s.peer is not None:
            sides[theirs.name] = partial(make_peers, files, s.num_workers, s.peer, theirs)
        times = timing.alternate(sides, s.repeats)
        tokens = {side: path.read_text() for side, path in counted.items() if path.exists()}
        if s.peer is not None and tokens[ours.name] != tokens.get(theirs.name):
            raise ValueError(f"--peer {s.peer}: wrote other tokens than ours, {tokens}")
    base = list(sides)[-1]
    result = timing.summary(times, base, file_bytes=n_file_bytes, tokens=tokens)
    print(f"{len(files)} parquet files, {n_file_bytes / 1e6:.0f} MB")
    timing.show(result, base)
    alone_s = result["tiktoken, one thread"]["median_s"] / s.num_workers
    for side in list(sides)[1:]:
        result[side]["share_of_tiktoken"] = alone_s / result[side]["median_s"]
        print(f"  {side:28s} {result[side]['share_of_tiktoken']:.0%} of {s.num_workers} x tiktoken")
    if s.out is not None:
        write_json(Path(s.out), result | timing.described(s, torch.device("cpu")))
        print(f"wrote {s.out}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["run-peer"]:
        run_peer(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
    else:
        main(sys.argv[1:])
