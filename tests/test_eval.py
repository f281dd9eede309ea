"""Perplexity: protocols against known answers, ranks and batches, what is printed and refused."""

import json
import math

import numpy as np
import pytest
import torch
from helpers import make_data, run_script, tiny_flags

import eval as evaluation
import report
import sample
import train
from model import GPT, GPTConfig
from rove.evals import perplexity as ppl
from rove.metrics import read_metrics
from rove.shards import open_split
from rove.tokenizer import load_tokenizer

V = 257
CPU = torch.device("cpu")


def stream(n_tokens, seed=0):
    return np.random.default_rng(seed).integers(0, V, n_tokens)


def measure(targets, length, score, batch_size=1, add_up=None):
    blocks = list(range(targets.n_blocks))
    return ppl.block_nll(
        targets, length, score, blocks, batch_size, add_up or ppl.text_sums(None), CPU
    )


def uniform(idx, targets):
    return torch.full(targets.shape, math.log(V))


def bigram(idx, targets):
    """A model whose loss depends on the last token alone."""
    return ((idx * 31 + targets * 7) % 13 + 1) / 10.0


# ---------------------------------------------------------------- protocols, no model needed


@pytest.mark.parametrize("length", [8, 16, 32, 64])
def test_uniform_model_scores_ln_v_at_every_length(length):
    targets = ppl.Targets(stream(64 * 5 + 1), 64)
    row = ppl.packed_result(targets, length, measure(targets, length, uniform), None)
    assert row["nll"] == pytest.approx(math.log(V), rel=1e-6)
    assert row["ppl"] == pytest.approx(V, rel=1e-5) and row["tokens"] == 320
    sums = measure(targets, 64, uniform, add_up=ppl.position_sums)
    assert all(
        r["nll"] == pytest.approx(math.log(V), rel=1e-6) for r in ppl.position_results(64, sums)
    )


def test_bigram_model_scores_alike_at_every_length_as_the_targets_are_the_same():
    ids = stream(64 * 5 + 1)
    targets = ppl.Targets(ids, 64)
    rows = [
        ppl.packed_result(targets, n, measure(targets, n, bigram), None) for n in (1, 8, 32, 64)
    ]
    x, y = torch.from_numpy(ids[:-1]), torch.from_numpy(ids[1:])
    want = float(bigram(x, y).double().mean())
    assert all(row["nll"] == pytest.approx(want, rel=1e-6) for row in rows)
    assert all(np.mean(row["block_nll"]) == pytest.approx(want, rel=1e-6) for row in rows)


def test_perplexity_is_exp_of_the_mean_not_the_mean_of_perplexities():
    targets = ppl.Targets(np.array([0] * 9), 4)

    def score(idx, targets):
        return torch.tensor([[1.0, 1.0, 1.0, 1.0], [3.0, 3.0, 3.0, 3.0]])

    sums = ppl.block_nll(targets, 4, score, [0, 1], 2, ppl.text_sums(None), CPU)
    assert ppl.packed_result(targets, 4, sums, None)["ppl"] == pytest.approx(math.exp(2))


def test_bits_per_byte_leave_end_of_text_out():
    ids = np.array([1, 2, 256, 3, 4, 5, 256, 6, 7])
    token_bytes = load_tokenizer("byte").token_bytes()
    targets = ppl.Targets(ids, 8)
    sums = measure(targets, 8, uniform, add_up=ppl.text_sums(token_bytes))
    row = ppl.packed_result(targets, 8, sums, token_bytes)
    assert row["bits_per_byte"] == pytest.approx(math.log2(V)) and row["tokens"] == 8
    assert (
        ppl.packed_result(targets, 8, measure(targets, 8, uniform), None)["bits_per_byte"] is None
    )


def test_positions_are_the_packed_windows_seen_by_position():
    model = GPT(GPTConfig(block_size=32, vocab_size=V, n_layer=1, n_head=2, n_embd=16)).eval()
    targets = ppl.Targets(stream(256 * 3 + 1), 256)
    sums = measure(targets, 256, model.token_nll, add_up=ppl.position_sums)
    bins = ppl.position_results(256, sums)
    assert [(r["from"], r["to"]) for r in bins] == [(0, 64), (64, 128), (128, 256)]
    packed = ppl.packed_result(targets, 256, measure(targets, 256, model.token_nll), None)
    assert sum(r["nll"] * r["tokens"] for r in bins) == pytest.approx(packed["nll"] * 768, rel=1e-6)
    edges = [(r["from"], r["to"]) for r in ppl.position_results(4096, np.zeros((1, 4096)))]
    assert edges[-3:] == [(512, 1024), (1024, 2048), (2048, 4096)]


def test_targets_are_the_next_tokens():
    targets = ppl.Targets(np.arange(33), 16)
    windows = targets.block_windows(1, 8)
    assert windows.tolist() == [list(range(16, 25)), list(range(24, 33))]


@pytest.mark.parametrize("text", ["64,96", "0,8", "x", "", "8,,16"])
def test_lengths_that_do_not_tile_are_refused(text):
    with pytest.raises(ValueError, match="lengths="):
        ppl.parse_lengths(text)


def test_default_lengths_are_half_to_sixteen_times_the_context():
    assert ppl.default_lengths(1024) == [512, 1024, 2048, 4096, 8192, 16384]
    assert ppl.default_lengths(1) == [1, 2, 4, 8, 16]
    with pytest.raises(ValueError, match="100 tokens"):
        ppl.count_blocks(100, 128, 1000)


# ---------------------------------------------------------------- eval.py on a trained model


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    data = make_data(folder / "data", val=4_000)
    for mode in ("rope", "rove"):
        train.main(tiny_flags(data, folder / mode, model__pos_mode=mode, train__eval_tokens=10**6))
    return folder


def perplexity(checkpoint, *flags):
    evaluation.main(["perplexity", "--checkpoint", str(checkpoint), "--device", "cpu", *flags])


def read(path):
    return json.loads(path.read_text())


def test_result_has_the_contracts_keys_and_the_training_loss(trained):
    perplexity(trained / "rove", "--lengths", "32,64", "--max_tokens", "2048")
    result = read(trained / "rove/eval/perplexity_packed_rove.json")
    common = "kind checkpoint step seed pos_mode yarn_values block_size dtype data created"
    assert set(common.split()) < set(result) and result["kind"] == "perplexity"
    assert (result["step"], result["seed"], result["block_size"]) == (8, 1337, 32)
    assert result["dtype"] == "float32" and result["protocol"] == "packed"
    for row in result["results"]:
        keys = {"length", "nll", "ppl", "bits_per_byte", "tokens", "yarn_factor", "block_nll"}
        assert keys <= set(row) and row["tokens"] == 2048 and row["yarn_factor"] == 1
        assert len(row["block_nll"]) == 32 and row["ppl"] == pytest.approx(math.exp(row["nll"]))
    val = open_split(trained / "data", "val")
    n = val.n_windows(32) * 32
    perplexity(
        trained / "rove",
        "--lengths",
        "32",
        "--max_tokens",
        str(n),
        "--out",
        str(trained / "a.json"),
    )
    val_loss = read_metrics(trained / "rove")[-1]["val/loss"]
    assert read(trained / "a.json")["results"][0]["nll"] == pytest.approx(val_loss, abs=1e-5)


def test_yarn_sets_its_factor_by_length_and_says_so(trained, capsys):
    perplexity(
        trained / "rope", "--pos_mode", "rope+yarn", "--lengths", "16,32,128", "--max_tokens", "512"
    )
    shown = capsys.readouterr().out
    rows = read(trained / "rope/eval/perplexity_packed_rope+yarn.json")["results"]
    assert [row["yarn_factor"] for row in rows] == [1, 1, 4]
    assert rows[2]["temperature"] == pytest.approx(1.1386294, rel=1e-5)
    assert "trained at 32" in shown and "factor 4, temperature 1.1386" in shown
    perplexity(trained / "rope", "--lengths", "16,32,128", "--max_tokens", "512")
    plain = read(trained / "rope/eval/perplexity_packed_rope.json")["results"]
    assert [r["nll"] for r in plain][:2] == [r["nll"] for r in rows][:2]
    assert plain[2]["nll"] != rows[2]["nll"]
    fixed = trained / "fixed.json"
    flags = [
        "--lengths",
        "16,128",
        "--max_tokens",
        "512",
        "--yarn_factor",
        "2",
        "--out",
        str(fixed),
    ]
    perplexity(trained / "rope", "--pos_mode", "rope+yarn", *flags)
    assert [row["yarn_factor"] for row in read(fixed)["results"]] == [2, 2]
    perplexity(trained / "rope", *flags)
    assert "no effect in mode rope" in capsys.readouterr().out


def test_orig_values_differ_and_have_a_file_of_their_own(trained):
    flags = ["--pos_mode", "rove+yarn", "--lengths", "128", "--max_tokens", "512"]
    perplexity(trained / "rove", *flags)
    perplexity(trained / "rove", *flags, "--yarn_values", "orig")
    a, b = (trained / f"rove/eval/perplexity_packed_rove+yarn{s}.json" for s in ("", "_orig"))
    assert read(a)["results"][0]["nll"] != read(b)["results"][0]["nll"]
    assert read(b)["yarn_values"] == "orig"


def test_batch_and_ranks_change_nothing(trained):
    rows = {}
    for name, flags, ranks in (
        ("1", ["--batch_size", "1"], None),
        ("4", ["--batch_size", "4"], None),
        ("8", ["--batch_size", "8"], None),
        ("ranks", ["--batch_size", "2"], 2),
    ):
        out = trained / f"batch{name}.json"
        arguments = ["--checkpoint", trained / "rove", "--device", "cpu", "--lengths", "32,128"]
        arguments += ["--max_tokens", "3840", "--out", out, *flags]
        if ranks:
            result = run_script("eval.py", "perplexity", *arguments, ranks=ranks)
            assert result.returncode == 0, result.stderr
            assert result.stdout.count("wrote ") == 1
        else:
            evaluation.main(["perplexity", *map(str, arguments)])
        rows[name] = [row["nll"] for row in read(out)["results"]]
        blocks = read(out)["results"][0]["block_nll"]
        assert len(blocks) == 30
    for other in rows.values():
        assert other == pytest.approx(rows["1"], abs=1e-5)


def test_evaluation_touches_no_random_numbers_and_no_training_state(trained, monkeypatch):
    open_model, seen = evaluation.open_model, []

    def opened(*arguments):  # building a model draws its first weights; scoring must draw nothing
        found = open_model(*arguments)
        seen.append(torch.get_rng_state())
        return found

    monkeypatch.setattr(evaluation, "open_model", opened)
    before = {p: p.read_bytes() for p in (trained / "rove/checkpoints").iterdir()}
    perplexity(trained / "rove", "--lengths", "32", "--max_tokens", "512")
    assert torch.equal(seen[0], torch.get_rng_state())
    assert before == {p: p.read_bytes() for p in (trained / "rove/checkpoints").iterdir()}


def test_positions_by_the_script(trained):
    perplexity(
        trained / "rove", "--protocol", "positions", "--lengths", "128", "--max_tokens", "1024"
    )
    result = read(trained / "rove/eval/perplexity_positions_rove.json")
    assert [(r["from"], r["to"], r["tokens"]) for r in result["results"]] == [
        (0, 64, 512),
        (64, 128, 512),
    ]


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--pos_mode", "rove"], ["trained as 'rope'", "--allow_retrofit"]),
        (["--yarn_factor", "0.5"], ["yarn_factor=0.5"]),
        (["--lengths", "32,48"], ["32 must divide"]),
        (["--lengths", "8192"], ["4000 tokens", "8192"]),
        (["--data", "no/such"], ["no/such"]),
        (["--batch_size", "0"], ["batch_size=0"]),
        (["--yarn_factor", "0"], ["yarn_factor=0.0"]),
        (["--max_tokens", "0"], ["max_tokens is 0"]),
        (["--out", "."], ["is a folder"]),
        (["--protocol", "sideways"], ["protocol", "packed"]),
    ],
)
def test_bad_requests_are_one_line(trained, capsys, flags, words):
    with pytest.raises(SystemExit) as stop:
        perplexity(trained / "rope", *flags)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    assert all(word in error for word in words), error


def test_retrofit_works_when_asked_for(trained):
    out = trained / "retrofit.json"
    flags = ["--pos_mode", "rove", "--allow_retrofit", "--lengths", "32", "--max_tokens", "512"]
    perplexity(trained / "rope", *flags, "--out", str(out))
    assert read(out)["pos_mode"] == "rove"


def test_unknown_evaluation_and_foreign_data_are_refused(trained, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        evaluation.main(["bleu"])
    assert stop.value.code == 2 and "perplexity" in capsys.readouterr().err
    other = make_data(tmp_path / "other", vocab_size=100)
    with pytest.raises(SystemExit):
        perplexity(trained / "rope", "--data", str(other))
    assert "vocab_size 100, the model was trained on 257" in capsys.readouterr().err


# ---------------------------------------------------------------- report.py and sample.py


def test_report_is_one_table_with_an_empty_cell_for_what_is_missing(trained, tmp_path, capsys):
    for mode, lengths in (("rope", "32,64"), ("rove", "64")):
        for path in (trained / mode / "eval").glob("*.json"):
            path.unlink()
        perplexity(trained / mode, "--lengths", lengths, "--max_tokens", "1024")
    report.main([str(trained / "rope"), str(trained / "rove"), "--out", str(tmp_path / "r")])
    text = (tmp_path / "r/report.md").read_text()
    row = next(line for line in text.splitlines() if "| rove |" in line)
    assert (
        "32 (trained)" in text
        and row.split("|")[3].strip() == ""
        and text in capsys.readouterr().out
    )
    perplexity(trained / "rove", "--lengths", "64", "--max_tokens", "2048")
    with pytest.raises(SystemExit) as stop:
        report.main([str(trained / "rope"), str(trained / "rove")])
    assert stop.value.code == 2 and "different targets" in capsys.readouterr().err
    for content in ("{}", "[]", '{"kind": "perplexity", "protocol": "packed", "results": []}'):
        odd = trained / "rope/eval/odd.json"
        odd.write_text(content)
        with pytest.raises(SystemExit):
            report.main(["--out", str(tmp_path / "r"), str(trained / "rope")])
        assert "odd.json: not a result" in capsys.readouterr().err
        odd.unlink()
    for runs in ([], [str(tmp_path / "nothing")]):
        with pytest.raises(SystemExit) as stop:
            report.main(runs)
        assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def written(capsys, *flags):
    sample.main([str(flag) for flag in flags])
    return capsys.readouterr()


def test_sample_is_repeatable_and_says_what_yarn_does(trained, tmp_path, capsys):
    run = ["--checkpoint", trained / "rove", "--device", "cpu", "--max_new_tokens", "12"]
    greedy = [written(capsys, *run, "--temperature", "0", "--prompt", "ab").out for _ in range(2)]
    assert greedy[0] == greedy[1] and "sample 1 of 1" in greedy[0]
    first, again = (written(capsys, *run, "--num_samples", "2").out for _ in range(2))
    one, two = (part.split("\n", 1)[1] for part in first.split("--- sample")[1:])
    assert one != two, "two samples, two draws"
    assert (
        first == again and first != written(capsys, *run, "--num_samples", "2", "--seed", "7").out
    )
    everything = written(capsys, *run, "--top_k", "1000000").out
    assert everything == written(capsys, *run, "--top_k", "0").out
    (tmp_path / "p.txt").write_text("ab")
    assert (
        written(capsys, *run, "--temperature", "0", "--prompt", f"FILE:{tmp_path}/p.txt").out
        == greedy[0]
    )
    long = written(capsys, *run, "--max_new_tokens", "125", "--pos_mode", "rove+yarn").out
    assert "rove+yarn: trained at 32, for 126 tokens; factor 3.9375, temperature" in long


@pytest.mark.parametrize(
    "flags, word",
    [
        (["--top_k", "-1"], "top_k=-1"),
        (["--temperature", "-0.5"], "temperature=-0.5"),
        (["--top_p", "1.5"], "top_p=1.5"),
        (["--max_new_tokens", "-3"], "max_new_tokens=-3"),
        (["--num_samples", "0"], "num_samples=0"),
        (["--yarn_factor", "0", "--pos_mode", "rove+yarn"], "yarn_factor=0.0"),
        (["--seed", "99999999999999999999"], "seed=99999999999999999999"),
        (["--prompt", "FILE:no/such"], "no/such"),
        (["--yarn_factor", "0.5", "--pos_mode", "rove+yarn"], "yarn_factor=0.5"),
        (["--pos_mode", "rope"], "--allow_retrofit"),
    ],
)
def test_bad_sampling_is_one_line(trained, capsys, flags, word):
    with pytest.raises(SystemExit) as stop:
        sample.main(["--checkpoint", str(trained / "rove"), "--device", "cpu", *flags])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and word in error, error


def test_text_beyond_the_window_goes_on_with_a_notice(trained):
    run = ["sample.py", "--checkpoint", trained / "rove", "--device", "cpu"]
    result = run_script(*run, "--max_new_tokens", "100", "--top_k", "5")
    assert result.returncode == 0 and result.stderr.count("\n") == 1
    assert "warning: text outgrows the window of 32 tokens" in result.stderr
    result = run_script(*run, "--max_new_tokens", "3", "--prompt", "x" * 50)
    assert "cropped" in result.stderr and "x" * 50 in result.stdout


def test_a_prompt_file_that_is_not_utf8_is_named(trained, tmp_path, capsys):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(SystemExit) as stop:
        sample.main(
            ["--checkpoint", str(trained / "rove"), "--prompt", f"FILE:{tmp_path}/latin.txt"]
        )
    assert stop.value.code == 2 and "latin.txt: not UTF-8 at byte 3" in capsys.readouterr().err
