"""The report: its numbers are the files', empty is what was not measured, and what may not stand
beside each other is refused; seeds, and the paper's tables."""

import importlib
import json
import math
import re
from dataclasses import replace
from statistics import stdev

import pytest
from helpers import make_data, tiny_flags

import report
import train
from rove.config import to_yaml
from rove.evals.core.scoring import aggregate, centered
from rove.evals.core.tasks import BY_LABEL, LETTER_TASKS, LONG_TASKS
from rove.evals.ruler import categories, summarize
from rove.files import write_json
from rove.report import arms, plots, tables
from rove.report.build import build
from rove.report.read import read_runs

LENGTHS = (16, 32, 64, 128)
PNG = b"\x89PNG\r\n\x1a\n"


# ---------------------------------------------------------------- runs and results made by hand


def make_run(folder, mode="rope", seed=1, steps=8, max_steps=8, shift=0.0, **model):
    """A run folder: settings and a falling loss, validation at every fourth step."""
    default = train.Config()
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "vocab_size": 257} | model
    config = replace(
        default,
        model=replace(default.model, pos_mode=mode, **sizes),
        train=replace(default.train, max_steps=max_steps, tokens_per_step=32768),
        out_dir=str(folder),
        seed=seed,
    )
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            loss = 5 / math.sqrt(step) + shift + 0.01 * seed
            row = {"step": step, "tokens": step * 32768, "train/loss": loss, "lr": 1e-3}
            row |= {"grad_norm": 1.0, "perf/tok_per_s": 900.0 + step, "perf/mfu": 0.4}
            file.write(json.dumps(row | ({"val/loss": loss + 0.1} if step % 4 == 0 else {})) + "\n")
    return folder


def write(run, name, kind, pos_mode, **content):
    """One result file of a run, with the keys that all kinds have."""
    common = {"kind": kind, "checkpoint": str(run), "step": 8, "seed": 1}
    common |= {
        "pos_mode": pos_mode,
        "yarn_values": "yarn",
        "block_size": 32,
        "dtype": "float32",
        "data": "d" * 64,
    }
    path = run / "eval" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    write_json(path, common | {"created": "2026-01-01T00:00:00+00:00"} | content)
    return path


def length_row(length, nll, factor=1.0, tokens=512, **more):
    row = {"length": length, "nll": nll, "ppl": math.exp(nll) if nll < 700 else None}
    row |= {"bits_per_byte": nll / 2, "tokens": tokens, "yarn_factor": factor, "temperature": 1.0}
    row |= {"interval": [nll - 0.05, nll + 0.06], "degradation": None, "block_nll": [nll]}
    return row | {"degradation_interval": None} | more


def perplexity(run, mode, protocol="packed", nll=None, name=None, rows=None, **more):
    nll = nll or (lambda length: 1.5 + 0.1 * math.log2(length / 16))
    yarn = mode.endswith("+yarn")
    rows = rows or [
        length_row(n, nll(n), max(1.0, n / 32) if yarn else 1.0, degradation=nll(n) - nll(32))
        for n in LENGTHS
    ]
    more = {"protocol": protocol, "tokens": 512, "mask_eot": False, "results": rows} | more
    return write(run, name or f"perplexity_{protocol}_{mode}", "perplexity", mode, **more)


def positions(run, mode, nll=2.0, **more):
    edges = (0, 64, 128, 256)
    rows = [
        {"from": a, "to": b, "nll": nll + i / 10, "tokens": 8 * (b - a), "yarn_factor": 1.0}
        for i, (a, b) in enumerate(zip(edges, edges[1:], strict=False))
    ]
    content = {"protocol": "positions", "length": 256, "tokens": 2048, "results": rows}
    return write(run, f"perplexity_positions_{mode}", "perplexity", mode, **content, **more)


def core(run, mode, labels=None, right=3, n=8, **more):
    """A CORE result over some tasks, `right` of n items each, put together as eval.py does."""
    tasks = {}
    for i, label in enumerate(labels or BY_LABEL):
        accuracy = min(n, right + i % 3) / n
        v1, v2 = (getattr(BY_LABEL[label], f"baseline_{v}") for v in ("v1", "v2"))
        row = {"accuracy": accuracy, "n": n, "cropped": n if label in LONG_TASKS else 0}
        row |= {"centered_v1": centered(accuracy, v1), "centered_v2": centered(accuracy, v2)}
        row |= {"span_capped": 0, "correct": "1" * n, "max_tokens": 99, "sha256": label}
        tasks[label] = row | {"predictions": [5, 1, 1, 1] if label in LETTER_TASKS else None}
    total = aggregate(tasks, [label for label in BY_LABEL if label not in tasks])
    setting = {"mode": "nanochat", "truncation": "crop", "max_length": 32, "max_per_task": None}
    content = {"yarn_factor": 1.0, "tasks": tasks} | setting | total | more
    return write(
        run, more.get("name", f"core_{content['truncation']}_{mode}"), "core", mode, **content
    )


def lm_eval(run, mode, acc=0.5, **more):
    """A result of two tasks of the harness, as eval.py writes it."""
    rows = {
        "toy": {"alias": "toy", "acc,none": acc, "acc_stderr,none": 0.05, "n": 40}
        | {"exact_match,strip": 0.25, "exact_match_stderr,strip": None},
        "words": {"alias": "words", "word_perplexity,none": 31.5, "n": 7},
    }
    better = {"toy": {"acc": True, "exact_match": True}, "words": {"word_perplexity": False}}
    content = {"harness": "0.4.13", "tasks": ["toy", "words"], "max_length": 32, "limit": None}
    content |= {"fewshot_seed": 1234, "yarn_factor": 1.0, "results": rows, "groups": {}}
    content |= {"versions": {"toy": 1, "words": 2}, "num_fewshot": {"toy": 5, "words": 0}}
    return write(run, f"lm_eval_{mode}", "lm_eval", mode, higher_is_better=better, **content | more)


def ruler_rows(task, length, nll, n=10):
    keys = {"index": 0, "n_tokens": 3, "nll_total": 3 * nll, "nll_content": nll, "first_rank": 2}
    keys |= {"nll_min_reference": None, "string_match": None, "prefix_mismatch": 0}
    qa = task.startswith("qa")
    return [
        keys
        | {"depth": None if task == "cwe" else j * length // n, "exact": j % 2 == 0}
        | {
            "hop": 1 + j % 5 if task == "vt_hops" else None,
            "log_possibilities": None if qa else 9.0,
        }
        | {"nll": nll + j / 100, "nll_control": None if qa else nll + 0.5}
        for j in range(n)
    ]


def ruler(
    run, mode, nll=3.0, lengths=(64,), tasks=("niah_single_1", "cwe", "qa_1", "vt_hops"), **more
):
    factor = 2.0 if mode.endswith("+yarn") else 1.0
    rows = []
    for length in lengths:
        for i, task in enumerate(tasks):
            row = summarize(task, length, ruler_rows(task, length, nll + i))
            row |= {"yarn_factor": factor, "nll_interval": [1.0, 9.0], "gain_interval": None}
            rows.append(row | {"sha256": f"{task}{length}", "variant": None})
    content = {"layout": "stratified", "samples_seed": 42, "generated": False, "results": rows}
    content |= {"categories": categories(rows)} | more
    return write(run, f"ruler_stratified_{mode}", "ruler", mode, **content)


# ---------------------------------------------------------------- reading a report


def make_report(*runs, out):
    report.main([*map(str, runs), "--out", str(out)])
    return (out / "report.md").read_text()


def sections_of(*runs):
    return {s.title: s for s in build(*read_runs([str(run) for run in runs]))}


def tables_in(text):
    """Every table of a text as a list of rows, each a dict by column."""
    found = []
    for block in re.findall(r"(?:^\|.*\n?)+", text, flags=re.M):
        lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines()]
        found.append([dict(zip(lines[0], line, strict=True)) for line in lines[2:]])
    return found


def check_refused(capsys, *arguments, words):
    with pytest.raises(SystemExit) as stop:
        report.main([str(argument) for argument in arguments])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1, error
    assert all(word in error for word in words), error


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two runs with everything that can be measured; nothing in them is changed by a test."""
    folder = tmp_path_factory.mktemp("pair")
    for mode, gain in (("rope", 0.0), ("rove", 0.1)):
        run = make_run(folder / mode, mode, shift=-gain)
        for protocol in ("packed", "tail", "sliding"):
            for m in (mode, f"{mode}+yarn"):
                perplexity(run, m, protocol, lambda n, g=gain: 1.5 - g + 0.1 * math.log2(n))
        positions(run, mode)
        core(run, mode, right=3 if gain else 2)
        ruler(run, f"{mode}+yarn", nll=3 - gain)
        ruler(run, mode, nll=5 - gain)
    return folder


@pytest.fixture(scope="module")
def pair_text(pair):
    return make_report(pair / "rope", pair / "rove", out=pair / "report")


# ---------------------------------------------------------------- the whole


def test_a_run_alone_has_its_settings_its_losses_and_the_papers_tables(tmp_path, capsys):
    data = make_data(tmp_path / "data")
    train.main(tiny_flags(data, tmp_path / "run", model__pos_mode="rove"))
    capsys.readouterr()
    text = make_report(tmp_path / "run", out=tmp_path / "r")
    titles = ["Runs", "Training", "Arms and seeds", "Beside the paper"]
    assert re.findall("^## (.*)$", text, flags=re.M) == titles
    shown = capsys.readouterr().out
    assert f"wrote {tmp_path}/r/report.md and 1 plots" in shown and "2/2/32" in shown
    run, (losses, *_) = tables_in(text)[0][0], tables_in(text)[1]
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert run["mode"] == "rove" and run["steps"] == "8" and run["tokens"] == "2,048"
    assert run["val loss, last"] == f"{last['val/loss']:.4f} @8"
    assert losses["2,048"] == f"{last['val/loss']:.4f}"
    assert "one seed proves nothing" in text
    ours = [cell for t in tables_in(text)[-3:] for row in t for cell in row.values() if "/" in cell]
    assert len(ours) == 38 and all(cell.endswith("/") for cell in ours)


def test_everything_measured_has_its_section_and_every_plot_is_there(pair, pair_text):
    titles = re.findall("^## (.*)$", pair_text, flags=re.M)
    assert titles == [
        *("Runs", "Training"),
        *(f"Perplexity by context length: {p}" for p in ("packed", "tail", "sliding")),
        *("Loss by position in windows of 256", "CORE, nanochat, crop 32"),
        *("RULER at 64 tokens", "Arms and seeds", "Beside the paper"),
    ]
    shown = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", pair_text)
    assert len(shown) == 9 and {p.name for p in (pair / "report").glob("*.png")} == set(shown)
    for name in shown:
        content = (pair / "report" / name).read_bytes()
        assert content.startswith(PNG) and len(content) > 5000, name


def test_equal_input_gives_equal_files_and_only_own_plots_are_cleared(pair, pair_text, tmp_path):
    out = tmp_path / "again"
    out.mkdir()
    (out / "mine.png").write_bytes(PNG + b"a drawing")
    (out / "old.png").write_bytes((pair / "report/loss.png").read_bytes())
    (out / "notes.txt").write_text("kept")
    assert make_report(pair / "rope", pair / "rove", out=out) == pair_text
    for path in (pair / "report").iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    names = {path.name for path in out.iterdir()}
    assert {"mine.png", "notes.txt"} <= names and "old.png" not in names
    assert not [name for name in names if name.endswith(".tmp")]


# ---------------------------------------------------------------- runs and training


def test_unfinished_and_empty_runs_say_so(tmp_path):
    half = make_run(tmp_path / "half", steps=6, max_steps=12)
    empty = make_run(tmp_path / "empty", steps=0)
    (half / "metrics.jsonl").open("a").write('{"step": 6, "tokens": 196608}\n{"step": 7, "tok')
    row, nothing = tables_in(sections_of(half, empty)["Runs"].text)[0]
    assert row["steps"] == "unfinished: 6 of 12" and row["train loss, last"].endswith("@5")
    assert row["val loss, last"] == row["val loss, best"] == f"{5 / 2 + 0.11:.4f} @4"
    assert nothing["steps"] == "unfinished: 0 of 8" and nothing["tokens"] == ""
    assert nothing["val loss, last"] == ""
    assert "Training" not in sections_of(empty)


def test_losses_on_other_targets_are_named(tmp_path):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", block_size=64)]
    assert "not on the same targets" in sections_of(*runs)["Training"].text
    assert "not on the same targets" not in sections_of(runs[0])["Training"].text


# ---------------------------------------------------------------- perplexity


def test_perplexity_is_the_files_with_the_training_length_marked(pair, pair_text):
    section = sections_of(pair / "rope", pair / "rove")["Perplexity by context length: packed"]
    assert "(512 targets, the same in every cell, protocol packed)" in section.text
    shown, nll, bits = tables_in(section.text)
    assert [row["mode"] for row in shown] == ["rope", "rope+yarn", "rove", "rove+yarn"]
    for i, (run, mode) in enumerate((run, m) for run in ("rope", "rove") for m in ("", "+yarn")):
        file = pair / run / f"eval/perplexity_packed_{run}{mode}.json"
        for row in json.loads(file.read_text())["results"]:
            column = f"{row['length']}{' (trained)' if row['length'] == 32 else ''}"
            low, high = row["interval"]
            assert shown[i][column] == f"{row['ppl']:.2f}"
            assert nll[i][column] == f"{row['nll']:.4f} [{low:.4f}, {high:.4f}]"
            assert bits[i][column] == f"{row['bits_per_byte']:.4f}"


def test_degradation_belongs_to_the_tail_protocol(pair):
    sections = sections_of(pair / "rope", pair / "rove")
    tail = sections["Perplexity by context length: tail"]
    degradation = tables_in(tail.text)[2]
    assert degradation[0]["32 (trained)"] == "0.0000" and degradation[0]["128"] == "0.2000"
    assert "degradation_tail.png" in tail.plots and "Degradation" in tail.text
    assert "Degradation" not in sections["Perplexity by context length: packed"].text


def test_missing_lengths_overflow_and_other_factors(tmp_path):
    run = make_run(tmp_path / "run", "rove")
    perplexity(run, "rove", rows=[length_row(32, 2.0, bits_per_byte=None), length_row(64, 800.0)])
    fixed = [length_row(16, 2.0, 4.0), length_row(128, 3.0, 4.0)]
    perplexity(run, "rove+yarn", rows=fixed, name="fixed")
    grid = [length_row(n, 1 + n * s / 100, s) for n in (32, 64) for s in (1.0, 2.0)]
    perplexity(run, "rove+yarn", rows=grid, yarn_values="orig")
    section = sections_of(run)["Perplexity by context length: packed"]
    shown, *_, by_factor = tables_in(section.text)
    plain, usual, orig = shown
    assert (plain["16"], plain["64"], plain["128"]) == ("", "over e^700", "")
    assert usual["16"] == f"{math.exp(2):.2f} (s=4)" and usual["128"] == f"{math.exp(3):.2f}"
    assert orig["mode"] == "rove+yarn, values orig"
    assert orig["32 (trained)"] == f"{math.exp(1.32):.2f}"
    assert orig["64"] == f"{math.exp(1 + 1.28):.2f}", "the diagonal: s = L / block_size"
    assert [row["factor"] for row in by_factor] == ["1", "2"]
    assert by_factor[1]["32"] == f"{math.exp(1.64):.2f}" and by_factor[1]["128"] == ""


def test_labels_tell_apart_what_differs(tmp_path):
    run = make_run(tmp_path / "run")
    perplexity(run, "rope", name="a")
    perplexity(run, "rope", name="b")
    perplexity(run, "rope", name="c", dtype="bfloat16", step=4)
    perplexity(run, "rove", name="d")
    masked = [length_row(32, 2.0, tokens=500)]
    perplexity(run, "rope", name="e", mask_eot=True, rows=masked)
    sections = sections_of(run)
    shown = tables_in(sections["Perplexity by context length: packed"].text)[0]
    modes = [row["mode"] for row in shown]
    assert modes == ["rope (a)", "rope (b)", "rope, bfloat16, step 4", "rove, retrofit"]
    assert "Perplexity by context length: packed, end-of-text not scored" in sections


def test_positions_have_a_column_for_each_bin(pair, tmp_path):
    section = sections_of(pair / "rope", pair / "rove")["Loss by position in windows of 256"]
    assert "(2,048 targets, protocol positions)" in section.text
    row = tables_in(section.text)[0][1]
    assert row["mode"] == "rove" and list(row.values())[2:] == ["2.0000", "2.1000", "2.2000"]
    run = make_run(tmp_path / "run")
    file = positions(run, "rope")
    content = json.loads(file.read_text())
    content["results"][0]["nll"] = None
    file.write_text(json.dumps(content))
    row = tables_in(sections_of(run)["Loss by position in windows of 256"].text)[0][0]
    assert row["[0, 64)"] == "" and row["[64, 128)"] == "2.1000"


# ---------------------------------------------------------------- CORE and RULER


def test_core_shows_each_task_and_never_calls_a_part_core(pair, tmp_path):
    text = sections_of(pair / "rope", pair / "rove")["CORE, nanochat, crop 32"].text
    means, tasks, counts = tables_in(text)
    result = json.loads((pair / "rove/eval/core_crop_rove.json").read_text())
    assert means[1]["CORE, v1"] == f"{result['core_v1']:.4f}" and means[1]["tasks"] == "22 of 22"
    assert means[1]["CORE, v2"] == f"{result['core_v2']:.4f}"
    copa = next(row for row in tasks if row["task"] == "copa")
    name = f"{pair / 'rove'} rove"
    of = result["tasks"]["copa"]
    assert copa[f"accuracy: {name}"] == f"{of['accuracy']:.4f}" and copa["chance, %"] == "50"
    assert copa[f"centered v1: {name}"] == f"{of['centered_v1']:.4f}" and copa["cropped"] == "0"
    assert next(row for row in tasks if row["task"] == "squad")["cropped"] == "8"
    assert (
        len(counts) == 8 and counts[0]["option 0"] == "5" and counts[0]["largest share"] == "0.62"
    )
    assert "truncation crop, max_length 32" in text
    part = make_run(tmp_path / "part")
    core(part, "rope", labels=["copa", "squad"])
    text = next(s.text for title, s in sections_of(part).items() if title.startswith("CORE"))
    row = tables_in(text)[0][0]
    assert (
        row["CORE, v1"] == row["CORE, v2"] == "n/a" and "n/a (missing: hellaswag_zeroshot" in text
    )
    assert row["mean of present tasks, v1"] != "" and row["mean of the 16 short tasks, v1"] == ""


def test_core_of_other_settings_stands_in_another_section(tmp_path):
    run = make_run(tmp_path / "run")
    core(run, "rope", labels=["copa"])
    core(run, "rope", labels=["copa"], truncation="extrapolate", max_length=None)
    file = core(run, "rope", labels=["copa"], max_per_task=4)
    file.rename(file.with_name("capped.json"))
    core(run, "rope", labels=["copa"])
    titles = [title for title in sections_of(run) if title.startswith("CORE")]
    assert sorted(titles) == [
        "CORE, nanochat, crop 32",
        "CORE, nanochat, crop 32, max_per_task 4",
        "CORE, nanochat, extrapolate",
    ]


def test_standard_error_of_core_is_the_binomial_one(pair):
    from rove.report.core import standard_error

    task = {"accuracy": 0.6, "n": 100}
    want = math.sqrt(0.24 / 100 / 0.25 + 0.24 / 100) / 2
    assert standard_error({"copa": task, "lambada_openai": task}) == pytest.approx(want)


def test_ruler_has_gain_first_and_the_guess_beside_the_raw_loss(pair):
    text = sections_of(pair / "rope", pair / "rove")["RULER at 64 tokens"].text
    headline, raw, detail, means, hops, depths = tables_in(text)
    names = [f"{pair / 'rove'} {mode}" for mode in ("rove", "rove+yarn, s=2")]
    result = json.loads((pair / "rove/eval/ruler_stratified_rove+yarn.json").read_text())
    for row in result["results"]:
        line = next(line for line in headline if line["task"] == row["task"])
        gain = "" if row["gain"] is None else f"{row['gain']:.4f}"
        assert line[f"gain: {names[1]}"] == gain and line[f"exact: {names[1]}"] == "0.500"
        line = next(line for line in raw if line["task"] == row["task"])
        assert line[f"NLL: {names[1]}"] == f"{row['nll']:.4f} [1.0000, 9.0000]"
        assert line["guess"] == ("" if row["task"] == "qa_1" else "3.0000")
    assert not any("string match" in column for column in headline[0])
    assert len(detail) == 16 and detail[0]["control"] == "5.5000"
    assert means[3] | {"run": ""} == {
        **{"run": "", "mode": "rove+yarn", "NIAH": "2.9450", "CWE": "3.9450"},
        **{"QA": "4.9450", "vt_hops": "5.9450"},
    }, "no column for what was not run"
    assert [row["hops"] for row in hops] == ["1", "2", "3", "4", "5"] * 4
    assert {row["task"] for row in depths} == {
        *("niah_single_1 (gain / exact)", "qa_1 (NLL / exact)", "vt_hops (gain / exact)")
    }


# ---------------------------------------------------------------- arms, seeds, the paper


def test_tasks_of_the_harness_stand_side_by_side_where_they_compare(tmp_path):
    rope, rove = make_run(tmp_path / "a"), make_run(tmp_path / "b", "rove")
    lm_eval(rope, "rope")
    lm_eval(rove, "rove", acc=0.625)
    section = sections_of(rope, rove)["lm-evaluation-harness"]
    assert "Harness 0.4.13, at most 32 tokens, all items." in section.text
    (rows,) = tables_in(section.text)
    columns = [f"{rope} rope", f"{rove} rove"]
    assert [
        [row[key] for key in ("task", "shots", "items", "metric", *columns)] for row in rows
    ] == [
        ["toy", "5", "40", "acc ↑", "0.5000 ± 0.0500", "0.6250 ± 0.0500"],
        ["toy", "5", "40", "exact_match (strip) ↑", "0.2500", "0.2500"],
        ["words", "0", "7", "word_perplexity ↓", "31.5000", "31.5000"],
    ]
    changes = {"limit": 10.0, "harness": "0.4.14", "data": "e" * 64, "max_length": 64}
    for key, value in {**changes, "num_fewshot": {"toy": 0, "words": 0}, "fewshot_seed": 1}.items():
        lm_eval(rove, "rove", **{key: value})
        apart = [title for title in sections_of(rope, rove) if title.startswith("lm-")]
        assert apart == [f"lm-evaluation-harness ({i} of 2)" for i in (1, 2)], key


def test_t_quantiles_leave_two_and_a_half_percent_on_either_side():
    for df, t in enumerate(arms.T_95, 1):
        n = 5_000
        h = t / n
        log_c = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
        density = [
            math.exp(log_c - (df + 1) / 2 * math.log1p((i * h) ** 2 / df)) for i in range(n + 1)
        ]
        inside = 2 * h * (sum(density) - (density[0] + density[-1]) / 2)
        assert inside == pytest.approx(0.95, abs=2e-4), df
    assert arms.t_interval([1.0]) is None
    low, high = arms.t_interval([1.0, 3.0])
    assert (low, high) == pytest.approx((2 - 12.706, 2 + 12.706))


def test_seeds_give_mean_and_deviation_and_pairs_their_difference(tmp_path):
    runs, gaps = [], {1: -0.2, 2: -0.4, 3: -0.3}
    for seed, gap in gaps.items():
        for mode, shift in (("rope", 0.0), ("rove", gap)):
            run = make_run(tmp_path / f"{mode}{seed}", mode, seed=seed, shift=shift)
            perplexity(run, mode, seed=seed, nll=lambda n, s=seed, d=shift: 2 + s / 10 + d)
            perplexity(
                run, f"{mode}+yarn", seed=seed, nll=lambda n, s=seed, d=shift: 2 + s / 10 + d
            )
            runs.append(run)
    perplexity(runs[1], "rove+yarn", yarn_values="orig", name="orig", nll=lambda n: 1.0)
    runs.append(make_run(tmp_path / "rove4", "rove", seed=4))
    runs.append(make_run(tmp_path / "twice", "rove", seed=1, shift=9.0))
    text = sections_of(*runs)["Arms and seeds"].text
    lines = {(r["measure"], r["mode"]): r for r in tables_in(text)[0]}
    row = lines["NLL at 64, packed", "as trained"]
    assert row["RoPE"] == "2.2000 ± 0.1000 (3)"
    assert row["RoVE"] == f"1.9000 ± {stdev([1.9, 1.8, 2.0]):.4f} (3)"
    assert row["difference by seed"] == "1: -0.2000, 2: -0.4000, 3: -0.3000"
    half = 4.303 * 0.1 / math.sqrt(3)
    assert row["mean difference"] == "-0.3000"
    assert row["95 % interval"] == f"[{-0.3 - half:+.4f}, {-0.3 + half:+.4f}]"
    assert lines["val loss", "as trained"]["RoVE"].endswith("(4)"), "one more without a partner"
    assert lines["val loss", "as trained"]["mean difference"] == "-0.3000"
    orig = lines["NLL at 64, packed", "+yarn, values orig, s=2"]
    assert orig["difference by seed"] == "1: -1.1000" and orig["95 % interval"] == ""
    assert "negative = RoVE better" in text and "proves nothing" not in text
    assert "twice repeats seed 1 of" in text


def test_only_equal_settings_make_an_arm(tmp_path):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", "rove", seed=1)
    config = b / "config.yaml"
    config.write_text(config.read_text().replace("lr: 0.0006", "lr: 0.001"))
    text = sections_of(a, b)["Arms and seeds"].text
    assert "optim.lr 0.0006" in text and "optim.lr 0.001" in text and not tables_in(text)
    free = (
        config.read_text()
        .replace("lr: 0.001", "lr: 0.0006")
        .replace("resume: never", "resume: auto")
    )
    config.write_text(free)
    assert tables_in(sections_of(a, b)["Arms and seeds"].text), "resume changes no result"


def big(folder, mode, seed=1, **model):
    sizes = {"n_layer": 24, "n_head": 16, "n_embd": 1024, "block_size": 1024, "vocab_size": 50257}
    return make_run(folder, mode, seed, **(sizes | model))


def paper_rows(*runs):
    return [table for table in tables_in(sections_of(*runs)["Beside the paper"].text)]


def test_the_papers_cells_are_filled_from_its_sizes_alone(tmp_path, pair):
    lengths = (512, 1024, 2048, 4096)
    runs = []
    for seed in (1, 2):
        run = big(tmp_path / f"rope{seed}", "rope", seed)
        for mode in ("rope", "rope+yarn"):
            yarn = mode != "rope"
            nll = [3.0 + seed / 10 + k for k in range(4)]
            rows = [
                length_row(n, x, max(1.0, n / 1024) if yarn else 1.0)
                for n, x in zip(lengths, nll, strict=True)
            ]
            perplexity(run, mode, rows=rows, block_size=1024)
        runs.append(run)
    rove = big(tmp_path / "rove", "rove")
    core(rove, "rove", block_size=1024, max_length=1024)
    core(rove, "rove", block_size=1024, truncation="extrapolate", max_length=None, right=4)
    ruler(rove, "rove+yarn", lengths=(4096,), tasks=("cwe", "niah_single_1"), block_size=1024)
    file = rove / "eval/ruler_stratified_rove+yarn.json"
    file.write_text(file.read_text().replace('"yarn_factor": 2.0', '"yarn_factor": 4.0'))
    rows = [length_row(4096, 2.0, 4.0)]
    perplexity(rove, "rove+yarn", rows=rows, yarn_values="orig", block_size=1024)
    inside, outside, recall = paper_rows(*runs, rove)
    assert inside[2]["PPL @512"] == f"17.68 / {math.exp(3.15):.2f} (2 runs) (512 targets)", (
        "exp of the mean NLL"
    )
    assert inside[0]["PPL @512"] == "25.23 /", "no 124M was run"
    crop, free = (
        json.loads(p.read_text())["core_v1"] for p in sorted(rove.glob("eval/core*.json"))
    )
    content = json.loads(next(rove.glob("eval/core*.json")).read_text())
    n_items = sum(task["n"] for task in content["tasks"].values())
    assert (
        inside[3]["Core ICL (up)"] == f"0.1856 / {crop:.4f} (crop 1,024, {n_items} items), "
        f"{free:.4f} (extrapolate, {n_items} items)"
    )
    assert outside[0]["4096"] == f"840.10 / {math.exp(6.15):.2f} (2 runs) (512 targets)"
    assert (
        outside[3]["4096"] == "18.40 /"
        and outside[4]["4096"] == f"/ {math.exp(2):.2f} (512 targets)"
    )
    assert outside[4]["method"] == "RoVE + YaRN, values orig"
    niah = json.loads(file.read_text())["categories"]["4096"]["NIAH"]
    assert recall[1]["NIAH"] == f"3.63 / {niah:.2f}" and recall[1]["VT"] == "2.11 /"
    assert recall[1]["QA"] == "5.61 /" and recall[1]["average"] == "4.33 /"
    small = paper_rows(pair / "rope", pair / "rove")
    assert all(
        cell.endswith("/") for t in small for row in t for cell in row.values() if "/" in cell
    )


@pytest.mark.parametrize("why", ["vocabulary", "context", "unfinished", "retrofit", "factor"])
def test_what_does_not_compare_stays_out_of_the_papers_tables(tmp_path, why):
    changed = {"vocabulary": {"vocab_size": 257}, "context": {"block_size": 512}}.get(why, {})
    run = big(tmp_path / "run", "rove" if why == "retrofit" else "rope", **changed)
    more = {"step": 4} if why == "unfinished" else {}
    rows = [length_row(1024, 3.0, 16.0 if why == "factor" else 1.0)]
    perplexity(run, "rope", rows=rows, block_size=1024, **more)
    assert paper_rows(run)[0][2]["PPL @1024"] == "15.64 /"


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "change, word",
    [
        ({"kind": "bleu"}, "kind: expected perplexity | core | ruler"),
        ({"pos_mode": "alibi"}, "pos_mode"),
        ({"results": []}, "results: none"),
        ({"results": [{"length": 32}]}, "results[0].nll: expected number"),
        ({"results": [length_row(32, 2.0, ppl="x")]}, "results[0].ppl"),
        ({"results": [length_row(32, 2.0, interval=[1.0])]}, "results[0].interval"),
        ({"protocol": "sideways"}, "protocol"),
        ({"step": None}, "step: expected count, got null"),
        ({"kind": "core"}, "mode: expected text"),
        ({"kind": "ruler"}, "categories"),
        ({"kind": "ruler", "categories": {"64": 3}}, "categories.64"),
        ({"block_size": 0}, "block_size: expected size, got 0"),
    ],
)
def test_a_file_that_is_no_result_is_named_with_its_fault(tmp_path, capsys, change, word):
    run = make_run(tmp_path / "run")
    file = perplexity(run, "rope", name="odd")
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    check_refused(capsys, run, "--out", tmp_path / "r", words=["odd.json: not a result", word])
    assert not (tmp_path / "r").exists(), "nothing was written"


@pytest.mark.parametrize("content", ["", "[]", "{}", "[" * 100_000, "\xff", '{"kind": NaN}'])
def test_a_file_that_is_no_json_object_is_named(tmp_path, capsys, content):
    run = make_run(tmp_path / "run")
    (run / "eval").mkdir()
    (run / "eval/odd.json").write_bytes(content.encode("latin-1"))
    check_refused(capsys, run, "--out", tmp_path / "r", words=["odd.json: not a result"])
    (run / "eval/odd.json").write_text('{"kind": "compare"}')
    assert "Perplexity" not in make_report(run, out=tmp_path / "r")


def test_results_on_other_targets_are_refused(tmp_path, capsys):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", "rove")

    def check(make, **other):
        files = [make(run, mode) for run, mode in ((a, "rope"), (b, "rove"))]
        build(*read_runs([str(a), str(b)]))
        files[1] = make(b, "rove", **other)
        check_refused(capsys, a, b, words=["different targets", "a/eval", "b/eval"])
        for file in files:
            file.unlink()

    check(perplexity, data="e" * 64)
    check(perplexity, rows=[length_row(32, 2.0, tokens=1024)])
    check(positions, data="e" * 64)
    check(core, n=9)
    check(
        ruler,
        results=[summarize("cwe", 64, ruler_rows("cwe", 64, 3.0, n=5)) | {"yarn_factor": 1.0}],
    )
    perplexity(a, "rope", rows=[length_row(32, 2.0), length_row(64, 2.0, tokens=99)])
    check_refused(capsys, a, words=["lengths have 99, 512 targets"])


@pytest.mark.parametrize("fault", [ModuleNotFoundError("no"), RuntimeError("bad binary")])
def test_without_matplotlib_there_are_tables_and_a_notice(tmp_path, capsys, monkeypatch, fault):
    run, load = make_run(tmp_path / "run"), importlib.import_module

    def broken(name):
        if name.startswith("matplotlib"):
            raise fault
        return load(name)

    monkeypatch.setattr(importlib, "import_module", broken)
    report.main([str(run), "--out", str(tmp_path / "r")])
    assert re.search(
        r"no plots: matplotlib\.figure does not load .*; pip install -r", capsys.readouterr().out
    )
    text = (tmp_path / "r/report.md").read_text()
    assert "| run |" in text
    assert "![" not in text and not list((tmp_path / "r").glob("*.png"))


def test_arguments(tmp_path, capsys):
    run, out = make_run(tmp_path / "run"), tmp_path / "r"
    for arguments in (["--out", out, run], [run, f"--out={out}"], [run, f"{run}/", "--out", out]):
        report.main([str(argument) for argument in arguments])
        assert len(tables_in((out / "report.md").read_text())[0]) == 1, "the same run once"
    check_refused(capsys, words=["no run folders given"])
    check_refused(capsys, "--out", out, words=["no run folders given"])
    check_refused(capsys, tmp_path / "nothing", words=["nothing: no run folder"])
    check_refused(capsys, run, "--outt", out, words=["--outt"])
    (tmp_path / "file").write_text("")
    check_refused(capsys, run, "--out", tmp_path / "file", words=["--out", "is a file"])
    check_refused(capsys, run, "--out", tmp_path / "file/in", words=["--out", "is a file"])
    check_refused(capsys, "", words=["no run folders given"])
    config = (run / "config.yaml").read_text()
    for bad, word in (("n_layer: two", "model.n_layer"), ("pos_mode: 3", "model.pos_mode")):
        key = bad.split(":")[0]
        (run / "config.yaml").write_text(re.sub(rf"{key}: .*", bad, config))
        check_refused(capsys, run, words=["config.yaml", word])


def test_cells_keep_tables_whole():
    assert tables.table(["a|b"], [["x\ny"]]) == "| a\\|b |\n|---|\n| x y |"
    assert tables.number(None) == "" and tables.number(-0.00001) == "0.0000"
    assert tables.number(3.2e8) == "3.200e+08" and tables.with_interval(1.0, None, 2) == "1.00"


def test_shades_and_lines_tell_modes_and_runs_apart():
    looks = [
        plots.look_of(mode, values, number)
        for mode in ("rope", "rove", "rope+yarn", "rove+yarn")
        for values in ("yarn", "orig")[: 1 + (mode == "rove+yarn")]
        for number in range(8)
    ]
    assert len({str(look) for look in looks}) == len(looks)
    assert {look["marker"] for look in looks[:8]}.isdisjoint(look["marker"] for look in looks[8:16])
