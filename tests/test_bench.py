"""The benchmarks run at sizes that say nothing, and their arithmetic is right."""

import json
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
    assert (result["ours"]["faster_low"], result["ours"]["faster_high"]) == (2.0, 4.0)


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


def test_a_peer_without_a_model_is_refused(tmp_path):
    result = run_script("bench/train_step.py", *TINY, "--peer", tmp_path)
    assert result.returncode == 2 and "has no model.py" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "script, flags, keys",
    [
        ("train_step", ["--block_size", "16", "--compile", "false"], "share_of_matmul_rate"),
        ("generate", ["--prompt_tokens", "8", "--new_tokens", "4"], "token_s"),
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


def test_memory_and_checkpoint_benchmarks_write_what_they_measured(tmp_path):
    out = tmp_path / "result.json"
    result = run_script("bench/eval_memory.py", *TINY, "--length", "32", "--out", out)
    assert result.returncode == 0, result.stderr
    content = json.loads(out.read_text())
    assert 100 < content["peak_mib"] < 2000 and content["nanoGPT"] is None
    result = run_script("bench/checkpoint.py", *TINY, "--block_size", "32", "--out", out)
    assert result.returncode == 0, result.stderr
    content = json.loads(out.read_text())
    assert content["size_bytes"] > 1e6 and 0 < content["share_at_checkpoint_interval"] < 1


def test_an_evaluation_that_fails_is_one_line(tmp_path):
    result = run_script("bench/eval_memory.py", *TINY, "--n_head", "3")
    assert result.returncode == 2 and "could not be written" in result.stderr


def test_prepare_benchmark_compares_with_tiktoken_alone(tmp_path):
    out = tmp_path / "result.json"
    result = run_script("bench/prepare.py", "--text_mb", "1", "--repeats", "1", "--out", out)
    assert result.returncode == 0, result.stderr
    content = json.loads(out.read_text())
    assert content["file_bytes"] > 1e5
    assert 0 < content["prepare_fineweb.py"]["share_of_tiktoken"] < 2
