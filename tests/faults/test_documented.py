"""The documents' commands, read from the files and run as they stand, at a small size.

Each block is a shell script; `python` and `torchrun` in it are tests/faults/small.py.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from documented import blocks, commands
from fake_hub import Hub, serving
from helpers import ROOT
from test_eval_tasks import COPA, COPY, WINOGRAD, write
from test_ruler import sentences, squad_content

from rove.prepare.sources import FINEWEB_EDU

pytestmark = pytest.mark.faults
# what needs the real hub, a URL, or files that a placeholder stands for, by part of its line
NOT_HERE = ("URL", "NAME", "REPOSITORY", "hub:", "lm_eval", "--source pretokenized", "--source hub",
            "rope-1,", "pip install", "gpu.sh", "-m venv", "books", "RUN ")  # fmt: skip


def corpus():
    """One parquet file of English-like text: two documents of 17,000 words, then short ones."""
    rng = np.random.default_rng(0)
    text = "the rotation of values by keys turns attention back and forth in time"
    words = np.array(text.split(" "))
    lengths = [*[17_000] * 2, *rng.integers(5, 60, 2000)]
    texts = [" ".join(rng.choice(words, n)) for n in lengths]
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": texts}), buffer, row_group_size=100)
    return {"sample/10BT/000_00000.parquet": buffer.getvalue().to_pybytes()}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the scripts, shims for python and torchrun, and small inputs."""
    names = ("train.py", "eval.py", "sample.py", "report.py", "export_hf.py", "configs")
    for name in (*names, "prepare_fineweb.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    shims = tmp_path / "shims"
    shims.mkdir()
    for name in ("python", "torchrun"):
        path = shims / name
        path.write_text(
            f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/faults/small.py {name} "$@"\n'
        )
        path.chmod(0o755)
    words = ["red", "green", "blue", "grey", "pink", "brown", "white", "black"]
    data = tmp_path / "eval_bundle/eval_data"
    either = [{"query": f"It was {w}", "choices": [w, w + "ish"], "gold": 0} for w in words * 4]
    saw = [{"context_options": [f"{w} saw", f"Bo {w}"], "continuation": "it", "gold": 1}
           for w in words * 3]  # fmt: skip
    write(data / COPA, either)
    write(data / WINOGRAD, saw)
    write(data / COPY, [{"context": f"Say {w}.", "continuation": w} for w in words * 2])
    (tmp_path / "long_text.txt").write_text("\n".join(sentences(600)))
    (tmp_path / "dev-v2.0.json").write_text(json.dumps(squad_content()))
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
    own |= {"PYTHONPATH": str(ROOT), "PATH": f"{shims}:{os.environ['PATH']}"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    with serving(Hub({FINEWEB_EDU: corpus()})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield tmp_path


def run_blocks(file, place, count, wanted=lambda text: True):
    """Run the blocks of a file that call our scripts, without the lines that cannot be run here."""
    done = 0
    for block in blocks(file):
        lines = [line for line in commands(block) if not any(word in line for word in NOT_HERE)]
        text = "\n".join(lines)
        if not wanted(text) or not any(f"{name} " in text for name in ("python", "torchrun")):
            continue
        script = subprocess.run(
            ["bash", "-euc", text], cwd=place, capture_output=True, text=True, timeout=1200
        )
        if script.returncode:
            pytest.fail(f"{text}\n{script.stdout[-3000:]}\n{script.stderr[-6000:]}")
        for line in lines:
            if "python" in line or "torchrun" in line:
                count("documented command")
                done += 1
    return done


def test_readme_from_the_hub_to_the_table(place, count):
    assert run_blocks("README.md", place, count, lambda text: "fineweb_edu_10B" in text) >= 9
    assert (place / "out/124m/report.md").stat().st_size > 500
    for run in ("124m-rope", "124m-rove", "354m-rove"):
        assert (place / f"out/{run}/checkpoints/latest.json").exists()


def test_from_a_rented_machine_to_the_papers_tables_and_every_evaluation(place, count, monkeypatch):
    monkeypatch.setenv("SKIPPED_SCALE", "354m")  # the same runs under another name
    (place / "out").mkdir()
    for mode in ("rope", "rove"):
        (place / f"out/354m-{mode}-1337").symlink_to(place / f"out/124m-{mode}-1337")
    assert run_blocks("docs/REPRODUCE.md", place, count) >= 12
    text = (place / "out/report-354m/report.md").read_text()
    for title in ("Perplexity by context length: sliding", "CORE, nanochat", "RULER at 384"):
        assert title in text
    monkeypatch.delenv("SKIPPED_SCALE")
    for mode in ("rope", "rove"):
        (place / f"out/124m-{mode}").symlink_to(place / f"out/124m-{mode}-1337")
    flags = "--checkpoint out/124m-rove --tasks vt --save_samples 4096/data/vt"
    subprocess.run(["python", "eval.py", "ruler", *flags.split()], cwd=place, check=True)
    (made,) = (place / "4096/data/vt").glob("*.jsonl")
    made.rename(made.with_name("validation.jsonl"))
    assert run_blocks("docs/EVALUATION.md", place, count, lambda text: "eval.py" in text) >= 8
    assert run_blocks("docs/DATA.md", place, count, lambda text: "fineweb-edu" in text) >= 3
