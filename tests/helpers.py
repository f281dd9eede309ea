"""What several tests make: shards, data folders, tiny runs, scripts in a process of their own."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rove.shards import MANIFEST, shard_header

ROOT = Path(__file__).resolve().parent.parent


def shard_bytes(tokens):
    """Contents of a shard that holds these ids."""
    tokens = np.asarray(tokens)
    assert tokens.size == 0 or tokens.max() < 2**16
    return shard_header(tokens.size) + tokens.astype("<u2").tobytes()


def make_data(folder, train=20_000, val=2_000, vocab_size=257, seed=0, manifest=True):
    """A data folder of learnable ids: a noisy walk over the vocabulary, two train shards."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    entries = []
    for split, n_tokens in (("train", train), ("val", val)):
        ids = np.cumsum(rng.integers(0, 4, n_tokens)) % vocab_size
        parts = np.split(ids, [n_tokens // 3]) if split == "train" else [ids]
        for number, part in enumerate(parts):
            name = f"walk_{split}_{number:06d}.bin"
            (folder / name).write_bytes(shard_bytes(part))
            entries.append({"file": name, "split": split, "tokens": int(part.size)})
    if manifest:
        tokenizer = {"name": "byte", "vocab_size": vocab_size, "sha256": None}
        content = {"tokenizer": tokenizer, "eot_id": vocab_size - 1, "shards": entries}
        (folder / MANIFEST).write_text(json.dumps(content))
    return folder


def tiny_flags(data, out, **changes):
    """Flags of a run that takes a second: 2 layers, width 32, context 32, 256 tokens a step."""
    flags = {
        "model.n_layer": 2,
        "model.n_head": 2,
        "model.n_embd": 32,
        "model.block_size": 32,
        "data.dir": data,
        "out_dir": out,
        "optim.warmup_steps": 2,
        "optim.lr": 3e-3,
        "train.max_steps": 8,
        "train.tokens_per_step": 256,
        "train.micro_batch_size": 8,
        "train.eval_interval": 4,
        "train.eval_tokens": 1024,
        "train.dtype": "float32",
        "train.device": "cpu",
        "train.compile": "false",
    }
    flags |= {key.replace("__", "."): value for key, value in changes.items()}
    return [f"--{key}={value}" for key, value in flags.items()]


def command_of(arguments, ranks=None):
    """Command line of a script of the project, by itself or under torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [sys.executable, *(torchrun if ranks else []), *map(str, arguments)]


def run_script(*arguments, ranks=None, env=None, timeout_s=120):
    """Run a script of the project in its own process, or under torchrun; return the result."""
    return subprocess.run(
        command_of(arguments, ranks),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def launch(*arguments, ranks=None, env=None):
    """Start a script and return its process, with pipes to what it prints."""
    return subprocess.Popen(
        command_of(arguments, ranks),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition, process, timeout_s=90):
    """Wait until something holds while a process runs; it must not end before."""
    end = time.monotonic() + timeout_s
    while not condition():
        if process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode}: {process.stderr.read()}")
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def refused(result):
    """The one line of a refusal: exit code 2, no traceback."""
    assert result.returncode == 2, (result.returncode, result.stdout, result.stderr)
    assert "Traceback" not in result.stderr, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    return lines[0]


@contextlib.contextmanager
def small_disk(folder, kib):
    """A tmpfs of kib KiB, where this process may mount one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a tmpfs here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
