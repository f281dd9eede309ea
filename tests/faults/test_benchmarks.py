"""The slower benchmarks run at sizes that say nothing, and the device's checks at their own."""

import json

import pytest
from helpers import refused, run_script

pytestmark = pytest.mark.faults
TINY = ["--n_layer", "1", "--n_head", "2", "--n_embd", "16", "--repeats", "2"]


def test_memory_and_checkpoint_benchmarks_write_what_they_measured(tmp_path):
    out = tmp_path / "result.json"
    result = run_script("bench/eval_memory.py", *TINY, "--length", "32", "--out", out)
    assert result.returncode == 0, result.stderr
    content = json.loads(out.read_text())
    assert 100 < content["peak_mib"] < 2000 and content["nanoGPT"] is None
    flags = ["--block_size", "32", "--compile", "false", "--out", out]
    result = run_script("bench/checkpoint.py", *TINY, *flags)
    assert result.returncode == 0, result.stderr
    content = json.loads(out.read_text())
    assert content["size_bytes"] > 1e6 and 0 < content["share"] < 1
    assert {"settings", "device", "cpu", "python", "commit", "peer_commit"} <= set(content)


def test_device_checks_hold_here_at_their_own_size(tmp_path):
    out = tmp_path / "checks.json"
    result = run_script("bench/device_checks.py", "--n_layer", "1", "--out", out)
    assert result.returncode == 0, result.stdout + result.stderr
    checks = {row["check"]: row for row in json.loads(out.read_text())["checks"]}
    assert len(checks) == 31 and checks["losses after a resume"]["value"] == 0
    assert all(row["value"] <= row["bound"] for row in checks.values())


def test_prepare_benchmark_compares_with_tiktoken_alone(tmp_path):
    out = tmp_path / "result.json"
    result = run_script("bench/prepare.py", "--text_mb", "1", "--repeats", "1", "--out", out)
    assert result.returncode == 0, result.stderr
    content = json.loads(out.read_text())
    assert content["file_bytes"] > 1e5
    assert 0 < content["prepare_fineweb.py"]["share_of_tiktoken"] < 2
    (tmp_path / "fineweb.py").write_text("raise SystemExit(0)")
    flags = ["--text_mb", "1", "--repeats", "1", "--peer", tmp_path]
    assert "wrote other tokens than ours" in refused(run_script("bench/prepare.py", *flags))


def test_generation_benchmark_writes_what_it_measured(tmp_path):
    out = tmp_path / "result.json"
    flags = ["--prompt_tokens", "8", "--new_tokens", "4", "--out", out]
    result = run_script("bench/generate.py", *TINY, *flags)
    assert result.returncode == 0, result.stderr
    assert json.loads(out.read_text())["rove"]["token_s"] > 0
