"""README's way from a hub to a table, sample and export, command by command, at a small size."""

import re
import shlex
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from documented import blocks, commands
from fake_hub import Hub, serving
from helpers import ROOT

from rove.prepare.sources import FINEWEB_EDU

pytestmark = pytest.mark.faults
PREPARE = """
import sys, prepare_fineweb
from rove.prepare import sources
sources.FINEWEB_VAL_TOKENS = 5000
prepare_fineweb.main(sys.argv[1:])
"""
SMALL_MODEL = "--model.n_layer 1 --model.n_head 2 --model.n_embd 32 --model.block_size 64"
SMALL_RUN = (
    "--train.max_steps 6 --train.tokens_per_step 512 --train.micro_batch_size 4 "
    "--optim.warmup_steps 2 --train.eval_tokens 2048 --train.eval_interval 3 "
    "--train.checkpoint_interval 3 "
    "--train.compile false --train.device cpu"
)
SMALL = {
    "train.py": f"{SMALL_MODEL} {SMALL_RUN}",
    "eval.py": "--lengths 32,64,128 --max_tokens 2048 --device cpu",
    "sample.py": "--max_new_tokens 5 --device cpu",
}


def corpus():
    """One parquet file of English-like text in two thousand short documents."""
    rng = np.random.default_rng(0)
    text = "the rotation of values by keys turns attention back and forth in time"
    words = np.array(text.split(" "))
    texts = [" ".join(rng.choice(words, rng.integers(5, 60))) for _ in range(2000)]
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": texts}), buffer, row_group_size=100)
    return {"sample/10BT/000_00000.parquet": buffer.getvalue().to_pybytes()}


def small(line):
    """The command with fewer processes and, at its end, flags that make it small."""
    words = shlex.split(re.sub(r"--nproc_per_node=\d+", "--nproc_per_node=2", line))
    if words[0] == "torchrun":
        words[:1] = [sys.executable, "-m", "torch.distributed.run"]
    elif words[0] == "python" and words[1] == "prepare_fineweb.py":
        words[:2] = [sys.executable, "-c", PREPARE]
    else:
        words[0] = sys.executable
    script = next((word for word in words if word in SMALL), None)
    extra = shlex.split(SMALL.get(script, ""))
    if script == "eval.py" and "perplexity" not in words:
        extra = ["--device", "cpu"]
    return words + extra


def test_readme_from_the_hub_to_the_table(tmp_path, count, monkeypatch):
    for name in ("train.py", "eval.py", "sample.py", "report.py", "export_hf.py", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (block,) = (b for b in blocks("README.md") if any("fineweb_edu_10B" in x for x in b))
    lines = [line for line in commands(block) if re.match(r"(python|torchrun)\b", line)]
    assert len(lines) >= 8, lines
    for name in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1" if "OMP" in name else "0")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with serving(Hub({FINEWEB_EDU: corpus()})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        for line in lines:
            done = subprocess.run(
                small(line), cwd=tmp_path, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, (line, done.stdout[-2000:], done.stderr[-2000:])
            count("documented command")
    assert (tmp_path / "out/124m/report.md").stat().st_size > 500
    for run in ("124m-rope", "124m-rove", "354m-rove"):
        assert (tmp_path / f"out/{run}/checkpoints/latest.json").exists()
