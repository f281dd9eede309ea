"""The study: its statistics on made data, its null arm, its texts, and a tiny slice for real."""

import json
import math
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from helpers import ROOT

from model import GPT, GPTConfig
from studies import analysis, endpoints, entries, report, run, start, tasks
from studies.experiments import ARMS, EXPERIMENTS, Trial

# ---------------------------------------------------------------- statistics


def test_p_is_the_tail_of_students_density():
    for df in (1, 2, 3, 7, 8, 30):
        log_c = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
        for t in (0.1, 1.0, 2.5, 4.0):
            x = np.linspace(0, t, 20_001)
            density = np.exp(log_c - (df + 1) / 2 * np.log1p(x**2 / df))
            inside = 2 * float((density[:-1] + density[1:]) @ np.diff(x)) / 2
            assert analysis.two_sided_p(t, df) == pytest.approx(1 - inside, abs=1e-8)
            assert analysis.two_sided_p(-t, df) == analysis.two_sided_p(t, df)
    assert analysis.t_quantile(7) == pytest.approx(2.3646, abs=1e-4)


def made(rng, effect, n_seeds=8, n_blocks=32, of_seed=1.0, of_block=1.0, noise=1.0):
    """Differences with a known mean, and spreads over seeds, over blocks, and of single cells."""
    seeds = of_seed * rng.standard_normal((n_seeds, 1))
    blocks = of_block * rng.standard_normal((1, n_blocks))
    return effect + seeds + blocks + noise * rng.standard_normal((n_seeds, n_blocks))


@pytest.mark.parametrize("spread", [(1.0, 0.0), (0.0, 1.0), (0.5, 3.0)])
def test_intervals_hold_the_truth_and_no_effect_is_seldom_found(spread):
    rng, n = np.random.default_rng(0), 200
    found = [
        analysis.effect(made(rng, 0.7, of_seed=spread[0], of_block=spread[1])) for _ in range(n)
    ]
    inside = sum(e.low <= 0.7 <= e.high for e in found) / n
    assert inside >= 0.91
    none = [analysis.effect(made(rng, 0, of_seed=spread[0], of_block=spread[1])) for _ in range(n)]
    assert sum(e.p < 0.05 for e in none) / n <= 0.09
    assert all((e.p < 0.05) == (e.low > 0 or e.high < 0) for e in (*found, *none))


def test_an_effect_that_exists_is_found():
    rng = np.random.default_rng(1)
    found = [analysis.effect(made(rng, 3.0, of_seed=1.0, of_block=0.5)) for _ in range(50)]
    assert sum(e.p < 0.01 for e in found) > 45
    e = analysis.effect([[1.0, 2.0], [3.0, 4.0]])
    assert (e.mean, e.by_seed, e.n_seeds) == (2.5, [1.5, 3.5], 2)
    alone = analysis.effect([1.0, 2.0, 4.0])  # the t test: mean 7/3, s.e. 0.882, t 2.646
    assert alone.p == pytest.approx(0.11808, abs=1e-4)
    with pytest.raises(ValueError, match="1 seeds"):
        analysis.effect([[1.0, 2.0]])


def test_holms_correction():
    assert analysis.holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 1.0}) == pytest.approx(
        {"a": 0.04, "b": 0.09, "c": 0.09, "d": 1.0}
    )
    one_sign = [analysis.effect([-1.0, -2.0, -1.5]), analysis.effect([-1.0, -2.0, -8.0])]
    assert analysis.both(one_sign) == one_sign[1].p > one_sign[0].p
    assert analysis.both([one_sign[0], analysis.effect([1.0, 2.0, 1.5])]) == 1.0


# ---------------------------------------------------------------- endpoints


def entry(arm, seed, shift, rng):
    """A run with made losses: `shift` of (length, with YaRN) in nats, and noise by block."""
    cells = []
    for times in (1, 2, 4, 8):
        for yarn in (False, True):
            nll = 2.0 + shift(times, yarn) + 0.001 * rng.standard_normal(16)
            mode = ("rope" if arm == "rope" else "rove") + ("+yarn" if yarn else "")
            factor = float(times) if yarn else 1.0
            common = {"mode": mode, "length": 64 * times, "yarn_factor": factor, "tokens": 8192}
            rows = nll.round(5).tolist()
            nll = {"nll": float(np.mean(rows)), "block_nll": rows}
            for values in ("yarn", "orig") if mode == "rove+yarn" else ("yarn",):
                more = 0.25 if values == "orig" else 0.0
                moved = {"nll": nll["nll"] + more, "block_nll": [x + more for x in rows]}
                cells.append(common | {"yarn_values": values} | moved)
    return {
        **{"experiment": "E2", "variant": "", "arm": arm, "seed": seed, "cells": cells},
        **{"config_sha256": arm, "data_sha256": "d", "train_loss": [], "val_loss": 2.0},
    }


def language(n_seeds=4):
    """Runs in which RoVE gains 0.1 at 1x, loses 0.2 in degradation, gains 0.3 under YaRN."""
    rng = np.random.default_rng(3)

    def rope(times, yarn):
        return 0.0 if times == 1 else 0.5 if yarn else 1.0

    def rove(times, yarn):
        return -0.1 if times == 1 else 0.2 if yarn else 1.1

    shift = {"rope": rope, "rove": rove, "null": rove}
    return [entry(arm, s, shift[arm], rng) for s in range(1, n_seeds + 1) for arm in shift]


def test_endpoints_are_the_differences_put_in():
    runs = language()
    found = endpoints.language_endpoints(*endpoints.paired(runs, ("rove", "rope")))
    known = {"P1": -0.1, "P2": 0.2, "P3, under YaRN": -0.3, "P3, of YaRN": -0.9}
    known["interaction"] = -0.3 - 0.1
    assert {key: e.mean for key, e in found.items()} == pytest.approx(known, abs=2e-3)
    p = endpoints.p_values(found)
    assert max(p.values()) < 1e-3 and p["P3"] == max(found[k].p for k in known if "P3" in k)
    null = endpoints.language_endpoints(*endpoints.paired(runs, ("null", "rove")))
    assert all(abs(e.mean) < 2e-3 for key, e in null.items() if key != "P3, of YaRN")
    orig = endpoints.losses(endpoints.paired(runs, ("rove",))[0], 4, True, yarn_values="orig")
    assert orig.shape == (4, 16) and orig.mean() == pytest.approx(2.45, abs=2e-3)


def test_only_seeds_that_all_arms_have_are_compared_and_only_like_with_like():
    runs = [e for e in language() if (e["arm"], e["seed"]) != ("rope", 2)]
    first, second = endpoints.paired(runs, ("rove", "rope"))
    assert [e["seed"] for e in first] == [e["seed"] for e in second] == [1, 3, 4]
    runs[0]["data_sha256"] = "other"
    with pytest.raises(ValueError, match="seed 1 : its arms differ in their text"):
        endpoints.paired(runs, ("rove", "rope"))
    runs = language()
    runs[3]["config_sha256"] = "other"
    with pytest.raises(ValueError, match="its runs differ in their settings"):
        endpoints.paired(runs, ("rove", "rope"))
    with pytest.raises(ValueError, match="nothing at 16 x"):
        endpoints.cell_of(runs[0], 16)


def test_tables_have_every_number_with_interval_and_seeds(tmp_path, capsys):
    (tmp_path / "E2.json").write_text(json.dumps({"experiment": "E2", "entries": language()}))
    report.main(["--folder", str(tmp_path)])
    text = (tmp_path / "tables.md").read_text()
    assert text in capsys.readouterr().out
    assert text.count("| P1 | not run |") == 1 == text.count("| P5 | not run |"), "E1, E3"
    assert re.search(r"\| P1 \| -0\.(1|09)", text) and "RoVE - RoPE | YaRN, values orig |" in text
    for name in ("differences.png", "losses.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        report.main(["--folder", str(tmp_path / "nothing")])
    assert "no results" in capsys.readouterr().err


def test_a_grid_is_kept_apart_from_what_endpoints_are_made_of(tmp_path):
    folder, common = tmp_path / "eval", {"kind": "perplexity", "pos_mode": "rove+yarn"}
    folder.mkdir()
    usual, grid = ("perplexity_packed_rove+yarn", 2.0, (1,)), ("grid_yarn", 3.0, (2, 4))
    for name, nll, factors in (usual, grid):
        rows = [
            {"length": 32 * n, "yarn_factor": n if factors == (1,) else factor, "tokens": 640,
             "nll": nll, "block_nll": [nll - 0.1, nll + 0.1]}
            for n in (1, 2, 4, 8) for factor in factors
        ]  # fmt: skip
        content = common | {"yarn_values": "yarn", "results": rows}
        (folder / f"{name}.json").write_text(json.dumps(content))
    made = entries.measurements(tmp_path) | {"arm": "rove", "seed": 1}
    assert endpoints.losses([made], 4, True).tolist() == [[1.9, 2.1]]
    assert [cell["nll"] for cell in made["grid"]] == [3.0] * 8
    assert not any("block_nll" in cell for cell in made["grid"])
    second = {**made, "grid": [cell | {"nll": 4.0} for cell in made["grid"]]}
    table = report.grid_table("E2", [made, second])
    assert "| rove | yarn | 2 | 2 | 3.5000 |" in table and report.grid_table("E2", language()) == ""


# ---------------------------------------------------------------- the null arm and the texts


def pair_of_models():
    """A RoVE model whose value tables turn the other way, and the same with exchanged halves."""
    config = GPTConfig(vocab_size=64, block_size=16, n_layer=2, n_head=2, n_embd=32, bias=True,
                       pos_mode="rove")  # fmt: skip
    settings = start.Settings("", model=config, seed=5)
    flipped = start.make(settings)
    turned_back = torch.tensor([1.0, -1.0])[:, None, None]
    flipped.tables.v = flipped.tables.qk * turned_back
    exchanged = start.make(start.Settings("", model=config, seed=5, reversed=True))
    return flipped, exchanged


def test_exchanged_halves_are_rove_with_its_sign_flipped_through_training():
    flipped, exchanged = pair_of_models()
    plain = start.make(start.Settings("", model=flipped.config, seed=5))
    idx = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(0))
    x, y = idx[:, :-1], idx[:, 1:]
    assert (flipped(x)[0] - exchanged(x)[0]).abs().max() < 1e-5
    assert (flipped(x)[0] - plain(x)[0]).abs().max() > 1e-4
    for model in (flipped, exchanged):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
        for _ in range(5):
            model(x, y)[1].backward()
            optimizer.step()
            optimizer.zero_grad()
    assert (flipped(x)[0] - exchanged(x)[0]).abs().max() < 1e-4
    start.reverse_values(flipped)
    for a, b in zip(flipped.parameters(), exchanged.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_weights_to_start_from_are_those_of_train_py():
    config = GPTConfig(vocab_size=64, block_size=16, n_layer=1, n_head=2, n_embd=64)
    torch.manual_seed(3)
    drawn = GPT(config)
    made_here = start.make(start.Settings("", model=config, seed=3))
    assert all(
        torch.equal(a, b) for a, b in zip(drawn.parameters(), made_here.parameters(), strict=True)
    )
    wide = start.make(start.Settings("", model=config, seed=3, std_by_width=True))
    assert float(wide.transformer.wte.weight.detach().std()) == pytest.approx(1 / 8, rel=0.05)
    assert torch.equal(wide.transformer.ln_f.weight, drawn.transformer.ln_f.weight)


@pytest.mark.parametrize("k", [1, 3])
def test_the_windows_text_follows_its_rule(k):
    text = tasks.window_text(k, 2, 500, np.random.default_rng(0))
    pairs = [divmod(tasks.ALPHABET.index(byte), 6) for byte in text]
    seen = {}
    for i in range(k + 1, len(pairs)):
        earlier = tuple(pairs[i - 1 - lag][0] for lag in range(1, k + 1))
        assert seen.setdefault(earlier, pairs[i][1]) == pairs[i][1]
    assert len(seen) > min(6**k, 100) * 0.9 and len({y for y in seen.values()}) == 6
    assert text != tasks.window_text(k, 3, 500, np.random.default_rng(0))


# ---------------------------------------------------------------- a slice, run for real

STORED = json.loads((ROOT / "tests/study_slice.json").read_text())


@pytest.fixture(scope="module")
def slice_of_the_study(tmp_path_factory):
    """E1's k = 3, one head, seed 1, both arms for 50 steps, on a text made here."""
    out, found = tmp_path_factory.mktemp("study"), {}
    patch = pytest.MonkeyPatch()
    patch.setattr(run, "TARGETS", 8192)
    patch.setattr(run, "N_DOCUMENTS", 60)

    def run_arm(arm):
        (trial,) = [t for t in EXPERIMENTS["E1"].trials(1) if t.arm == arm and t.variant == "k3-h1"]
        short = trial.flags | {"train.max_steps": 50, "optim.warmup_steps": 5}
        short |= {"train.eval_interval": 50}
        trial = Trial("E1", trial.variant, arm, 1, trial.data, short)
        run.run_trial(trial, out)
        found[arm] = json.loads((out / "runs" / trial.name / "entry.json").read_text())
        run.run_trial(trial, out)  # done: nothing is run again
        log = (out / "runs" / f"{trial.name}.log").read_text()
        assert log.count("$ train.py") == 1

    run.prepare("window-k3-1", out)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run_arm, ("rope", "rove")))
    assert entries.collect("E1", out) == 2
    patch.undo()
    return out, found


def test_a_slice_gives_the_stored_numbers(slice_of_the_study):
    _, found = slice_of_the_study
    for arm, stored in STORED.items():
        own = found[arm]
        assert own["val_loss"] == pytest.approx(stored["val_loss"], abs=2e-3)
        for cell, nll in zip(own["cells"], stored["nll"], strict=True):
            assert cell["nll"] == pytest.approx(nll, abs=5e-3), (arm, cell)


def test_entries_say_where_they_come_from(slice_of_the_study):
    out, found = slice_of_the_study
    rope, rove = found["rope"], found["rove"]
    assert rope["config_sha256"] != rove["config_sha256"]
    assert rope["data_sha256"] == rove["data_sha256"] and type(rope["seed"]) is int
    assert len(rope["cells"]) == 4 + 6 and len(rove["cells"]) == 4 + 12
    assert [step for step, _ in rope["train_loss"]][-1] == 50
    assert endpoints.cell_of(rove, 4, True)["yarn_beta_fast"] == 32
    assert len(entries.read_entries(out / "E1.json")) == 2


def test_a_failed_run_is_named_and_the_others_go_on(tmp_path, capsys, monkeypatch):
    seen = []

    def some_fail(trial, out):
        seen.append(trial.name)
        if trial.arm == "rove":
            raise run.FailedError("train.py ended with 1, see a log")

    monkeypatch.setattr(run, "run_trial", some_fail)
    monkeypatch.setattr(run, "prepare", lambda data, out: None)
    with pytest.raises(SystemExit, match="2 runs failed"):
        run.main(["--experiments", "E2", "--seeds", "2", "--out", str(tmp_path)])
    assert sorted(seen) == sorted(f"E2/{arm}-{seed}" for arm in ARMS for seed in (1, 2))
    assert "failed: E2/rove-1: train.py ended with 1" in capsys.readouterr().err
    for flags, word in ((["--experiments", "E99"], "must be among"), (["--seeds", "0"], "seeds=0")):
        with pytest.raises(SystemExit):
            run.main(flags)
        assert word in capsys.readouterr().err


def test_a_text_that_fails_is_one_line_and_files_that_are_no_results_are_named(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/stdlib-byte").write_text("a file where a folder is made")
    with pytest.raises(SystemExit, match=r"error: prepare_fineweb\.py ended with 2, see .*\.log"):
        run.main(["--experiments", "E2", "--seeds", "1", "--out", str(tmp_path)])
    for text in ("[]", '{"a":', '{"entries": [1]}'):
        (tmp_path / "E2.json").write_text(text)
        with pytest.raises(SystemExit):
            report.main(["--folder", str(tmp_path)])
        assert "E2.json: no results of studies/run.py" in capsys.readouterr().err


def test_once_stopping_no_script_begins_and_one_that_just_began_ends(tmp_path, monkeypatch):
    class Late(threading.Event):
        """Set between the two looks at it."""

        def is_set(self):
            looked, self.looked = getattr(self, "looked", False), True
            return looked

    monkeypatch.setattr(run, "STOPPING", Late())
    with pytest.raises(run.FailedError, match="ended with -15"):
        run.script(tmp_path / "a.log", "sample.py", "--help")
    with pytest.raises(run.FailedError, match="was not begun"):
        run.script(tmp_path / "a.log", "sample.py", "--help")
    assert (tmp_path / "a.log").read_text().count("$ sample.py") == 1


# ---------------------------------------------------------------- what is published


def test_published_entries_are_whole_and_the_documents_tables_are_theirs():
    folder, text = ROOT / "docs/study", (ROOT / "docs/STUDY.md").read_text()
    results = {name: entries.read_entries(folder / f"{name}.json") for name in EXPERIMENTS}
    for found in results.values():
        for e in found:
            assert type(e["seed"]) is int and e["arm"] in ARMS
            assert len(e["config_sha256"]) == len(e["data_sha256"]) == 16
    if any(results.values()):
        tables = report.tables(results)
        assert (folder / "tables.md").read_text() == tables
        shown = [line for line in text.split("## Results")[1].splitlines() if line[:1] == "|"]
        known = set(tables.splitlines())
        assert shown and all(line in known or set(line) <= {"|", "-"} for line in shown)
    size = sum(path.stat().st_size for path in folder.glob("*"))
    assert size < 2_000_000
