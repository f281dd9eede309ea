"""Signals, dying and slow ranks, other numbers of ranks, several agents, and loggers that fail."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from helpers import ROOT, launch, make_data, run_script, tiny_flags, wait_for

import train
from rove.checkpoint import load_checkpoint
from rove.metrics import read_metrics

HOOKED = ROOT / "tests/faults/hooked.py"
LONG = {"train__max_steps": 100_000, "train__eval_interval": 100_000, "train__log_interval": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data"))


def n_steps(out):
    return len(read_metrics(out)) if out.exists() else 0


def children(process):
    """Process ids of the workers that torchrun has started."""
    listing = subprocess.run(
        ["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True
    ).stdout
    pairs = [tuple(map(int, line.split())) for line in listing.splitlines()]
    return [pid for pid, parent in pairs if parent == process.pid]


def alive(pids):
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_leaves_a_checkpoint_and_its_own_exit_code(data, tmp_path, name, count):
    out, number = tmp_path / "run", getattr(signal, name)
    process = launch("train.py", *tiny_flags(data, out, **LONG))
    wait_for(lambda: n_steps(out) > 3, process)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert f"stopped by signal {int(number)} after step" in process.stdout.read()
    saved, rows = load_checkpoint(out), read_metrics(out)
    assert saved["step"] == rows[-1]["step"] == len(rows)
    count(name)


def test_a_second_ctrl_c_stops_at_once(data, tmp_path, count):
    out = tmp_path / "run"
    slow = {"HOOK_SLOW_SAVE": "30"}
    process = launch(HOOKED, *tiny_flags(data, out, **LONG), env=slow)
    wait_for(lambda: n_steps(out) > 3, process)
    process.send_signal(signal.SIGINT)
    wait_for(lambda: list(out.glob("checkpoints/*.tmp")), process)
    time.sleep(1.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(5) == 130
    count("second SIGINT")


def test_sigterm_to_one_rank_stops_both_after_the_same_step(data, tmp_path, count):
    out = tmp_path / "run"
    env = {"HOOK_COUNT": str(tmp_path)}
    process = launch(HOOKED, *tiny_flags(data, out, **LONG), ranks=2, env=env)
    wait_for(lambda: n_steps(out) > 3, process)
    workers = children(process)
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGTERM)
    assert process.wait(60) != 0
    assert not alive(workers)
    saved = load_checkpoint(out)
    assert saved["step"] == read_metrics(out)[-1]["step"] and len(saved["rng"]) == 2
    assert [(tmp_path / rank).read_text() for rank in "01"] == [str(saved["step"])] * 2
    count("SIGTERM to one rank")


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGUSR1", marks=pytest.mark.faults)])
def test_torchrun_passes_a_signal_on_and_waits_for_the_save(data, tmp_path, name, count):
    out = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    if (
        "--shutdown-timeout"
        not in subprocess.run([*torchrun, "--help"], capture_output=True, text=True).stdout
    ):
        pytest.skip("torchrun waits for a save from torch 2.12 on")
    torchrun += ["--signals-to-handle=SIGTERM,SIGINT,SIGUSR1", "--shutdown-timeout=60"]
    command = [*torchrun, str(HOOKED), *tiny_flags(data, out, **LONG)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HOOK_SLOW_SAVE": "2"}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    wait_for(lambda: n_steps(out) > 3, process)
    workers = children(process)
    process.send_signal(getattr(signal, name))
    assert process.wait(60) != 0 and not alive(workers)
    assert "stopped by signal" in process.stdout.read()
    assert load_checkpoint(out)["step"] == read_metrics(out)[-1]["step"]
    count(f"{name} to torchrun")


# ---------------------------------------------------------------- ranks that fail or are slow


def test_an_exception_on_one_rank_ends_the_job_with_its_traceback(data, tmp_path, count):
    flags = tiny_flags(data, tmp_path / "run", **LONG)
    start = time.monotonic()
    process = launch(HOOKED, *flags, ranks=2, env={"HOOK_RAISE": f"5:1:{tmp_path}/raised"})
    wait_for(lambda: len(children(process)) == 2, process)
    workers = children(process)
    assert process.wait(60) != 0 and time.monotonic() - start < 60
    errors = process.stderr.read()
    assert "a fault on rank 1 in step 5" in errors and "Traceback" in errors
    assert (tmp_path / "raised").exists() and not alive(workers)
    count("exception on a rank")


@pytest.mark.faults
def test_a_killed_rank_ends_the_job(data, tmp_path, count):
    out = tmp_path / "run"
    process = launch("train.py", *tiny_flags(data, out, **LONG), ranks=2)
    wait_for(lambda: n_steps(out) > 3, process)
    workers = children(process)
    os.kill(workers[0], signal.SIGKILL)
    assert process.wait(60) != 0 and not alive(workers)
    count("SIGKILL of one rank")


@pytest.mark.faults
def test_workers_end_when_their_agent_is_killed_before_they_have_met(data, tmp_path, count):
    out = tmp_path / "run"
    env = {"HOOK_STORE_S": "3"}
    process = launch(HOOKED, *tiny_flags(data, out, **LONG), ranks=2, env=env)
    wait_for(lambda: len(children(process)) == 2, process)
    workers = children(process)
    process.kill()  # its store dies with it, while the workers still import torch
    process.wait()
    end = time.monotonic() + 60
    while alive(workers) and time.monotonic() < end:
        time.sleep(0.1)
    assert not alive(workers) and not out.exists()
    count("SIGKILL of the agent at the start")


@pytest.mark.faults
def test_torchrun_restarts_from_the_last_checkpoint(data, tmp_path, count):
    changes = {"train__max_steps": 12, "train__checkpoint_interval": 3, "train__log_interval": 1}
    train.main(tiny_flags(data, tmp_path / "straight", **changes))
    out, marker = tmp_path / "run", tmp_path / "raised"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc_per_node=2", "--max-restarts=1", str(HOOKED)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HOOK_RAISE": f"8:0:{marker}"}
    command = [*torchrun, *tiny_flags(data, out, **changes)]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert marker.exists() and "resumed from" in result.stdout
    assert [row["step"] for row in read_metrics(out)] == list(range(1, 13))
    assert_alike(tmp_path / "straight", out)
    count("restart by torchrun")


def test_restarts_do_not_take_over_a_run_that_was_refused(data, tmp_path, count):
    out = tmp_path / "run"
    train.main(tiny_flags(data, out))
    before = {path.name: path.read_bytes() for path in (out / "checkpoints").iterdir()}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc_per_node=2", "--max-restarts=1", "train.py"]
    command = [*torchrun, *tiny_flags(data, out, train__max_steps=12, optim__lr=0.5)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode != 0 and result.stderr.count("holds a run") == 2
    assert before == {path.name: path.read_bytes() for path in (out / "checkpoints").iterdir()}
    count("restart after a refusal")


@pytest.mark.faults
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_go_on_exactly_after_a_kill(data, tmp_path, ranks, count):
    changes = {"model__dropout": 0.1, "train__max_steps": 12, "train__checkpoint_interval": 4}
    changes |= {"train__tokens_per_step": 768}
    flags = tiny_flags(data, tmp_path / "straight", **changes)
    assert run_script("train.py", *flags, ranks=ranks).returncode == 0
    out = tmp_path / "run"
    flags = tiny_flags(data, out, **changes, train__resume="auto")
    process = launch(HOOKED, *flags, ranks=ranks, env={"HOOK_SLOW_SAVE": "1.5"})
    wait_for((out / "checkpoints/step_00000008.pt.tmp").exists, process)
    for worker in children(process):
        os.kill(worker, signal.SIGKILL)
    process.wait(60)
    assert load_checkpoint(out)["step"] == 4  # three ranks: sums depend on their order
    assert run_script("train.py", *flags, ranks=ranks).returncode == 0
    a, b = load_checkpoint(tmp_path / "straight")["model"], load_checkpoint(out)["model"]
    assert all(bool((a[name] == b[name]).all()) for name in a)
    count("SIGKILL of all ranks")


def assert_alike(a, b):
    """Two runs with dropout 0 that differ in their ranks: equal to rounding."""
    for first, second in zip(read_metrics(a), read_metrics(b), strict=True):
        assert first["tokens"] == second["tokens"]
        assert abs(first["train/loss"] - second["train/loss"]) < 2e-5
    weights, others = load_checkpoint(a)["model"], load_checkpoint(b)["model"]
    assert max(float((weights[name] - others[name]).abs().max()) for name in weights) < 1e-3


def test_slow_evaluations_and_saves_are_no_timeout(data, tmp_path, count):
    changes = {"train__max_steps": 4, "train__dist_timeout_s": 2}
    env = {"HOOK_SLOW_EVAL": "5", "HOOK_SLOW_SAVE": "4"}
    result = run_script(HOOKED, *tiny_flags(data, tmp_path / "run", **changes), ranks=2, env=env)
    assert result.returncode == 0, result.stderr
    assert load_checkpoint(tmp_path / "run")["step"] == 4
    count("evaluation slower than the timeout")


@pytest.mark.faults
def test_a_run_moves_from_one_rank_to_two_and_four_and_back(data, tmp_path, count):
    changes = {"train__checkpoint_interval": 4, "train__log_interval": 1}
    train.main(tiny_flags(data, tmp_path / "straight", **changes, train__max_steps=16))
    out = tmp_path / "run"
    for stop, ranks in ((4, None), (8, 2), (12, 4), (16, None)):
        flags = tiny_flags(data, out, **changes, train__max_steps=16, train__resume="auto")
        process = launch(HOOKED, *flags, ranks=ranks, env={"HOOK_SLOW_SAVE": "1.5"})
        if stop < 16:
            saved = out / f"checkpoints/step_{stop + 4:08d}.pt.tmp"
            wait_for(saved.exists, process)  # the save after `stop` has begun and never ends
            for worker in children(process) or [process.pid]:
                os.kill(worker, signal.SIGKILL)
        process.wait(90)
        assert load_checkpoint(out)["step"] == stop
    assert_alike(tmp_path / "straight", out)
    count("change of the number of ranks", 3)


@pytest.mark.faults
def test_two_agents_meet_over_loopback(data, tmp_path, count):
    train.main(tiny_flags(data, tmp_path / "straight"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    torchrun += ["--rdzv_id=1", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}"]
    command = [*torchrun, "train.py", *tiny_flags(data, tmp_path / "run")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    agents = [subprocess.Popen(command, cwd=ROOT, env=env) for _ in range(2)]
    assert [agent.wait(120) for agent in agents] == [0, 0]
    assert_alike(tmp_path / "straight", tmp_path / "run")
    count("two agents")


# ---------------------------------------------------------------- wandb that is missing or fails


FAKE = """
import os, pathlib, time
class Run:
    id = "abc"
    def define_metric(self, name, step_metric):
        pass

    def log(self, row):
        {log}
    def finish(self):
        {finish}
def init(**settings):
    pathlib.Path(__file__).with_name("rank_" + os.environ.get("RANK", "0")).touch()
    {init}
    return Run()
"""
CASES = {
    "raises at step 7": {"log": "assert row['step'] < 7"},
    "is not logged in": {"init": "raise RuntimeError('api_key not configured')"},
    "is slow": {"log": "time.sleep(0.3)"},
    "exits at once": {"init": "raise SystemExit(1)"},
    "hangs at its start": {"init": "time.sleep(600)"},
    "hangs at its end": {"finish": "time.sleep(600)"},
}


def fake_wandb(folder, **bodies):
    """A folder with a wandb of these bodies; each rank that starts it leaves a file there."""
    folder.mkdir()
    source = FAKE.format(**{"log": "pass", "init": "pass", "finish": "pass"} | bodies)
    (folder / "wandb.py").write_text(source)
    return {"PYTHONPATH": str(folder), "HOOK_WANDB_S": "2"}


@pytest.mark.parametrize("case", [*CASES, "is missing"])
def test_wandb_cannot_hurt(data, tmp_path, case, count):
    env = fake_wandb(tmp_path / "fake", **CASES.get(case, {}))
    if case == "is missing":
        (tmp_path / "fake/wandb.py").write_text("raise ImportError('no wandb')")
    changes = {"train__max_steps": 12, "train__log_interval": 1, "log__wandb": "online"}
    if case == "is slow":
        env["HOOK_WANDB_S"] = "60"
    result = run_script(HOOKED, *tiny_flags(data, tmp_path / "run", **changes), env=env)
    assert result.returncode == 0, result.stderr
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 13))
    warnings = result.stderr.count("wandb is off from here on")
    assert warnings == (0 if case == "is slow" else 1), result.stderr
    if case == "is slow":
        slowest = min(row["perf/tok_per_s"] for row in rows[2:])
        assert 256 / slowest < 0.3, "a step waited for wandb"
        assert load_checkpoint(tmp_path / "run")["wandb_run_id"] == "abc"
    count(f"wandb {case}")


def test_a_slow_wandb_does_not_time_out_other_ranks(data, tmp_path, count):
    env = fake_wandb(tmp_path / "fake", init="time.sleep(4)")
    changes = {"train__max_steps": 4, "log__wandb": "online", "train__dist_timeout_s": 2}
    flags = tiny_flags(data, tmp_path / "run", **changes)
    result = run_script("train.py", *flags, ranks=2, env=env)
    assert result.returncode == 0, result.stderr
    assert load_checkpoint(tmp_path / "run")["wandb_run_id"] == "abc"
    assert [path.name for path in (tmp_path / "fake").glob("rank_*")] == ["rank_0"]
    count("wandb starts slowly")
