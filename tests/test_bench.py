"""The benchmarks run at sizes that say nothing, and their arithmetic is right."""

import importlib
import json
import os
import subprocess
import sys

import pytest
from helpers import ROOT, run_script

sys.path.insert(0, str(ROOT / "bench"))

import timing  # noqa: E402

TINY = ["--n_layer", "1", "--n_head", "2", "--n_embd", "16", "--repeats", "2"]


def test_ratios_are_those_of_medians_and_spread_that_within_rounds():
    times = {"peer": [4.0, 2.0, 6.0], "ours": [1.0, 1.0, 2.0]}
    result = timing.summary(times, "peer")
    assert result["ours"]["faster"] == 4.0 and result["peer"]["faster"] == 1.0
    assert result["ours"]["median_s"] == 1.0
    assert (result["ours"]["faster_low"], result["ours"]["faster_high"]) == (2.5, 3.5)


def test_sides_take_turns_in_processes_of_their_own_and_a_failing_one_is_named():
    times = timing.alternate({"a": make_pause, "b": make_pause}, repeats=3)
    assert all(len(own) == 3 and min(own) > 0.005 for own in times.values())
    with pytest.raises(ValueError, match="'bad' failed"):
        timing.alternate({"bad": make_nothing}, repeats=1)


def make_pause():
    import time

    return lambda: time.sleep(0.01)


def make_nothing():
    raise RuntimeError("cannot be made")


def test_a_peer_without_a_model_is_refused(tmp_path, capsys):
    assert "has no model.py" in refused_here("train_step", [*TINY, "--peer", tmp_path], capsys)


@pytest.mark.parametrize(
    "script, flags, keys",
    [
        ("train_step", ["--block_size", "16", "--compile", "false"], "share_of_matmul_rate"),
    ],
)
def test_benchmarks_write_what_they_measured(tmp_path, script, flags, keys):
    out = tmp_path / "result.json"
    result = run_script(f"bench/{script}.py", *TINY, *flags, "--out", out)
    assert result.returncode == 0, result.stderr
    content = json.loads(out.read_text())
    for side in ("rope", "rove"):
        assert len(content[side]["times_s"]) == 2 and content[side][keys] > 0
    assert content["settings"]["n_embd"] == 16 and "torch" in content["device"]


def refused_here(script, flags, capsys):
    """The one line with which a benchmark refuses its flags, without a process of its own."""
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(script).main([str(flag) for flag in flags])
    err = capsys.readouterr().err
    assert stopped.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize("script", ["train_step", "generate", "eval_memory", "checkpoint"])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--n_head", "3"], "--n_embd 16: must be --n_head 3 times"),
        (["--repeats", "0"], "--repeats 0: must be at least 1"),
        (["--out", "/nowhere/x.json"], "--out /nowhere/x.json: cannot be written"),
    ],
)
def test_bad_settings_are_one_line_before_anything_is_measured(script, flags, words, capsys):
    assert words in refused_here(script, [*TINY, *flags], capsys)


def test_a_peer_that_cannot_be_imported_is_one_line_and_stays_as_it_was(tmp_path, capsys):
    flags = [*TINY, "--peer", tmp_path]
    (tmp_path / "model.py").write_text("this is no Python")
    assert "cannot be imported" in refused_here("train_step", flags, capsys)
    (tmp_path / "model.py").write_text("import torch")
    assert "model.py has no GPT" in refused_here("train_step", flags, capsys)
    (tmp_path / "model.py").write_text("import torch\nGPT = GPTConfig = dict")
    timing.peer_module(str(tmp_path), "model.py")
    assert [path.name for path in tmp_path.iterdir()] == ["model.py"]


def test_spread_never_leaves_what_was_measured():
    result = timing.summary({"peer": [1.0, 2.0], "ours": [1.0, 1.0]}, "peer")
    assert 1.0 <= result["ours"]["faster_low"] <= result["ours"]["faster_high"] <= 2.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no OUT given"),
        (["--dry_run"], "no OUT given"),
        (["{out}", "--peer"], "is no folder"),
        (["{out}", "--fast"], "unknown flag --fast"),
        (["/proc/x"], "cannot be written"),
    ],
)
def test_gpu_script_refuses_what_it_does_not_understand(tmp_path, arguments, words):
    command = [str(ROOT / "bench/gpu.sh"), *(a.format(out=tmp_path / "o") for a in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and words in done.stderr


def test_gpu_script_names_what_failed_and_shows_nothing_old(tmp_path):
    """Every step fails here, as the stand-in for Python only fails."""
    (tmp_path / "o").mkdir()
    (tmp_path / "o/notes.json").write_text("of the user's own")
    (tmp_path / "o/generate.json").write_text(json.dumps({"rove": {"median_s": 1, "faster": 1}}))
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\ncase $1 in *table.py) exec {sys.executable} "$@";; esac\nexit 3\n')
    fake.chmod(0o755)
    done = subprocess.run(
        [str(ROOT / "bench/gpu.sh"), "o", "--dry_run"], cwd=tmp_path, capture_output=True,
        text=True, env={**os.environ, "PYTHON": str(fake)},
    )  # fmt: skip
    assert done.returncode == 1 and done.stdout.count("FAILED: ") == 6, done.stdout
    assert "| generate | | | | no result, see generate.log |" in done.stdout
    assert (tmp_path / "o/notes.json").exists() and "notes" not in done.stdout


@pytest.mark.parametrize(
    ("script", "flags", "words"),
    [
        ("generate", ["--prompt_tokens", "2000"], "more than 1024 in all"),
        ("device_checks", ["--n_embd", "32"], "--n_embd 32: must be a multiple of 64"),
        ("prepare", ["--files", __file__], "no parquet file"),
    ],
)
def test_settings_that_cannot_be_measured_are_one_line(script, flags, words, capsys):
    assert words in refused_here(script, flags, capsys)
