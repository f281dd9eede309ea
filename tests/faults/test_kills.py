"""SIGKILL at any moment, full disks, damaged files: a run goes on to the weights it had coming."""

import errno
import os
import random
import signal
import subprocess
import time
import warnings

import pytest
import torch
from helpers import (
    ROOT,
    command_of,
    launch,
    make_data,
    refused,
    run_script,
    small_disk,
    tiny_flags,
    wait_for,
)

import train
from rove.checkpoint import latest_path, load_checkpoint
from rove.metrics import read_metrics

HOOKED = ROOT / "tests/faults/hooked.py"


def settings(n_steps):
    return {
        "model__dropout": 0.1,
        "train__max_steps": n_steps,
        "train__checkpoint_interval": 5,
        "train__eval_interval": 10,
        "train__log_interval": 1,
    }


def same_run(a, b):
    """Whether two run folders hold the same rows, but for speed, and the same weights exactly."""
    rows = [
        [{k: v for k, v in row.items() if "perf" not in k} for row in read_metrics(run)]
        for run in (a, b)
    ]
    first, second = load_checkpoint(a), load_checkpoint(b)
    return (
        rows[0] == rows[1]
        and first["step"] == second["step"]
        and all(torch.equal(first["model"][name], second["model"][name]) for name in first["model"])
        and first["best_val_loss"] == second["best_val_loss"]
    )


def check_kills(tmp_path, n_kills, n_in_save, count):
    rng = random.Random(1)
    data = make_data(tmp_path / "data")
    n_steps = 60
    changes = settings(n_steps) | {"train__eval_interval": 7}
    train.main(tiny_flags(data, tmp_path / "straight", **changes))
    out = tmp_path / "killed"
    in_save = 0
    for number in range(n_kills):
        changes |= {
            "train__log_interval": 1 + number % 3,
            "train__keep_checkpoints": 1 + number % 2,
        }
        flags = tiny_flags(data, out, train__resume="auto", **changes)
        aims_at_save = number % (n_kills // n_in_save) == 0 and in_save < n_in_save
        before = len(read_metrics(out)) if out.exists() else 0
        before = min(before, latest_step(out))  # a resumed run writes again what was not saved
        process = launch(HOOKED, *flags, env={"HOOK_SLOW_SAVE": "0.6" if aims_at_save else "0"})
        if aims_at_save:
            wait_for(lambda: list(out.glob("checkpoints/step_*.pt.tmp")), process)
            time.sleep(rng.uniform(0, 0.3))
        else:
            new = rng.randint(1, 6)
            wait_for(lambda new=new, before=before: n_lines(out) >= before + new, process)
        process.kill()
        assert process.wait() == -signal.SIGKILL, "it must not have ended by itself"
        if aims_at_save:
            assert list(out.glob("checkpoints/step_*.pt.tmp")), "the kill was to hit a save"
            in_save += 1
        path = latest_path(out)
        assert path is None or load_checkpoint(path)["step"] >= latest_step(out) > 0
        count("SIGKILL while saving" if aims_at_save else "SIGKILL")
    result = run_script("train.py", *flags)
    assert result.returncode == 0, result.stderr
    assert not list(out.rglob("*.tmp")) and in_save == n_in_save
    count("lost steps", n_lost(tmp_path / "straight", out))
    assert same_run(tmp_path / "straight", out)


def n_lost(straight, out):
    """How many steps of a straight run another one lacks, or has with other losses."""
    found = {row["step"]: row.get("train/loss") for row in read_metrics(out)}
    return sum(found.get(row["step"]) != row["train/loss"] for row in read_metrics(straight))


def latest_step(out):
    path = latest_path(out)
    return 0 if path is None else int(path.stem.split("_")[1])


def n_lines(out):
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_few_kills_lose_nothing(tmp_path, count):
    check_kills(tmp_path, n_kills=2, n_in_save=1, count=count)


@pytest.mark.faults
def test_twenty_kills_lose_nothing(tmp_path, count):
    check_kills(tmp_path, n_kills=22, n_in_save=6, count=count)


@pytest.mark.faults
def test_a_kill_at_every_change_of_a_file_loses_nothing(tmp_path, count):
    data = make_data(tmp_path / "data")
    changes = settings(12) | {"train__eval_interval": 3, "train__keep_checkpoints": 1}
    flags = tiny_flags(data, tmp_path / "straight", **changes)
    result = run_script(ROOT / "tests/faults/sweep.py", tmp_path, *flags, timeout_s=300)
    assert result.returncode == 0, result.stdout + result.stderr
    runs = sorted(tmp_path.glob("killed_*"))
    assert len(runs) > 25, "fewer changes of files than three saves make"
    for run in runs:
        assert same_run(tmp_path / "straight", run), run
        assert not list(run.rglob("*.tmp"))
        count("lost steps", n_lost(tmp_path / "straight", run))
    count("SIGKILL between two changes of files", len(runs))


@pytest.mark.parametrize("stops", [(3, 6), (3, 6, 8, 11)])
def test_resume_twice_in_an_epoch_and_across_its_end(tmp_path, stops, count):
    data = make_data(tmp_path / "data", train=2_000)  # 62 windows, 8 a step: 7.75 steps an epoch
    changes = settings(16) | {"train__checkpoint_interval": 1, "train__keep_checkpoints": 99}
    train.main(tiny_flags(data, tmp_path / "straight", **changes))
    out = tmp_path / "stopped"
    for stop in (*stops, 16):
        train.main(tiny_flags(data, out, train__resume="auto", **changes))
        for path in [*(out / "checkpoints").glob("*.json")] if stop < 16 else []:
            path.unlink()
        for path in (out / "checkpoints").glob("step_*.pt"):
            if int(path.stem.split("_")[1]) > stop:
                path.unlink()
    assert same_run(tmp_path / "straight", out)
    count("stop within an epoch or at its end", len(stops))


# ---------------------------------------------------------------- a full disk


@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path, policy, count):
    data = make_data(tmp_path / "data")
    changes = settings(20) | {"train__keep_checkpoints": 1, "train__eval_interval": 100}
    train.main(tiny_flags(data, tmp_path / "straight", **changes))
    size_kib = latest_path(tmp_path / "straight").stat().st_size // 1024
    with small_disk(tmp_path / "disk", int(2.6 * size_kib)) as disk:
        out, ballast = disk / "run", disk / "ballast"
        ballast.write_bytes(bytes(int(0.9 * size_kib) * 1024))  # room for one checkpoint, not two
        flags = tiny_flags(
            *(data, out), **changes, train__resume="auto", train__on_save_error=policy
        )
        result = run_script("train.py", *flags)
        assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
        last = "step 10" if policy == "stop" else "step 20"
        assert f"error: {last} is not saved: " in result.stderr
        assert ("step 10 is not saved" in result.stdout) == (policy == "continue")
        assert load_checkpoint(out)["step"] == 5 and not list(out.rglob("*.tmp"))
        ballast.unlink()
        result = run_script("train.py", *flags)
        assert result.returncode == 0, result.stderr
        assert same_run(tmp_path / "straight", out)
    count("full disk")


def metrics_fsync_fails(descriptor):
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def test_metrics_wait_in_memory_while_the_disk_is_full(tmp_path, monkeypatch, count):
    from rove.metrics import Metrics, Wandb

    metrics = Metrics(tmp_path, Wandb(train.LogConfig(), tmp_path, None, {}))
    real = metrics.file

    class Full:
        def write(self, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    metrics.write([{"step": 1}])
    metrics.file = Full()
    with pytest.warns(UserWarning, match="No space left"):
        metrics.write([{"step": 2}])
    assert "No space left" in metrics.sync(), "no checkpoint may be ahead of its metrics"
    metrics.file = real
    with monkeypatch.context() as quota:
        quota.setattr(os, "fsync", metrics_fsync_fails)
        assert "quota" in metrics.sync().lower()
    assert metrics.sync() is None
    metrics.write([{"step": 3}])
    metrics.close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    count("full disk")


def test_a_save_that_fails_after_its_file_leaves_no_orphan(tmp_path, monkeypatch, count):
    from rove import checkpoint as ckpt

    run = tmp_path / "run"
    train.main(tiny_flags(make_data(tmp_path / "data"), run, **settings(10)))
    saved = load_checkpoint(run)
    saved.pop("file")
    names = {path.name for path in (run / "checkpoints").iterdir()}
    write_json = ckpt.write_json

    def full(path, content):
        if path.name == "latest.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_json(path, content)

    monkeypatch.setattr(ckpt, "write_json", full)
    for step in (15, 20, 25):
        assert "No space" in ckpt.try_to_save(run, saved | {"step": step}, False, keep=2)
        assert {path.name for path in (run / "checkpoints").iterdir()} == names
    monkeypatch.undo()
    assert ckpt.try_to_save(run, saved | {"step": 15}, False, keep=2) is None
    assert load_checkpoint(run)["step"] == 15
    count("full disk after the checkpoint")


def test_a_full_log_disk_and_a_closed_pipe_do_not_stop_a_run(tmp_path, count):
    data = make_data(tmp_path / "data")
    for name in ("full", "closed"):
        flags = tiny_flags(data, tmp_path / name, **settings(20))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if name == "full":
            with open("/dev/full", "w") as full:
                process = subprocess.Popen(
                    command_of(["train.py", *flags]), cwd=ROOT, env=environment, stdout=full
                )
        else:
            process = subprocess.Popen(
                command_of(["train.py", *flags]), cwd=ROOT, env=environment, stdout=subprocess.PIPE
            )
            process.stdout.close()
        assert process.wait(60) == 0
        assert load_checkpoint(tmp_path / name)["step"] == 20
        count(f"log {name}")


# ---------------------------------------------------------------- damaged files


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_damaged_checkpoint_is_replaced_by_the_one_before(tmp_path, damage, count):
    data = make_data(tmp_path / "data")
    train.main(tiny_flags(data, tmp_path / "straight", **settings(20)))
    out = tmp_path / "run"
    train.main(tiny_flags(data, out, **settings(20)))
    newest = latest_path(out)
    whole = newest.read_bytes()
    if damage == "cut":
        newest.write_bytes(whole[: len(whole) // 2])
    elif damage == "flipped":
        middle = len(whole) // 2
        newest.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    else:
        newest.unlink()
    with pytest.warns(UserWarning, match="step_00000020.pt is damaged or gone"):
        assert load_checkpoint(out)["step"] == 15
    with pytest.warns(UserWarning, match="damaged or gone"):
        train.main(tiny_flags(data, out, train__resume="auto", **settings(20)))
    assert same_run(tmp_path / "straight", out)
    for path in (out / "checkpoints").glob("*.pt"):
        path.write_bytes(b"no checkpoint")
    line = refused(
        run_script("train.py", *tiny_flags(data, out, train__resume="auto", **settings(20)))
    )
    assert "no checkpoint there is whole" in line
    count(f"checkpoint {damage}")


def test_a_flipped_bit_in_the_only_checkpoint_is_refused(tmp_path, count):
    data, out = make_data(tmp_path / "data"), tmp_path / "run"
    flags = tiny_flags(data, out, **settings(10), train__keep_checkpoints=1)
    train.main(flags)
    for path in (out / "checkpoints").glob("*.pt"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    line = refused(run_script("train.py", *flags, "--train.resume=auto"))
    assert "no checkpoint there is whole" in line
    count("checkpoint flipped, the only one")


@pytest.mark.parametrize(
    "content", ["", "[1]", "5", '{"file": 5}', '{"older": 5, "best": [1]}', "{"]
)
def test_damaged_pointers_lose_nothing(tmp_path, content, count):
    data, out = make_data(tmp_path / "data"), tmp_path / "run"
    train.main(tiny_flags(data, tmp_path / "straight", **settings(20)))
    train.main(tiny_flags(data, out, **settings(20)))
    folder = out / "checkpoints"
    best = (folder / "best.json").read_text()
    (folder / "best.json").write_text(content)
    train.main(tiny_flags(data, out, **settings(20), train__resume="auto"))
    assert same_run(tmp_path / "straight", out)
    (folder / "best.json").write_text(best)
    newest = latest_path(out)
    (folder / "latest.json").write_text(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert latest_path(out) == newest
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{}\n[]\n{"step": null}\n')
    train.main(tiny_flags(data, out, **settings(20), train__resume="auto"))
    assert same_run(tmp_path / "straight", out)
    count("damaged pointer", 2)


@pytest.mark.parametrize("content", [None, '{"fi'])
def test_the_newest_checkpoint_is_found_when_latest_json_is_not_and_the_best_is_older(
    tmp_path, monkeypatch, content, count
):
    losses = iter([1.0, 2.0])  # the best is at step 4, latest.json speaks of 8
    monkeypatch.setattr(train, "evaluate", lambda *_: next(losses))
    data, out = make_data(tmp_path / "data"), tmp_path / "run"
    changes = settings(8) | {"train__checkpoint_interval": 2, "train__eval_interval": 4}
    train.main(tiny_flags(data, out, **changes))
    monkeypatch.undo()
    latest, names = out / "checkpoints/latest.json", sorted((out / "checkpoints").glob("*.pt"))
    assert [path.name[-6:] for path in names] == ["004.pt", "006.pt", "008.pt"]
    latest.unlink() if content is None else latest.write_text(content)
    refused(run_script("train.py", *tiny_flags(data, out, **changes)))
    assert sorted((out / "checkpoints").glob("*.pt")) == names, "a refused start removes nothing"
    with pytest.warns(UserWarning, match="latest.json is damaged or gone"):
        assert load_checkpoint(out)["step"] == 8
    changes |= {"train__max_steps": 10, "train__resume": "auto"}
    result = run_script("train.py", *tiny_flags(data, out, **changes))
    assert "at step 8" in result.stdout and "damaged or gone" in result.stderr
    count("latest.json gone")


def test_a_full_disk_without_pointers_removes_no_checkpoint(tmp_path, monkeypatch, count):
    from rove import checkpoint as ckpt

    run = tmp_path / "run"
    train.main(tiny_flags(make_data(tmp_path / "data"), run, **settings(10)))
    saved = load_checkpoint(run)
    saved.pop("file")
    for name in ("latest.json", "best.json"):
        (run / "checkpoints" / name).unlink()
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    for broken in ("write_atomic", "write_json"):

        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(ckpt, broken, full)
        assert "No space" in ckpt.try_to_save(run, saved | {"step": 15}, False, keep=1)
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == names
        monkeypatch.undo()
    count("full disk without pointers", 2)


def test_files_that_are_not_ours_stay(tmp_path, count):
    data, out = make_data(tmp_path / "data"), tmp_path / "run"
    train.main(tiny_flags(data, out, **settings(10)))
    mine = [out / "mine.tmp", out / "checkpoints/step_5_before.pt", out / "checkpoints/notes.tmp"]
    for path in mine:
        path.write_text("mine")
    stale = [out / "config.yaml.tmp", out / "checkpoints/step_00000099.pt.tmp"]
    for path in stale:
        path.write_text("half")
    train.main(tiny_flags(data, out, **settings(15), train__resume="auto"))
    assert all(path.exists() for path in mine) and not any(path.exists() for path in stale)
    count("stale temporary file", 2)


def test_a_flipped_bit_in_a_shard_is_found_by_verify(tmp_path, count):
    out = tmp_path / "data"
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "text {i}"}}\n' for i in range(300)))
    prepare = ["prepare_fineweb.py", "--source", "files", "--files", tmp_path / "a.jsonl"]
    result = run_script(*prepare, "--tokenizer", "byte", "--out_dir", out, "--num_workers", "1")
    assert result.returncode == 0, result.stderr
    assert run_script("prepare_fineweb.py", "verify", out).returncode == 0
    shard = next(out.glob("*_train_*.bin"))
    content = bytearray(shard.read_bytes())
    content[1500] ^= 1
    shard.write_bytes(content)
    assert shard.name in refused(run_script("prepare_fineweb.py", "verify", out))
    count("flipped bit in a shard")


def test_commands_hidden_in_what_is_loaded_do_not_run(tmp_path, count):
    marker = tmp_path / "ran"
    data = make_data(tmp_path / "data")
    out = tmp_path / "run"
    train.main(tiny_flags(data, out, train__max_steps=2))

    class Bomb:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    newest = latest_path(out)
    torch.save(load_checkpoint(out) | {"rng": [Bomb()]}, newest)
    for pointer in (out / "checkpoints").glob("*.json"):
        pointer.unlink()
    with pytest.warns(UserWarning, match="refused"):
        line = "no checkpoint there is whole"
        with pytest.raises(ValueError, match=line):
            latest_path(out)
    text = f"model: !!python/object/apply:open ['{marker}', 'w']\n"
    (tmp_path / "bad.yaml").write_text(text)
    assert "bad.yaml" in refused(run_script("train.py", "--config", tmp_path / "bad.yaml"))
    (data / "manifest.json").write_text(text)
    assert "manifest.json" in refused(run_script("train.py", *tiny_flags(data, tmp_path / "new")))
    assert not marker.exists()
    count("hidden command", 3)
