"""The training loop: batches, gradients, precision, faults, checkpoints, resume, bad input."""

import gc
import json
import math
import re
import shutil

import pytest
import torch
from helpers import ROOT, make_data, refused, run_script, tiny_flags

import train
from model import GPT
from rove import device as dev
from rove.checkpoint import load_checkpoint
from rove.metrics import read_metrics
from rove.optim import learning_rate
from rove.shards import BatchOrder, split_batch


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data"))


def run(data, out, **changes):
    """Train a tiny model in this process; return its metrics rows."""
    train.main(tiny_flags(data, out, **changes))
    return read_metrics(out)


def refusal(capsys, script, flags):
    """What a script, run in this process, says as it exits with 2: one line on stderr."""
    capsys.readouterr()
    try:
        script.main([str(flag) for flag in flags])
    except SystemExit as stop:  # not kept: its traceback would keep the run folder locked
        code = stop.code
    else:
        code = 0
    gc.collect()
    error = capsys.readouterr().err
    assert code == 2 and error.startswith("error: ") and error.count("\n") == 1, (code, error)
    return error


# ---------------------------------------------------------------- the run folder


def test_a_run_leaves_what_the_design_says(data, tmp_path):
    rows = run(data, tmp_path / "run", model__pos_mode="rove")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert {"tokens", "train/loss", "lr", "grad_norm", "perf/tok_per_s"} < set(rows[0])
    assert [row["step"] for row in rows if "val/loss" in row] == [4, 8]
    assert rows[-1]["tokens"] == 8 * 256 and rows[-1]["train/loss"] < rows[0]["train/loss"]
    latest = json.loads((tmp_path / "run/checkpoints/latest.json").read_text())
    best = json.loads((tmp_path / "run/checkpoints/best.json").read_text())
    assert latest["step"] == 8 and best["val_loss"] == rows[-1]["val/loss"]
    saved = torch.load(tmp_path / "run/checkpoints" / latest["file"], weights_only=True)
    assert set(saved) == {
        *("format", "model", "model_config", "optimizer", "scaler", "step", "tokens", "rng"),
        *("tokenizer", "data", "best_val_loss", "wandb_run_id", "environment"),
    }
    assert saved["model_config"]["rotary_pairing"] == "halves"
    assert all(value.dtype == torch.float32 for value in saved["model"].values())
    assert str(tmp_path) not in json.dumps(saved["data"])
    model = GPT.from_checkpoint(tmp_path / "run")
    assert model.config.pos_mode == "rove" and not model.training
    again = GPT.from_checkpoint(tmp_path / "run/checkpoints" / latest["file"], pos_mode="rove+yarn")
    assert again.config.pos_mode == "rove+yarn"


def test_vocabulary_is_the_datas(data, tmp_path, capsys):
    run(data, tmp_path / "a", train__max_steps=1)
    assert load_checkpoint(tmp_path / "a")["model_config"]["vocab_size"] == 257
    assert "257 ids" in refusal(capsys, train, tiny_flags(data, "b", model__vocab_size=300))


def test_checkpoints_are_pruned_but_for_the_best_and_the_newest(data, tmp_path):
    out = tmp_path / "run"
    run(data, out, train__checkpoint_interval=1, train__keep_checkpoints=2, optim__lr=1e-9)
    names = sorted(path.name for path in (out / "checkpoints").glob("*.pt"))
    best = json.loads((out / "checkpoints/best.json").read_text())["file"]
    assert set(names) == {"step_00000007.pt", "step_00000008.pt", best}
    assert not list(out.rglob("*.tmp"))


def test_starting_in_a_run_is_refused_with_the_two_ways_forward(data, tmp_path, capsys):
    out = tmp_path / "run"
    run(data, out, train__max_steps=2)
    error = refusal(capsys, train, tiny_flags(data, out, train__max_steps=2))
    assert "--train.resume auto" in error and "--out_dir" in error


# ---------------------------------------------------------------- resume


@pytest.mark.parametrize("stops", [(4,), (3, 5)])
def test_resume_gives_the_weights_of_one_straight_run(data, tmp_path, stops):
    settings = {
        "model__dropout": 0.1,
        "train__checkpoint_interval": 1,
        "train__keep_checkpoints": 9,
    }
    straight = run(data, tmp_path / "straight", **settings)
    out = tmp_path / "resumed"
    run(data, out, **settings)
    for step in stops:  # as if killed after the checkpoint of `step`, with metrics further on
        for path in (out / "checkpoints").glob("*"):
            if path.suffix == ".json" or int(path.stem.split("_")[1]) > step:
                path.unlink()
        rows = run(data, out, train__resume="auto", **settings)
    assert [row["step"] for row in rows] == list(range(1, 9))
    for a, b in zip(straight, rows, strict=True):
        assert {k: v for k, v in a.items() if "perf" not in k} == {
            k: v for k, v in b.items() if "perf" not in k
        }
    a, b = load_checkpoint(tmp_path / "straight"), load_checkpoint(out)
    assert all(torch.equal(a["model"][name], b["model"][name]) for name in a["model"])
    assert a["best_val_loss"] == b["best_val_loss"] and torch.equal(
        a["rng"][0]["cpu"], b["rng"][0]["cpu"]
    )


def test_resume_without_a_checkpoint_starts_over_with_clean_metrics(data, tmp_path):
    out = tmp_path / "run"
    first = run(data, out, train__max_steps=3)
    shutil.rmtree(out / "checkpoints")
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "tok')  # a line cut off by a kill
    second = run(data, out, train__max_steps=3, train__resume="auto")
    assert [row["step"] for row in second] == [1, 2, 3]
    assert [r["train/loss"] for r in first] == [r["train/loss"] for r in second]


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(data, tmp_path, capsys):
    out = tmp_path / "run"
    run(data, out, train__checkpoint_interval=2, train__keep_checkpoints=9)
    newest = out / "checkpoints/step_00000008.pt"
    newest.write_bytes(newest.read_bytes()[:-1000])
    with pytest.warns(UserWarning, match="step_00000008.pt is damaged"):
        assert load_checkpoint(out)["step"] == 6
    with pytest.warns(UserWarning, match="damaged"):
        assert run(data, out, train__resume="auto")[-1]["step"] == 8
    assert "at step 6" in capsys.readouterr().out


def test_resume_refuses_another_model_and_lists_other_changes(data, tmp_path, capsys):
    out = tmp_path / "run"
    run(data, out, train__max_steps=2)
    for change in ({"model__n_layer": 3}, {"model__pos_mode": "rove"}, {"seed": 5}):
        error = refusal(capsys, train, tiny_flags(data, out, train__resume="auto", **change))
        assert next(iter(change)).replace("__", ".") in error
    run(data, out, train__resume="auto", train__max_steps=4)
    assert "train.max_steps was 2, is now 4" in capsys.readouterr().out
    other = make_data(tmp_path / "other", seed=1)
    flags = tiny_flags(other, out, train__resume="auto", train__max_steps=6)
    assert "its data differ" in refusal(capsys, train, flags)


def test_a_changed_environment_is_named(data, tmp_path, capsys):
    run(data, tmp_path / "run", train__max_steps=2)
    torch.set_num_threads(2)
    try:
        run(data, tmp_path / "run", train__max_steps=2, train__resume="auto")
    finally:
        torch.set_num_threads(1)
    shown = capsys.readouterr().out
    assert "warning: threads was 1, is now 2" in shown and shown.count("warning:") == 1


def test_a_second_writer_is_refused(data, tmp_path):
    from rove.files import lock_folder

    with lock_folder(tmp_path / "run", "training"):
        line = refused(run_script("train.py", *tiny_flags(data, tmp_path / "run")))
    assert "another process" in line


# ---------------------------------------------------------------- ranks and micro-batches


@pytest.fixture(scope="module")
def by_ranks(data, tmp_path_factory):
    """The same two steps on 1 rank x 6 micro-steps and on 2 ranks x 3, spied upon."""
    folder = tmp_path_factory.mktemp("ranks")
    changes = {
        "train__max_steps": 2,
        "train__tokens_per_step": 12 * 32,
        "train__micro_batch_size": 2,
    }
    for ranks in (1, 2):
        (folder / f"spy{ranks}").mkdir()
        flags = tiny_flags(data, folder / f"run{ranks}", model__pos_mode="rove", **changes)
        result = run_script(
            "tests/spy.py", *flags, ranks=ranks, env={"SPY_DIR": str(folder / f"spy{ranks}")}
        )
        assert result.returncode == 0, result.stderr
    return folder


def test_two_ranks_accumulate_the_gradients_of_one(by_ranks):
    def read(name):
        return torch.load(by_ranks / name, weights_only=True)

    for step in (1, 2):
        one = read(f"spy1/rank0_step{step}.pt")["grads"]
        first, second = (read(f"spy2/rank{rank}_step{step}.pt")["grads"] for rank in (0, 1))
        for name in one:
            assert torch.equal(first[name], second[name]), name
            assert (one[name] - first[name]).abs().max() < 1e-5, name


def test_losses_and_tokens_do_not_depend_on_ranks(by_ranks):
    one, two = read_metrics(by_ranks / "run1"), read_metrics(by_ranks / "run2")
    for a, b in zip(one, two, strict=True):
        assert a["tokens"] == b["tokens"] and a["lr"] == b["lr"]
        assert abs(a["train/loss"] - b["train/loss"]) < 1e-5
        assert abs(a["grad_norm"] - b["grad_norm"]) < 1e-4
    assert abs(one[-1]["val/loss"] - two[-1]["val/loss"]) < 1e-5


def test_a_run_of_two_ranks_goes_on_with_one(by_ranks, data):
    flags = tiny_flags(
        *(data, by_ranks / "run2"),
        **{"model__pos_mode": "rove", "train__max_steps": 4, "train__resume": "auto"},
        **{"train__tokens_per_step": 12 * 32, "train__micro_batch_size": 2},
    )
    train.main(flags)
    assert [row["step"] for row in read_metrics(by_ranks / "run2")] == [1, 2, 3, 4]
    assert not any("module." in key for key in load_checkpoint(by_ranks / "run2")["model"])


def test_splits_of_the_batch():
    for ranks in (1, 2, 3, 4, 5, 8):
        for micro in (1, 3, 16, 1000):
            for sequences in range(1, 65):
                tokens = sequences * 128
                if sequences % ranks == 0:
                    size, accumulate = split_batch(tokens, micro, 128, ranks)
                    assert size * accumulate * ranks == sequences and size <= micro
                else:
                    with pytest.raises(ValueError, match=f"{ranks} ranks x 128 tokens") as error:
                        split_batch(tokens, micro, 128, ranks)
                    near = [int(n) for n in re.findall(r"\d+", str(error.value).split("try ")[1])]
                    assert near == sorted(set(near)) and max(near) - ranks * 128 < tokens
                    assert all(split_batch(n, micro, 128, ranks) for n in near)
    assert split_batch(524288, 16, 1024, 8) == (16, 4)
    assert split_batch(4096, 24, 128, 1) == (16, 2)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_all_ranks_together_read_each_window_of_an_epoch_once(ranks):
    order, sequences, steps = BatchOrder(n_windows=80, seed=3), 16, 5  # 5 steps are an epoch
    size, accumulate = split_batch(sequences * 8, 2, 8, ranks)
    seen = []
    for step in range(1, steps + 1):
        parts = [
            order.part(step, sequences, micro * ranks + rank, accumulate * ranks)
            for micro in range(accumulate)
            for rank in range(ranks)
        ]
        assert all(len(part) == size for part in parts)
        seen += [window for part in parts for window in part]
    assert sorted(seen) == list(range(80))
    assert seen == list(order.indices(0, 80))


def test_learning_rate_is_warm_up_and_cosine():
    o = train.OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=10)
    rates = [learning_rate(o, 110, step) for step in range(1, 111)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and rates[-1] == pytest.approx(0.1)
    assert rates[59] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 0.5)))
    assert all(a > b for a, b in zip(rates[9:], rates[10:], strict=False))
    assert learning_rate(train.OptimConfig(lr=1.0, warmup_steps=0), 1, 1) == pytest.approx(0.1)
    assert learning_rate(train.OptimConfig(lr=1.0, warmup_steps=100), 5, 5) == 0.05


# ---------------------------------------------------------------- precision and faults


def test_auto_precision_picks_what_the_device_has(monkeypatch):
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    for has, name in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has=has, **_: has)
        assert dev.resolve_dtype("auto", cuda, 768) == name
    with pytest.raises(ValueError, match="works: float16, float32"):
        dev.resolve_dtype("bfloat16", cuda, 768)
    for has, width, name in (
        (True, 768, torch.bfloat16),
        (True, 64, torch.float32),
        (False, 768, torch.float32),
    ):
        monkeypatch.setattr(dev, "cpu_has_bf16", lambda has=has: has)
        assert dev.resolve_dtype("auto", cpu, width) == name
    with pytest.raises(ValueError, match="works: float32, bfloat16"):
        dev.resolve_dtype("float16", cpu, 768)
    assert dev.resolve_dtype("auto", torch.device("mps"), 768) == torch.float32
    assert dev.make_scaler(cpu, torch.float16).get_scale() == 65536
    assert not dev.make_scaler(cpu, torch.bfloat16).is_enabled()


def test_a_loss_that_is_not_finite_never_reaches_the_weights(data, tmp_path):
    (tmp_path / "spy").mkdir()
    flags = tiny_flags(data, tmp_path / "run", train__checkpoint_interval=2, train__log_interval=5)
    env = {"SPY_DIR": str(tmp_path / "spy"), "SPY_NAN": "5:1"}
    result = run_script("tests/spy.py", *flags, ranks=2, env=env)
    assert result.returncode != 0
    assert "step 5: loss not finite on rank [1]" in result.stderr

    def weights(rank, step):
        return torch.load(tmp_path / f"spy/rank{rank}_step{step}.pt", weights_only=True)["weights"]

    for rank in (0, 1):
        before, after = weights(rank, 4), weights(rank, 5)
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert load_checkpoint(tmp_path / "run")["step"] == 4
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]


def test_fp16_scales_its_loss_and_survives_an_overflow(data, tmp_path, monkeypatch):
    monkeypatch.setattr(dev, "resolve_dtype", lambda *_: torch.float16)
    update, scales = torch.amp.GradScaler.update, []

    def watched(scaler):
        update(scaler)
        scales.append(scaler.get_scale())

    monkeypatch.setattr(torch.amp.GradScaler, "update", watched)
    norm = torch.nn.utils.get_total_norm

    def overflow_once(grads):
        return norm(grads) * (math.inf if len(scales) == 2 else 1)

    monkeypatch.setattr(torch.nn.utils, "get_total_norm", overflow_once)
    rows = run(data, tmp_path / "run")
    assert len(rows) == 8 and rows[2]["grad_norm"] is None and rows[3]["grad_norm"] > 0
    assert load_checkpoint(tmp_path / "run")["scaler"]["scale"] == scales[-1] > 1


def test_fp16_ends_where_its_gradients_never_fit(data, tmp_path, monkeypatch):
    monkeypatch.setattr(dev, "resolve_dtype", lambda *_: torch.float16)
    start = {"init_scale": 2.0**-18, "enabled": True}  # as after many updates that did not fit
    monkeypatch.setattr(dev, "make_scaler", lambda *_: torch.amp.GradScaler("cpu", **start))
    backward = torch.Tensor.backward

    def broken(loss):
        backward(loss * math.inf)

    monkeypatch.setattr(torch.Tensor, "backward", broken)
    with pytest.raises(SystemExit, match="step 2: gradient not finite"):
        run(data, tmp_path / "run", train__log_interval=1)


def test_mps_is_taken_where_its_fused_adamw_clips(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for version, name in (("2.12.1", "cpu"), ("2.13.0+cpu", "mps"), ("3.0.0a0", "mps")):
        monkeypatch.setattr(torch, "__version__", version)
        assert dev.resolve_device("auto").type == name
    monkeypatch.setattr(torch, "__version__", "2.9.0")
    with pytest.raises(ValueError, match=r"mps: needs torch 2\.13"):
        dev.resolve_device("mps")


def test_non_finite_gradient_alone_stops_the_run(data, tmp_path, monkeypatch):
    backward = torch.Tensor.backward
    count = {"n": 0}

    def poisoned(loss, *args, **kwargs):
        backward(loss, *args, **kwargs)
        count["n"] += 1
        if count["n"] == 3:
            captured[0].transformer.ln_f.weight.grad[0] = math.inf

    captured = []
    make_optimizer = train.make_optimizer
    monkeypatch.setattr(
        train, "make_optimizer", lambda m, o: captured.append(m) or make_optimizer(m, o)
    )
    monkeypatch.setattr(torch.Tensor, "backward", poisoned)
    with pytest.raises(SystemExit, match="step 3: gradient not finite"):
        run(data, tmp_path / "run")
    assert all(p.isfinite().all() for p in captured[0].parameters())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_validation_loss_that_is_not_finite_ends_the_run(data, tmp_path, monkeypatch, bad):
    monkeypatch.setattr(train, "evaluate", lambda *_: bad)
    with pytest.raises(SystemExit, match="step 4: validation loss not finite"):
        run(data, tmp_path / "run")
    assert not list((tmp_path / "run").glob("checkpoints/*.pt"))


def test_settings_of_the_optimizer_changed_at_resume_are_applied(data, tmp_path):
    run(data, tmp_path / "run", train__max_steps=4)
    changes = {"optim__weight_decay": 0.7, "optim__beta1": 0.5, "optim__lr": 1e-4}
    run(data, tmp_path / "run", train__resume="auto", **changes)
    groups = load_checkpoint(tmp_path / "run")["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.7, 0.0]
    assert all(group["betas"][0] == 0.5 for group in groups)
    assert read_metrics(tmp_path / "run")[4]["lr"] <= 1e-4


def test_every_wrapper_saves_and_loads_the_same_names(tmp_path):
    from torch.nn.parallel import DistributedDataParallel

    from model import GPTConfig

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        config = GPTConfig(block_size=8, vocab_size=65, n_layer=1, n_head=1, n_embd=8)
        plain = GPT(config)
        idx = torch.zeros(1, 8, dtype=torch.long)
        for compiles in (False, True):
            for wraps in (False, True):
                net = GPT(config)
                if compiles:
                    net.compile(backend="eager")
                outer = DistributedDataParallel(net) if wraps else net
                outer(idx, idx)[1].backward()
                assert list(net.state_dict()) == list(plain.state_dict())
                plain.load_state_dict(net.state_dict(), strict=True)
                net.load_state_dict(plain.state_dict(), strict=True)
        del outer, net  # freed after their group they can wait forever for its threads
    finally:
        torch.distributed.destroy_process_group()


def test_the_best_loss_survives_a_resume(data, tmp_path, monkeypatch):
    losses = iter([1.0, 2.0, 1.5])
    monkeypatch.setattr(train, "evaluate", lambda *_: next(losses))
    run(data, tmp_path / "run")
    run(data, tmp_path / "run", train__max_steps=12, train__resume="auto")
    best = json.loads((tmp_path / "run/checkpoints/best.json").read_text())
    assert (best["step"], best["val_loss"]) == (4, 1.0)
    assert load_checkpoint(tmp_path / "run")["best_val_loss"] == 1.0
    assert (tmp_path / "run/checkpoints" / best["file"]).exists()


def test_a_new_best_is_saved_between_intervals(data, tmp_path, monkeypatch):
    losses = iter([3.0, 1.0, 2.0, 2.5])
    monkeypatch.setattr(train, "evaluate", lambda *_: next(losses))
    run(data, tmp_path / "run", train__eval_interval=2, train__checkpoint_interval=100)
    best = json.loads((tmp_path / "run/checkpoints/best.json").read_text())
    assert (best["step"], best["val_loss"]) == (4, 1.0)
    assert (tmp_path / "run/checkpoints" / best["file"]).exists()


def test_evaluation_draws_no_random_numbers(data, tmp_path):
    often = run(data, tmp_path / "often", model__dropout=0.2, train__eval_interval=1)
    rarely = run(data, tmp_path / "rarely", model__dropout=0.2, train__eval_interval=8)
    assert [r["train/loss"] for r in often] == [r["train/loss"] for r in rarely]
    plain = run(data, tmp_path / "plain")
    assert plain[0]["train/loss"] != often[0]["train/loss"], "dropout is on"


def test_bf16_is_used_when_asked_for(data, tmp_path, monkeypatch):
    seen = []
    forward = GPT.forward

    def watched(self, *arguments):
        seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
        return forward(self, *arguments)

    monkeypatch.setattr(GPT, "forward", watched)
    half = run(data, tmp_path / "half", train__dtype="bfloat16")
    assert set(seen) == {torch.bfloat16}
    seen.clear()
    full = run(data, tmp_path / "full", train__dtype="float32")
    assert set(seen) == {None}
    difference = abs(half[-1]["train/loss"] - full[-1]["train/loss"])
    assert 0 < difference < 0.02


def test_the_optimizer_is_the_recipes(data, tmp_path, monkeypatch):
    update, limits = train.update, []
    monkeypatch.setattr(train, "update", lambda *args: limits.append(args[3]) or update(*args))
    made, make_optimizer = [], train.make_optimizer
    monkeypatch.setattr(
        train, "make_optimizer", lambda m, o: made.append((m, make_optimizer(m, o))) or made[0][1]
    )
    changes = {"optim__beta1": 0.8, "optim__beta2": 0.9, "optim__weight_decay": 0.3}
    rows = run(data, tmp_path / "run", optim__grad_clip=0.25, model__bias="true", **changes)
    assert set(limits) == {0.25}
    model, optimizer = made[0]
    decayed, plain = optimizer.param_groups
    assert decayed["betas"] == plain["betas"] == (0.8, 0.9)
    assert decayed["weight_decay"] == 0.3 and plain["weight_decay"] == 0
    assert all(p.dim() == 2 for p in decayed["params"]) and all(
        p.dim() == 1 for p in plain["params"]
    )
    n_all = len(list(model.parameters()))
    assert len(decayed["params"]) + len(plain["params"]) == n_all
    assert decayed["lr"] == rows[-1]["lr"] == pytest.approx(3e-4)


def test_ranks_draw_their_own_dropout(by_ranks):
    states = load_checkpoint(by_ranks / "run2")["rng"]
    assert len(states) in (1, 2)
    if len(states) == 2:
        assert not torch.equal(states[0]["cpu"], states[1]["cpu"])


def test_dry_run_writes_nothing(data, tmp_path, capsys):
    train.main([*tiny_flags(data, tmp_path / "run"), "--dry_run"])
    assert not (tmp_path / "run").exists() and "8 steps of 256 tokens" in capsys.readouterr().out


def test_dry_run_refuses_what_the_run_would(data, tmp_path, capsys):
    run(data, tmp_path / "run")
    goes_on = {"train__resume": "auto"}
    train.main([*tiny_flags(data, tmp_path / "run", **goes_on), "--dry_run"])
    shown = capsys.readouterr().out
    assert "resumed from" in shown and "dry_run was" not in shown
    (tmp_path / "file").write_text("")
    other = make_data(tmp_path / "other", seed=1)
    damaged = shutil.copytree(tmp_path / "run", tmp_path / "damaged")
    for path in (damaged / "checkpoints").glob("*.pt"):
        path.write_bytes(path.read_bytes()[:100])
    for out, changes, words in (
        ("run", {}, "holds a run"),
        ("run", {**goes_on, "model__n_layer": 1}, "keep that"),
        ("run", {**goes_on, "data__dir": other}, "its data differ"),
        ("damaged", goes_on, "no checkpoint there is whole"),
        ("file", {}, "is a file"),
    ):
        before = [(path, path.stat().st_mtime_ns) for path in sorted(tmp_path.rglob("*"))]
        with pytest.raises(SystemExit):
            train.main([*tiny_flags(data, tmp_path / out, **changes), "--dry_run"])
        assert words in capsys.readouterr().err
        assert before == [(path, path.stat().st_mtime_ns) for path in sorted(tmp_path.rglob("*"))]


def test_a_dry_run_of_two_ranks_resumes_and_writes_nothing(data, tmp_path):
    run(data, tmp_path / "run", train__max_steps=2)
    before = [(path, path.stat().st_mtime_ns) for path in sorted(tmp_path.rglob("*"))]
    flags = [*tiny_flags(data, tmp_path / "run", train__resume="auto"), "--dry_run"]
    done = run_script("train.py", *flags, ranks=2)
    assert done.returncode == 0 and "dry run: nothing is written" in done.stdout, done.stderr
    assert "resumed from" in done.stdout and done.stdout.count("dry run:") == 1
    assert before == [(path, path.stat().st_mtime_ns) for path in sorted(tmp_path.rglob("*"))]


def test_a_run_whose_checkpoints_are_gone_says_that_it_starts_again(data, tmp_path, capsys):
    run(data, tmp_path / "run", train__max_steps=2)
    shutil.rmtree(tmp_path / "run/checkpoints")
    train.main(tiny_flags(data, tmp_path / "run", train__max_steps=2, train__resume="auto"))
    assert f"{tmp_path / 'run'} has no checkpoint yet; it starts" in capsys.readouterr().out


def test_compiled_and_plain_runs_go_on_as_each_other(data, tmp_path, monkeypatch):
    compiled = []

    def cheap(self):
        compiled.append(self)
        torch.nn.Module.compile(self, backend="eager")

    monkeypatch.setattr(GPT, "compile", cheap, raising=False)
    monkeypatch.setattr(dev, "missing_compiler", lambda device: None)
    straight = run(data, tmp_path / "straight")
    for first, second in (("true", "false"), ("false", "true")):
        out = tmp_path / first
        run(
            data, out, train__compile=first, train__checkpoint_interval=4, train__keep_checkpoints=9
        )
        (out / "checkpoints/latest.json").unlink()
        (out / "checkpoints/step_00000008.pt").unlink()
        rows = run(data, out, train__compile=second, train__resume="auto")
        for a, b in zip(straight, rows, strict=True):
            assert abs(a["train/loss"] - b["train/loss"]) < 1e-5
        assert not any("_orig_mod" in name for name in load_checkpoint(out)["model"])
    assert len(compiled) == 2


# ---------------------------------------------------------------- compiler


def test_without_a_compiler_training_goes_on_and_says_so(data, tmp_path):
    env = {"PATH": str(tmp_path), "CC": "", "CXX": ""}
    result = run_script(
        "train.py", *tiny_flags(data, tmp_path / "a", train__compile="auto"), env=env
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("no C compiler") == 1
    line = refused(
        run_script("train.py", *tiny_flags(data, tmp_path / "b", train__compile="true"), env=env)
    )
    assert "compile=true: no C compiler" in line and not (tmp_path / "b").exists()


def test_compile_auto_on_a_cpu_is_for_long_runs():
    cpu = torch.device("cpu")
    if dev.missing_compiler(cpu):
        pytest.skip("no C++ compiler here")
    assert dev.resolve_compile("auto", cpu, 1e12) == (False, "")
    assert dev.resolve_compile("auto", cpu, 1e18) == (True, "")
    assert dev.resolve_compile(False, cpu, 1e18)[0] is False


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"data__dir": "no/such"}, ["no/such", "prepare_fineweb.py"]),
        ({"model__pos_mode": "alibi"}, ["model.pos_mode", "alibi", "rove"]),
        ({"model__n_embd": 34, "model__n_head": 2}, ["n_embd=34", "even head_dim"]),
        ({"model__n_embd": 33}, ["n_embd=33", "n_head=2"]),
        ({"train__tokens_per_step": 250}, ["tokens_per_step=250", "224 or 256"]),
        ({"train__micro_batch_size": 0}, ["micro_batch_size=0", "at least 1"]),
        ({"seed": 2**63}, ["seed=9223372036854775808", "2^63"]),
        ({"model__block_size": 4096, "train__tokens_per_step": 4096}, ["val", "block_size=4096"]),
        ({"model__vocab_size": 256}, ["vocab_size=256", "257"]),
        ({"model__pos_mode": "rove+yarn", "model__yarn_factor": 4}, ["yarn_factor", "train at 1"]),
        ({"model__yarn_factor": 0.5}, ["yarn_factor=0.5", "at least 1"]),
        ({"optim__lr": -1}, ["optim.lr", "at least 0"]),
        ({"optim__beta2": 1.0}, ["beta2=1.0"]),
        ({"optim__min_lr": 1.0}, ["min_lr=1.0"]),
        ({"train__max_steps": 0}, ["train.max_steps=0", "at least 1"]),
        ({"seed": -1}, ["seed=-1"]),
        ({"train__device": "cuda"}, ["device=cuda", "cpu"]),
        ({"train__dtype": "float16"}, ["dtype=float16", "float32"]),
        ({"model__n_layers": 3}, ["model.n_layers", "model.n_layer"]),
        ({"train__max_steps": "many"}, ["train.max_steps", "many", "int"]),
    ],
)
def test_bad_settings_are_one_line_and_leave_no_trace(data, tmp_path, capsys, changes, words):
    error = refusal(capsys, train, tiny_flags(data, tmp_path / "run", **changes))
    assert all(word in error for word in words), error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("cut", ["2 bytes", "half"])
def test_a_cut_shard_is_refused_before_step_0(tmp_path, capsys, cut):
    folder = make_data(tmp_path / "data")
    shard = folder / "walk_train_000001.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-2] if cut == "2 bytes" else whole[: len(whole) // 2])
    error = refusal(capsys, train, tiny_flags(folder, tmp_path / "run"))
    assert (
        "walk_train_000001.bin" in error
        and str(len(whole)) in error
        and str(shard.stat().st_size) in error
    )


def test_an_id_outside_the_vocabulary_is_found_as_batches_are_read(tmp_path, capsys):
    from helpers import shard_bytes

    folder = make_data(tmp_path / "data", train=2_000)
    shard = folder / "walk_train_000000.bin"
    ids = [7] * ((shard.stat().st_size - 1024) // 2 - 1) + [300]
    shard.write_bytes(shard_bytes(ids))
    error = refusal(capsys, train, tiny_flags(folder, tmp_path / "run", train__max_steps=20))
    assert "walk_train_000000.bin: holds id 300" in error


def test_wrong_folders_and_files_are_one_line(data, tmp_path, capsys):
    import sample

    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pt").write_text("no checkpoint")
    (tmp_path / "other.pt").write_bytes(b"\x80\x02}q\x00.")
    torch.save({"format": 1}, tmp_path / "dict.pt")
    for name in ("nothing", "empty", "text.pt", "other.pt", "dict.pt"):
        assert name in refusal(capsys, sample, ["--checkpoint", tmp_path / name])


def misfits(saved):
    """Checkpoints that are whole files but make no model."""
    weights, config, name = saved["model"], saved["model_config"], "transformer.ln_f.weight"
    fewer = {key: value for key, value in config.items() if key != "rope_theta"}
    yield saved | {"model": {k: v for k, v in weights.items() if k != name}}
    yield saved | {"model": weights | {"extra": torch.zeros(1)}}
    yield saved | {"model": weights | {name: torch.zeros(7)}}
    yield saved | {"model": weights | {name: "text"}}
    yield saved | {"model": [1]}
    yield saved | {"model_config": [1]}
    yield saved | {"model_config": config | {"n_layer": 5}}
    yield saved | {"model_config": config | {"n_head": "4"}}
    yield saved | {"model_config": config | {"vocab_size": None}}
    yield saved | {"model_config": config | {"rotary_pairing": "neighbours"}}
    yield saved | {"model_config": config | {"new": 1}}
    yield saved | {"model_config": fewer}
    yield saved | {"tokenizer": {}}
    yield saved | {"tokenizer": None}
    yield saved | {"tokenizer": saved["tokenizer"] | {"vocab_size": 300}}
    yield saved | {"tokenizer": saved["tokenizer"] | {"name": "gpt2"}}
    yield saved | {"format": torch.tensor(1)}
    yield saved | {"format": 99}
    yield saved | {"model": weights | {name: weights[name] * math.nan}}
    yield {key: value for key, value in saved.items() if key != "rng"}


def test_checkpoints_that_make_no_model_are_one_line(data, tmp_path, capsys):
    import sample

    run(data, tmp_path / "run", train__max_steps=1)
    saved = load_checkpoint(tmp_path / "run")
    saved.pop("file")
    for number, content in enumerate(misfits(saved)):
        path = tmp_path / f"{number}.pt"
        torch.save(content, path)
        assert path.name in refusal(capsys, sample, ["--checkpoint", path, "--prompt", "x"]), number
    whole = next((tmp_path / "run/checkpoints").glob("*.pt"))
    middle = whole.stat().st_size // 2
    content = whole.read_bytes()
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    (tmp_path / "flipped.pt").write_bytes(flipped)
    error = refusal(capsys, sample, ["--checkpoint", tmp_path / "flipped.pt"])
    assert "flipped.pt" in error and "damaged" in error


def test_a_checkpoint_with_a_command_is_refused_and_nothing_runs(tmp_path, capsys):
    import sample

    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"format": 1, "model": Bomb()}, tmp_path / "bomb.pt")
    assert "refused" in refusal(capsys, sample, ["--checkpoint", tmp_path / "bomb.pt"])
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------- the demo's size, on real text


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stdlib") / "data"
    result = run_script("prepare_fineweb.py", "--tokenizer", "byte", "--out_dir", folder)
    assert result.returncode == 0, result.stderr
    return folder


def demo_flags(data, out, **changes):
    flags = {"data.dir": data, "out_dir": out, **changes}
    return ["--config", ROOT / "configs/demo.yaml", *(f"--{k}={v}" for k, v in flags.items())]


def test_demo_trains_alike_on_one_and_two_ranks(stdlib, tmp_path):
    changes = {"train.max_steps": 20, "train.dtype": "float32", "train.eval_tokens": 8192}
    losses = []
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        result = run_script("train.py", *demo_flags(stdlib, out, **changes), ranks=ranks)
        assert result.returncode == 0, result.stderr
        losses.append([row["train/loss"] for row in read_metrics(out)])
    assert len(losses[0]) == 20
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 1e-4


def test_a_model_of_the_demos_size_learns_in_both_modes(stdlib, tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    def final_loss(mode):
        changes = {"train.max_steps": 120, "train.eval_interval": 120, "model.pos_mode": mode}
        flags = demo_flags(stdlib, tmp_path / mode, **changes)
        result = run_script("train.py", *flags, timeout_s=400)
        assert result.returncode == 0, result.stderr
        return read_metrics(tmp_path / mode)[-1]["val/loss"]

    with ThreadPoolExecutor(2) as pool:
        losses = list(pool.map(final_loss, ["rope", "rove"]))
    assert all(1.0 < loss < 2.6 for loss in losses), losses
