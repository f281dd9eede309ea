"""eval.py core, ruler and compare from the command line, on tiny models and made-up data."""

import json

import pytest
import torch
from helpers import make_data, run_script, tiny_flags

import eval as evaluation
import train
from rove.evals.compare import compare
from rove.evals.ruler import Sources, make_samples, scoring, write_samples
from rove.tokenizer import load_tokenizer

COPA = "commonsense_reasoning/copa.jsonl"
WINOGRAD = "language_understanding/winograd_wsc.jsonl"
COPY = "symbolic_problem_solving/bigbench_repeat_copy_logic.jsonl"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    data = make_data(folder / "data", val=4_000)
    for mode in ("rope", "rove"):
        train.main(tiny_flags(data, folder / mode, model__pos_mode=mode))
    bundle = folder / "bundle/eval_data"
    words = ["red", "green", "blue", "grey", "pink", "brown", "white", "black"]
    write(bundle / COPA, [{"query": f"The sky over {w} hill was", "choices": [w, w[::-1] + "ish"],
                           "gold": i % 2} for i, w in enumerate(words * 4)])  # fmt: skip
    write(bundle / WINOGRAD, [{"context_options": [f"{w} met Bo as {w}", f"{w} met Bo as Bo"],
                               "continuation": "was there", "gold": i % 2}
                              for i, w in enumerate(words * 3)])  # fmt: skip
    write(bundle / COPY, [{"context": f"Say {w} twice.", "continuation": f"{w} {w}"}
                          for w in words * 2])  # fmt: skip
    return folder


def write(path, items):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(item) + "\n" for item in items))


def run(kind, checkpoint, *flags):
    base = [kind, "--checkpoint", str(checkpoint), "--device", "cpu"]
    evaluation.main([*base, *map(str, flags)])


def read(path):
    return json.loads(path.read_text())


def refused(capsys, *argv):
    with pytest.raises(SystemExit) as stop:
        evaluation.main([str(arg) for arg in argv])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1, error
    return error


# ---------------------------------------------------------------- core


def test_core_writes_the_contracts_keys_and_no_average_of_fewer_than_22(trained, capsys):
    run("core", trained / "rope", "--bundle", trained / "bundle")
    shown = capsys.readouterr().out
    result = read(trained / "rope/eval/core_crop_rope.json")
    common = "kind checkpoint step seed pos_mode yarn_values block_size dtype data created"
    assert set(common.split()) < set(result) and result["kind"] == "core"
    assert (result["mode"], result["max_length"], result["bos_id"]) == ("nanochat", 32, 256)
    assert result["core_v1"] is None and result["core_v2"] is None and len(result["missing"]) == 19
    assert "n/a (missing: hellaswag_zeroshot, " in shown and "(not CORE)" in shown
    assert set(result["tasks"]) == {"copa", "winograd", "bigbench_repeat_copy_logic"}
    for label, n in (("copa", 32), ("winograd", 24), ("bigbench_repeat_copy_logic", 16)):
        row = result["tasks"][label]
        assert row["n"] == len(row["correct"]) == n
        assert row["accuracy"] == row["correct"].count("1") / n
    assert result["tasks"]["bigbench_repeat_copy_logic"]["cropped"] == 16
    assert "16 cropped" in shown


def test_core_is_the_same_for_any_batch_and_ranks_and_resumes_by_task(
    trained, tmp_path, monkeypatch
):
    from rove.evals.core import run as core

    flags = ["--bundle", trained / "bundle", "--truncation", "extrapolate"]
    run("core", trained / "rove", *flags, "--out", tmp_path / "a.json")
    run("core", trained / "rove", *flags, "--out", tmp_path / "b.json", "--batch_size", "5")
    whole = read(tmp_path / "a.json") | {"created": ""}
    assert read(tmp_path / "b.json") | {"created": ""} == whole and whole["max_length"] is None
    arguments = ["--checkpoint", trained / "rove", "--device", "cpu", *flags]
    arguments += ["--out", tmp_path / "c.json"]
    result = run_script("eval.py", "core", *arguments, ranks=2)
    assert result.returncode == 0 and result.stdout.count("wrote") == 1, result.stderr
    assert read(tmp_path / "c.json") | {"created": ""} == whole
    done, real = [], core.run_task

    def dying(task, *rest):
        if task.label == "winograd" and "winograd" not in done:
            done.append("winograd")
            raise KeyboardInterrupt
        done.append(task.label)
        return real(task, *rest)

    monkeypatch.setattr(core, "run_task", dying)
    for _ in range(2):
        try:
            run("core", trained / "rove", *flags, "--out", tmp_path / "d.json")
        except SystemExit:
            continue
    assert done == ["copa", "winograd", "winograd", "bigbench_repeat_copy_logic"]
    assert read(tmp_path / "d.json") | {"created": ""} == whole


@pytest.mark.parametrize(
    "flags, words",
    [
        ([], ["--bundle"]),
        (["--download", "file:///no/such.zip"], ["--sha256"]),
        (["--download", "file:///no/such.zip", "--sha256", "0" * 64], ["no/such.zip"]),
        (["--bundle", "no/such"], ["no/such", "eval_data"]),
        (["--bundle", "BUNDLE", "--tasks", "copper"], ["'copper'", "'copa'"]),
        (["--bundle", "BUNDLE", "--tasks", "squad"], ["squad"]),
        (["--bundle", "BUNDLE", "--max_per_task", "5"], ["bigbench_repeat_copy_logic", "11"]),
        (["--bundle", "BUNDLE", "--max_length", "1"], ["max_length=1"]),
        (["--bundle", "BUNDLE", "--pos_mode", "rope,rope+yarn"], ["one mode"]),
        (["--bundle", "BUNDLE", "--pos_mode", "rope+yarn", "--yarn_factor", "2,4"], ["one factor"]),
        (["--bundle", "BUNDLE", "--pos_mode", "rope+yarn", "--truncation", "extrapolate"],
         ["--yarn_factor is needed"]),
    ],
)  # fmt: skip
def test_bad_requests_of_core_are_one_line(trained, capsys, monkeypatch, tmp_path, flags, words):
    monkeypatch.chdir(tmp_path)
    flags = [str(trained / "bundle") if flag == "BUNDLE" else flag for flag in flags]
    error = refused(capsys, "core", "--checkpoint", trained / "rope", "--device", "cpu", *flags)
    assert all(word in error for word in words), error


# ---------------------------------------------------------------- ruler

RULER = ["--tasks", "niah_single_1,vt_hops", "--lengths", "2048", "--num_samples", "4"]


def test_ruler_writes_the_contracts_keys_and_the_same_for_any_batch_and_ranks(trained, tmp_path):
    save = ["--save_samples", tmp_path / "samples", "--pos_mode", "rove+yarn"]
    run("ruler", trained / "rove", *RULER, *save)
    result = read(trained / "rove/eval/ruler_stratified_rove+yarn.json")
    assert result["kind"] == "ruler" and result["results"][0]["yarn_factor"] == 64
    assert set(result["categories"]) == {"2048"} and result["categories"]["2048"]["QA"] is None
    keys = {"task", "length", "n", "nll", "nll_content", "nll_control", "exact", "string_match"}
    for row in result["results"]:
        assert keys <= set(row) and row["n"] == 4 == len(row["samples"])
        assert row["string_match"] is None and row["nll_interval"] is None, "not measured; too few"
    flags = ["--batch_size", "3", "--pos_mode", "rove+yarn", "--out", tmp_path / "b.json"]
    arguments = ["--checkpoint", trained / "rove", "--device", "cpu", *RULER, *flags]
    done = run_script("eval.py", "ruler", *arguments, ranks=2)
    assert done.returncode == 0, done.stderr
    for one, two in zip(result["results"], read(tmp_path / "b.json")["results"], strict=True):
        assert two["nll"] == pytest.approx(one["nll"], abs=1e-5)
        assert two["sha256"] == one["sha256"]
    file = tmp_path / "samples/niah_single_1_2048.jsonl"
    run("ruler", trained / "rove", *save[2:], "--samples", file, "--out", tmp_path / "c.json")
    again = read(tmp_path / "c.json")["results"]
    assert len(again) == 1 and again[0] == result["results"][0]


def test_ruler_generates_beyond_the_window_when_asked(trained, tmp_path, monkeypatch):
    lengths, real = [], scoring.string_match
    monkeypatch.setattr(
        scoring, "string_match", lambda m, text, r: lengths.append(len(text)) or real(m, text, r)
    )
    flags = ["--tasks", "vt", "--lengths", "1024", "--num_samples", "1", "--generate"]
    run("ruler", trained / "rope", *flags, "--out", tmp_path / "a.json")
    row = read(tmp_path / "a.json")["results"][0]
    assert row["string_match"] == 0.0 and len(lengths) == 1
    model = evaluation.GPT.from_checkpoint(trained / "rope")
    idx = torch.arange(40)[None] % 257
    free = model.generate(idx, 3, 0.0, max_context=None)
    assert free[0, 40] == model(idx)[0][0, -1].argmax(), "the whole prompt is attended to"


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--tasks", "niah_double"], ["niah_double"]),
        (["--tasks", "qa_1"], ["qa_1", "--squad FILE"]),
        (["--tasks", "vt", "--lengths", "64"], ["vt", "64"]),
        (["--tasks", "vt", "--lengths", "0"], ["lengths='0'"]),
        (["--tasks", "vt", "--num_samples", "0"], ["num_samples=0"]),
        (["--samples", "SAMPLES", "--tasks", "foo,vt"], ["foo"]),
        (["--samples", "SAMPLES", "--tasks", "cwe,fwe"], ["holds no sample", "cwe,fwe"]),
        (["--samples", "SAMPLES", "--lengths", "4096,512"], ["holds no sample", "4096,512"]),
        (["--samples", "no/such.jsonl"], ["--samples no/such.jsonl: no such file"]),
        (["--tasks", "niah_single_2", "--essay", "no/such"], ["--essay no/such: no such file"]),
        (["--tasks", "vt,"], ["tasks='vt,'", "a,b"]),
    ],
)
def test_bad_requests_of_ruler_are_one_line(trained, tmp_path, capsys, flags, words):
    samples = make_samples("vt", 1024, 1, 0, load_tokenizer("byte").encode, Sources())
    write_samples(tmp_path / "vt.jsonl", samples)
    flags = [str(tmp_path / "vt.jsonl") if flag == "SAMPLES" else flag for flag in flags]
    error = refused(capsys, "ruler", "--checkpoint", trained / "rope", "--device", "cpu", *flags)
    assert all(word in error for word in words), error


# ---------------------------------------------------------------- compare


def perplexity_result(shift=0.0, seed=0, **changes):
    rows = [
        {"length": n, "yarn_factor": 1.0,
         "block_nll": [3 + 0.1 * i + (shift if n == 64 else 0.0) for i in range(30)]}
        for n in (32, 64)
    ]  # fmt: skip
    base = {"kind": "perplexity", "protocol": "packed", "data": "x", "tokens": 1920}
    base |= {"mask_eot": False, "scored": 64, "block_size": 32, "seed": seed, "results": rows}
    return base | changes


def test_compare_pairs_blocks_so_that_a_constant_difference_has_no_spread():
    rows = compare([perplexity_result(0.0)], [perplexity_result(-0.25)], ["a", "b"])
    assert [row["what"].split(" (")[0] for row in rows] == ["NLL at 32", "NLL at 64", "D(64)"]
    assert rows[0]["difference"] == pytest.approx(0.0, abs=1e-12)
    for row in rows[1:]:
        assert row["difference"] == pytest.approx(-0.25)
        assert row["interval"] == pytest.approx([-0.25, -0.25])
    seeds = [[perplexity_result(d, seed) for seed, d in enumerate(side)]
             for side in ((0, 0, 0), (-0.1, -0.2, -0.3))]  # fmt: skip
    row = compare(*seeds, ["a"] * 6)[1]
    assert row["difference"] == pytest.approx(-0.2) and row["seeds"] == 3
    assert row["interval"][0] == pytest.approx(-0.3) and row["interval"][1] == pytest.approx(-0.1)


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"data": "y"}, "data"),
        ({"protocol": "tail"}, "protocol"),
        ({"results": perplexity_result(0)["results"][:1]}, "lengths"),
        ({"kind": "core"}, "kind"),
        ({"mask_eot": True}, "mask_eot"),
    ],
)
def test_what_was_not_measured_alike_is_not_compared(changes, word):
    with pytest.raises(ValueError, match=word):
        compare([perplexity_result(0)], [perplexity_result(0, **changes)], ["a", "b"])


def test_a_result_of_other_settings_is_kept_and_a_retrofit_is_not_compared(
    trained, tmp_path, capsys
):
    import shutil

    runs = [tmp_path / mode for mode in ("rope", "rove")]
    for path in runs:
        shutil.copytree(trained / path.name, path)
        shutil.rmtree(path / "eval", ignore_errors=True)
        run("perplexity", path, "--lengths", "32,64", "--max_tokens", "1920")
    file = runs[0] / "eval/perplexity_packed_rope.json"
    first = file.read_text()
    run("perplexity", runs[0], "--lengths", "32,64", "--max_tokens", "1920")
    assert not (runs[0] / "eval/older").exists(), "the same settings replace their result"
    run("perplexity", runs[0], "--lengths", "64", "--max_tokens", "1920")
    (older,) = (runs[0] / "eval/older").iterdir()
    assert json.loads(older.read_text()) | {"created": ""} == json.loads(first) | {"created": ""}
    run("perplexity", runs[0], "--lengths", "32,64", "--max_tokens", "1920")
    evaluation.main(["compare", *map(str, runs), "--out", str(tmp_path / "before.json")])
    retrofit = ["--pos_mode", "rove", "--allow_retrofit", "--lengths", "32,64"]
    run("perplexity", runs[0], *retrofit, "--max_tokens", "1920")
    evaluation.main(["compare", *map(str, runs), "--out", str(tmp_path / "after.json")])
    assert read(tmp_path / "before.json") == read(tmp_path / "after.json")
    both = ",".join([str(runs[0])] * 2)
    assert "each seed once" in refused(capsys, "compare", both, ",".join([str(runs[1])] * 2))


def test_compare_of_two_runs_takes_what_both_have(trained, tmp_path, capsys):
    for mode in ("rope", "rove"):
        evals = trained / mode / "eval"
        for path in evals.glob("*.json"):
            path.unlink()
        run("perplexity", trained / mode, "--lengths", "32,64", "--max_tokens", "1920")
        run("core", trained / mode, "--bundle", trained / "bundle", "--tasks", "copa,winograd")
        run("ruler", trained / mode, *RULER)
    run("perplexity", trained / "rope", "--pos_mode", "rope+yarn", "--lengths", "32")
    capsys.readouterr()
    both = [str(trained / "rope"), str(trained / "rove")]
    evaluation.main(["compare", *both, "--out", str(tmp_path / "c.json")])
    shown = capsys.readouterr().out
    assert shown.count(" minus ") == 3 and "mean of the 2 tasks run, centered v1" in shown
    found = {r["what"]: r for c in read(tmp_path / "c.json")["comparisons"] for r in c["rows"]}
    a, b = (
        read(trained / m / f"eval/core_crop_{m}.json")["tasks"]["copa"] for m in ("rope", "rove")
    )
    row = found["accuracy, copa"]
    assert row["difference"] == pytest.approx(b["accuracy"] - a["accuracy"]) and row["n"] == 32
    assert row["interval"] is not None and row["n"] == 32
    hops = next(row for what, row in found.items() if what.startswith("NLL, vt_hops at 2048"))
    assert hops["interval"] is None and hops["n"] == 1, "four samples of one context"
    evaluation.main(["compare", both[0], both[0]])
    assert "+0.0000 [+0.0000, +0.0000]" in capsys.readouterr().out
    files = [f"{trained}/{m}/eval/perplexity_packed_{m}.json" for m in ("rope", "rove")]
    evaluation.main(["compare", *files])
    assert capsys.readouterr().out.count("NLL at ") == 2
    run("perplexity", trained / "rove", "--lengths", "32,64", "--max_tokens", "640")
    assert "tokens is 640" in refused(capsys, "compare", *files)
    evaluation.main(["compare", *both])
    shown = capsys.readouterr().out
    assert shown.count(" minus ") == 2 and shown.count("left out: ") == 1
    assert "tokens is 640" in shown
    twice = [f"{one},{one}" for one in both]
    assert "nothing to compare is left" in refused(capsys, "compare", *twice)
    assert "A has 2 results" in refused(capsys, "compare", ",".join(files), files[0])
    assert "takes A and B" in refused(capsys, "compare", files[0])
    assert "no/such" in refused(capsys, "compare", "no/such", files[0])
    odd = tmp_path / "odd.json"
    broken = read(trained / "rope/eval/core_crop_rope.json")
    broken["tasks"]["copa"]["correct"] = "0x"
    bare = ["[]", "{}", "nonsense", '{"kind": 5}', '{"kind": "core"}', "[" * 9999]
    for content in (*bare, json.dumps(broken)):
        odd.write_text(content)
        assert "odd.json: not a result" in refused(capsys, "compare", odd, odd)
    evaluation.main(["perplexity", "--checkpoint", both[0], "--device", "cpu",
                     "--protocol", "positions", "--lengths", "64", "--out", str(odd)])  # fmt: skip
    assert "no paired pieces" in refused(capsys, "compare", odd, odd)
