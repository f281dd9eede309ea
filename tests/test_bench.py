"""The benchmarks run at sizes that say nothing, and their arithmetic is right."""

import functools
import importlib
import itertools
import json
import math
import os
import subprocess
import sys
import time

import pytest
import torch
from helpers import ROOT, run_script

sys.path.insert(0, str(ROOT / "bench"))

import device_checks  # noqa: E402
import table  # noqa: E402
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
    with pytest.raises(ValueError, match="'killed' was ended by signal 9"):
        timing.alternate({"killed": make_killed}, repeats=1)


def test_warm_up_is_not_counted_and_nobody_always_follows_the_same_one(tmp_path):
    log = tmp_path / "log"
    sides = {name: functools.partial(make_slow_at_first, log, name) for name in "abc"}
    times = timing.alternate(sides, repeats=12, warm_up=2)
    assert max(map(max, times.values())) < 0.2, "the first two took longer"
    order = log.read_text()
    assert all(sorted(order[n : n + 3]) == ["a", "b", "c"] for n in range(0, len(order), 3))
    followers = {(a, b) for a, b in itertools.pairwise(order) if a != b}
    assert followers == set(itertools.permutations("abc", 2))


def make_slow_at_first(log, name):
    calls = itertools.count()

    def call():
        with log.open("a") as file:
            file.write(name)
        time.sleep(0.3 if next(calls) < 2 else 0)

    return call


def make_killed():
    os.kill(os.getpid(), 9)


def make_pause():
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
    ratio = content["rove"]["median_s"] / content["rope"]["median_s"]
    assert content["rove_over_rope"] == ratio and content["peer_commit"] is None
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
        (["{out}", "--peer"], "has no model.py"),
        (["{out}", "--fast"], "unknown flag --fast"),
        (["/proc/x"], "cannot be written"),
    ],
)
def test_gpu_script_refuses_what_it_does_not_understand(tmp_path, arguments, words):
    command = [str(ROOT / "bench/gpu.sh"), *(a.format(out=tmp_path / "o") for a in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and words in done.stderr


@pytest.mark.parametrize(
    ("does", "word"), [("echo this is why; exit 3", "generate.log: this is why"), ("exit 0", "see")]
)
def test_gpu_script_names_what_failed_and_takes_a_new_folder(tmp_path, does, word):
    """Every step fails here, as the stand-in for Python only fails, or does nothing."""
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\ncase $1 in *table.py) exec {sys.executable} "$@";; esac\n{does}\n')
    fake.chmod(0o755)
    command = {"args": [str(ROOT / "bench/gpu.sh"), "o", "--dry_run"], "cwd": tmp_path}
    command |= {"capture_output": True, "text": True, "env": os.environ | {"PYTHON": str(fake)}}
    done = subprocess.run(**command)
    assert done.returncode == 1 and done.stdout.count("FAILED (") == 6, done.stdout
    assert f"| generate | | | | no result, {word}" in done.stdout
    done = subprocess.run(**command)
    assert done.returncode == 2 and "holds something; name a new folder" in done.stderr


def test_the_table_shows_figures_in_their_units_and_what_was_missed():
    side = {"median_s": 0.25, "faster": 2.0, "token_s": 0.004}
    content = {"base": "rope", "rope": side, "rove": side, "rove_over_rope": 1.25, "peak_mib": 1500}
    checks = [{"check": name, "value": value, "bound": 0.1, "holds": holds}
              for name, value, holds in (("a", 0.05, True), ("b", "nan", False))]  # fmt: skip
    assert table.lines_of("step", content | {"seconds": 3.0, "checks": checks}) == [
        "| step | rope | 250.0 ms |  | 4.00 ms a token |",
        "| step | rove | 250.0 ms | 2.00 x rope | 4.00 ms a token |",
        "| step | rove / rope | 1.250 | | |",
        "| step | eval.py | 3000 ms | | host's peak 1,500 MiB |",
        "| step | a | 5.00e-02 <= 0.1 | | ok |",
        "| step | b | nan <= 0.1 | | MISSED |",
    ]


@pytest.mark.parametrize("wrong", [math.nan, 1.0, math.inf])
def test_a_device_that_misses_a_bound_fails(tmp_path, monkeypatch, capsys, wrong):
    good = {"against_float64": {"float32": 0.0}, "compiled_against_eager": {"loss": 0.0}}
    good |= {"update_against_float64": 0.0, "resumed_against_straight": 0.0}
    for bad in (None, *good):
        for name, value in good.items():
            found = wrong if name == bad else 0.0
            found = dict.fromkeys(value, found) if isinstance(value, dict) else found
            monkeypatch.setattr(device_checks, name, lambda *_, found=found: found)
        out = tmp_path / "checks.json"
        if bad is None:
            device_checks.main(["--out", str(out)])
            continue
        with pytest.raises(SystemExit, match="1"):
            device_checks.main(["--out", str(out)])
        rows = json.loads(out.read_text())["checks"]
        assert not all(row["holds"] for row in rows) and "MISSED" in capsys.readouterr().out


def test_the_update_check_sees_what_is_wrong(monkeypatch):
    cpu, real = torch.device("cpu"), device_checks.update
    for dtype in (torch.bfloat16, torch.float16):
        assert device_checks.update_against_float64(cpu, dtype) <= device_checks.UPDATE_BOUND

    def spoiled(what):
        def update(optimizer, scaler, lr, clip):
            if what == "rate":
                return real(optimizer, scaler, -lr, clip)
            if what == "clip":
                return real(optimizer, scaler, lr, 2 * clip)
            norm = real(optimizer, scaler, lr, clip)
            if not norm.isfinite():
                for state in optimizer.state.values():
                    state["exp_avg_sq" if what == "moment" else "step"] += 1
            return norm

        return update

    for what in ("rate", "clip", "moment", "step"):
        monkeypatch.setattr(device_checks, "update", spoiled(what))
        found = device_checks.update_against_float64(cpu, torch.bfloat16)
        assert not found <= device_checks.UPDATE_BOUND, what


@pytest.mark.parametrize(
    ("script", "flags", "words"),
    [
        ("generate", ["--prompt_tokens", "2000"], "more than 1024 in all"),
        ("device_checks", ["--n_embd", "32"], "--n_embd 32: must be a multiple of 64"),
        ("device_checks", ["--length", "2"], "--length 2: must be 3 to 1024"),
        ("train_step", ["--out", "x", "--profile", "./x"], "name two files"),
        ("checkpoint", ["--micro_batch_size", "3"], "must divide a step's 524288"),
        ("eval_memory", ["--pos_mode", "foo"], "--pos_mode"),
        ("prepare", ["--files", __file__], "no parquet file"),
    ],
)
def test_settings_that_cannot_be_measured_are_one_line(script, flags, words, capsys):
    assert words in refused_here(script, flags, capsys)
