"""Perplexity: protocols against known answers, ranks and batches, what is printed and refused."""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import make_data, run_script, tiny_flags

import eval as evaluation
import sample
import train
from model import GPT, GPTConfig
from rove.checkpoint import load_checkpoint, restore
from rove.evals import bootstrap
from rove.evals import compare as comparing
from rove.evals.perplexity import protocols as ppl
from rove.metrics import read_metrics
from rove.shards import TokenData, open_split
from rove.tokenizer import load_tokenizer

V = 257
EOT = V - 1
CPU = torch.device("cpu")
WINDOWED = ("packed", "tail", "sliding")


def split_of(ids):
    """A validation split that holds these ids."""
    shard = np.asarray(ids, dtype=np.uint16)
    tokenizer = {"name": "byte", "vocab_size": V, "sha256": None, "eot_id": EOT}
    return TokenData(Path("data"), (Path("a.bin"),), (shard,), tokenizer, "hash")


def stream(n_tokens, seed=0, documents=(0,)):
    ids = np.random.default_rng(seed).integers(0, EOT, n_tokens)
    ids[list(documents)] = EOT
    return ids


def text_of(protocol, lengths, ids=None, max_tokens=10**9):
    ids = stream(lengths[-1] * 5 + 1) if ids is None else ids
    return ppl.open_text(protocol, split_of(ids), lengths, max_tokens)


def measure(text, length, nll, batch_size=1):
    return ppl.measure(text, length, nll, range(len(text.rows)), batch_size, CPU)


def row_of(text, length, nll, token_bytes=None, mask_eot=False, batch_size=1):
    sums = measure(text, length, nll, batch_size)
    return ppl.length_result(text, length, sums, token_bytes, mask_eot)


def uniform(idx, targets, mask):
    return torch.full(targets.shape, math.log(V))


def bigram(idx, targets, mask):
    """A model whose loss depends on the last token alone."""
    loss = ((idx * 31 + targets * 7) % 13 + 1) / 10.0
    return loss if mask is None else loss.masked_fill(~mask, 0.0)


# ---------------------------------------------------------------- protocols, no model needed


@pytest.mark.parametrize("protocol", WINDOWED)
@pytest.mark.parametrize("length", [8, 16, 32, 64])
def test_uniform_model_scores_ln_v_at_every_length(protocol, length):
    text = text_of(protocol, [8, 16, 32, 64])
    row = row_of(text, length, uniform)
    assert row["nll"] == pytest.approx(math.log(V), rel=1e-6)
    assert row["ppl"] == pytest.approx(V, rel=1e-5)
    n_units = {"packed": 5, "tail": 5, "sliding": 1}[protocol]
    assert row["tokens"] == n_units * (8 if protocol == "tail" else 64)


def test_uniform_model_scores_ln_v_at_every_position():
    text = text_of("positions", [64])
    for row in ppl.position_results(text, measure(text, 64, uniform), False):
        assert row["nll"] == pytest.approx(math.log(V), rel=1e-6)


@pytest.mark.parametrize("protocol", WINDOWED)
def test_bigram_model_scores_alike_at_every_length_as_the_targets_are_the_same(protocol):
    ids = stream(64 * 40 + 1, documents=(0, 100, 500, 505, 900))
    lengths = [4, 8, 32, 64]
    text = text_of(protocol, lengths, ids)
    inputs = text.rows[:, -text.n_scored - 1 : -1]
    want = float(bigram(torch.from_numpy(inputs), torch.from_numpy(text.targets), None).mean())
    for length in lengths:
        row = row_of(text, length, bigram)
        assert row["nll"] == pytest.approx(want, rel=1e-6)
        assert np.mean(row["block_nll"]) == pytest.approx(want, rel=1e-6)
        assert row["tokens"] == text.targets.size
        again = row_of(text, length, bigram, batch_size=7)
        assert again["nll"] == pytest.approx(row["nll"], abs=1e-9)
        assert (row["interval"] is None) == (len(text.rows) < 20)


def test_packed_windows_tile_the_stream_and_targets_are_the_next_tokens():
    text = text_of("packed", [8, 16], np.arange(33))
    assert text.windows(8) == [(0, 8), (8, 8)] and text.windows(16) == [(0, 16)]
    assert text.targets.tolist() == [list(range(1, 17)), list(range(17, 33))]


def test_tail_scores_the_same_last_targets_behind_more_or_less_context():
    text = text_of("tail", [8, 32], np.arange(97))
    assert text.targets.tolist() == [list(range(n - 7, n + 1)) for n in (32, 64, 96)]
    seen = []

    def nll(idx, targets, mask):
        mask = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask
        seen.append((idx[0].tolist(), targets[mask].tolist()))
        return torch.zeros(targets.shape)

    measure(text, 8, nll, batch_size=1)
    measure(text, 32, nll)
    assert [row[0][0] for row in seen] == [24, 0, 32, 64], "four short windows fit into one batch"
    assert sum((row[1] for row in seen[1:]), []) == seen[0][1]


def test_tail_windows_are_at_most_256_targets_wide():
    assert text_of("tail", [512, 1024]).n_scored == 256
    assert text_of("tail", [64, 1024]).n_scored == 64


def test_sliding_takes_long_documents_only_and_every_target_once():
    documents = (0, 10, 200, 260, 400)  # of 10, 190, 60, 140 and 100 tokens
    ids = stream(500, documents=documents)
    text = text_of("sliding", [16, 64, 96], ids)
    assert [row[0] for row in text.rows] == [EOT] * 3
    for row, start in zip(text.rows, (10, 260, 400), strict=True):
        assert row.tolist() == ids[start : start + 97].tolist()
    assert text.windows(64) == [(0, 64), (16, 16), (32, 16)]
    assert text.windows(96) == [(0, 96)]
    for length in (16, 64, 96):
        scored = [(start + length - n, start + length) for start, n in text.windows(length)]
        assert [a for a, _ in scored] == [0] + [b for _, b in scored[:-1]] and scored[-1][1] == 96
    assert len(text_of("sliding", [16, 96], ids, max_tokens=200).rows) == 2


def test_a_document_that_a_scan_cuts_in_two_is_found(monkeypatch):
    monkeypatch.setattr(ppl, "SCANNED", 64)
    ids = stream(500, documents=(0, 10, 200, 260, 400))
    assert ppl.long_documents(split_of(ids), 96, 10) == [10, 260, 400]
    assert ppl.long_documents(split_of(ids), 100, 10) == [10, 260]
    assert ppl.long_documents(split_of(ids), 189, 10) == [10], "190 tokens are 189 targets"
    assert ppl.long_documents(split_of(ids), 190, 10) == []


def test_the_mean_of_window_means_stands_apart():
    text = text_of("sliding", [4, 8], stream(9))

    def nll(idx, targets, mask):
        return torch.tensor([[1.0, 1, 1, 1], [9, 9, 9, 4]])[: len(idx)]

    text = ppl.Text("sliding", text.rows, 8, 1, EOT)  # one window of 4 targets, then 4 of one
    row = ppl.length_result(text, 4, np.array([[8.0, 8.0, 1.5]]), None, False)
    assert row["nll"] == 1.0 and row["nll_window_mean"] == 1.5
    sums = ppl.measure(ppl.Text("sliding", text.rows, 8, 4, EOT), 4, nll, [0], 1, CPU)
    assert sums[0].tolist() == [4 + 31, 4 + 31, (1 + 31 / 4) / 2]


def test_perplexity_is_exp_of_the_mean_not_the_mean_of_perplexities():
    text = text_of("packed", [4], np.zeros(9, dtype=int))

    def nll(idx, targets, mask):
        return torch.tensor([[1.0] * 4, [3.0] * 4])

    assert row_of(text, 4, nll, batch_size=2)["ppl"] == pytest.approx(math.exp(2))


def test_end_of_text_counts_unless_it_is_masked_and_never_for_bytes():
    ids = np.array([1, 2, EOT, 3, 4, 5, EOT, 6, 7])
    text = text_of("packed", [8], ids)
    token_bytes = load_tokenizer("byte").token_bytes()

    def nll(idx, targets, mask):
        return torch.where(targets == EOT, 5.0, 1.0)

    row, masked = (row_of(text, 8, nll, token_bytes, mask_eot=m) for m in (False, True))
    assert (row["nll"], row["tokens"]) == (2.0, 8) and (masked["nll"], masked["tokens"]) == (1.0, 6)
    assert row["bits_per_byte"] == masked["bits_per_byte"] == pytest.approx(1 / math.log(2))
    assert row_of(text, 8, nll)["bits_per_byte"] is None
    text = text_of("positions", [8], ids)
    by_position = ppl.position_results(text, measure(text, 8, nll), True)
    assert by_position == [{"from": 0, "to": 8, "nll": 1.0, "tokens": 6}]
    with pytest.raises(ValueError, match="every target is end-of-text"):
        row_of(text_of("packed", [8], np.full(9, EOT)), 8, nll, mask_eot=True)


def test_positions_are_the_packed_windows_seen_by_position():
    model = GPT(GPTConfig(block_size=32, vocab_size=V, n_layer=1, n_head=2, n_embd=16)).eval()

    def nll(idx, targets, mask):
        return model.token_nll(idx, targets)

    ids = stream(256 * 3 + 1)
    text = text_of("positions", [256], ids)
    bins = ppl.position_results(text, measure(text, 256, nll), False)
    assert [(r["from"], r["to"]) for r in bins] == [(0, 64), (64, 128), (128, 256)]
    packed = row_of(text_of("packed", [256], ids), 256, nll)
    assert sum(r["nll"] * r["tokens"] for r in bins) == pytest.approx(packed["nll"] * 768, rel=1e-6)
    text = ppl.Text("positions", np.zeros((1, 4097), dtype=np.int64), 4096, 256, EOT)
    edges = [
        (r["from"], r["to"]) for r in ppl.position_results(text, np.zeros((1, 2, 4096)), False)
    ]
    assert edges[-3:] == [(512, 1024), (1024, 2048), (2048, 4096)]


def test_degradation_is_paired_with_the_row_of_the_training_context():
    rng = np.random.default_rng(0)
    common = rng.normal(3, 1, 40)  # blocks differ much, lengths by a constant
    rows = [
        {"length": n, "nll": float((common + d).mean()), "block_nll": common + d, "yarn_factor": f}
        for n, d, f in ((8, 0.0, 1.0), (16, 0.25, 2.0), (8, 0.1, 2.0))
    ]
    ppl.add_degradation(rows[:2], 8, own_factor=True)
    assert rows[0]["degradation"] == 0 and rows[1]["degradation"] == pytest.approx(0.25)
    assert rows[1]["degradation_interval"] == pytest.approx([0.25, 0.25])
    ppl.add_degradation(rows, 8, own_factor=False)
    assert rows[1]["degradation"] == pytest.approx(0.15), "the row of its own factor"
    ppl.add_degradation(rows, 99, own_factor=True)
    assert rows[1]["degradation"] is None and rows[1]["degradation_interval"] is None


@pytest.mark.parametrize("text", ["64,96", "0,8", "x", "", "8,,16"])
def test_lengths_that_do_not_tile_are_refused(text):
    with pytest.raises(ValueError, match="lengths="):
        ppl.parse_lengths(text)


def test_default_lengths_are_half_to_sixteen_times_the_context():
    assert ppl.default_lengths(1024) == [512, 1024, 2048, 4096, 8192, 16384]
    assert ppl.default_lengths(1) == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("protocol", [*WINDOWED, "positions"])
def test_text_that_is_too_short_is_refused(protocol):
    with pytest.raises(ValueError, match="has 100 tokens.*needs 128"):
        text_of(protocol, [128], stream(100))
    with pytest.raises(ValueError, match="max_tokens is 3"):
        text_of(protocol, [4, 8], max_tokens=3)
    with pytest.raises(ValueError, match="max_tokens=0: must be at least 1"):
        text_of(protocol, [4, 8], max_tokens=0)


@pytest.mark.parametrize("protocol", [*WINDOWED, "positions"])
@pytest.mark.parametrize("start, max_tokens", [(0, 10**9), (40, 10**9), (0, 20)])
def test_the_lengths_that_a_refusal_names_work(protocol, start, max_tokens):
    ids = stream(100, documents=(start,))
    with pytest.raises(ValueError, match="shorter ones: --lengths ") as caught:
        text_of(protocol, [64, 128], ids, max_tokens if protocol != "tail" else min(max_tokens, 63))
    lengths = ppl.parse_lengths(str(caught.value).rpartition(" ")[2])
    assert len(lengths) == 2 and len(text_of(protocol, lengths, ids, max_tokens).rows) >= 1
    if protocol != "tail":  # which is limited in another way
        with pytest.raises(ValueError, match="shorter ones"):
            text_of(protocol, [2 * n for n in lengths], ids, max_tokens)


# ---------------------------------------------------------------- intervals


def test_intervals_agree_with_theory_and_are_the_same_every_time():
    x = np.random.default_rng(0).normal(1.0, 2.0, 400)
    low, high = bootstrap.mean_interval(x)
    error = x.std() / math.sqrt(400)
    assert low == pytest.approx(x.mean() - 1.96 * error, abs=0.2 * error)
    assert high == pytest.approx(x.mean() + 1.96 * error, abs=0.2 * error)
    assert [low, high] == bootstrap.mean_interval(x)
    assert bootstrap.mean_interval(x[:19]) is None


def test_seeds_and_pieces_are_resampled_jointly():
    rng = np.random.default_rng(0)
    of_seed = rng.normal(0, 1, (6, 1))
    x = of_seed + rng.normal(0, 0.1, (6, 300))
    spread = bootstrap.draw_means(x).std()
    assert spread == pytest.approx(of_seed.std() / math.sqrt(6), rel=0.15)
    assert bootstrap.draw_means(x[:1]).std() < 0.01


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
    open_model, seen = evaluation.Session.open, []

    def opened(*arguments, **more):  # building a model draws its first weights; scoring none
        found = open_model(*arguments, **more)
        seen.append(torch.get_rng_state())
        return found

    monkeypatch.setattr(evaluation.Session, "open", opened)
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
        (["--lengths", "8192"], ["4000 tokens", "8192", "--lengths 1024,2048"]),
        (["--data", "no/such"], ["no/such"]),
        (["--batch_size", "0"], ["batch_size=0"]),
        (["--yarn_factor", "0"], ["yarn_factor=0"]),
        (["--yarn_factor", "2,x"], ["yarn_factor='2,x'"]),
        (["--yarn_values", "old"], ["yarn_values='old'"]),
        (["--pos_mode", "rope,rape"], ["pos_mode", "rape"]),
        (["--pos_mode", "rope,,"], ["pos_mode='rope,,'", "a,b"]),
        (["--out", ""], ["--out '': is empty"]),
        (["--checkpoint="], ["--checkpoint '': is empty"]),
        (["--pos_mode", "rope,rope+yarn", "--out", "a.json"], ["one file cannot hold 2 modes"]),
        (["--protocol", "sliding", "--lengths", "1024,2048"], ["4000 tokens", "one document"]),
        (["--max_tokens", "0"], ["max_tokens=0: must be at least 1"]),
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


def test_modes_factors_and_values_are_measured_on_the_same_targets(trained):
    flags = ["--pos_mode", "rove,rove+yarn", "--yarn_values", "yarn,orig", "--yarn_factor", "1,2,4"]
    for protocol in ("packed", "tail"):
        perplexity(trained / "rove", *flags, "--protocol", protocol, "--lengths", "32,128")
        files = [f"perplexity_{protocol}_rove{end}.json" for end in ("", "+yarn", "+yarn_orig")]
        plain, yarn, orig = (read(trained / "rove/eval" / file)["results"] for file in files)
        assert [(r["length"], r["yarn_factor"]) for r in plain] == [(32, 1), (128, 1)]
        grid = [(length, f) for length in (32, 128) for f in (1, 2, 4)]
        assert [(r["length"], r["yarn_factor"]) for r in yarn] == grid
        assert len({r["tokens"] for r in (*plain, *yarn, *orig)}) == 1
        nll = {(r["length"], r["yarn_factor"]): r["nll"] for r in yarn}
        assert nll[128, 1] == plain[1]["nll"] and nll[128, 4] != plain[1]["nll"]
        assert nll[128, 4] != orig[-1]["nll"] and nll[32, 1] == orig[0]["nll"]
        d = next(r for r in yarn if (r["length"], r["yarn_factor"]) == (128, 4))
        assert d["degradation"] == pytest.approx(nll[128, 4] - nll[32, 4])
        assert d["degradation_interval"][0] <= d["degradation"] <= d["degradation_interval"][1]


def test_a_killed_evaluation_goes_on_after_the_last_length(trained, tmp_path, monkeypatch, capsys):
    flags = ["--lengths", "16,32,64", "--max_tokens", "1024", "--out", str(tmp_path / "a.json")]
    perplexity(trained / "rope", *flags)
    whole, measured = read(tmp_path / "a.json"), []
    real = ppl.measure

    def dying(text, length, *rest):
        if length == 64 and measured.count(64) == 0:
            measured.append(64)
            raise KeyboardInterrupt
        measured.append(length)
        return real(text, length, *rest)

    monkeypatch.setattr(ppl, "measure", dying)
    (tmp_path / "a.json").unlink()
    with pytest.raises(SystemExit, match="130"):
        perplexity(trained / "rope", *flags)
    (partial,) = tmp_path.iterdir()
    assert partial.name.startswith("a.json.") and partial.suffix == ".partial"
    perplexity(trained / "rope", *flags)
    assert measured == [16, 32, 64, 64], "16 and 32 were not measured again"
    again = read(tmp_path / "a.json")
    assert again | {"created": ""} == whole | {"created": ""}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    partial.write_text("{nonsense")
    perplexity(trained / "rope", *flags)
    with monkeypatch.context() as other:
        measured[:] = []
        other.setattr(ppl, "measure", dying)
        with pytest.raises(SystemExit, match="130"):
            perplexity(trained / "rope", *flags)
    perplexity(trained / "rope", *flags, "--mask_eot")
    assert measured[-3:] == [16, 32, 64], "parts of another measurement are not used"


def test_retrofit_works_when_asked_for(trained):
    out = trained / "retrofit.json"
    flags = ["--pos_mode", "rove", "--allow_retrofit", "--lengths", "32", "--max_tokens", "512"]
    perplexity(trained / "rope", *flags, "--out", str(out))
    assert read(out)["pos_mode"] == "rove"


def fault(capsys, *argv):
    """The one line with which eval.py refuses a command."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        evaluation.main([str(arg) for arg in argv])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1, error
    return error


def test_nothing_but_a_result_is_overwritten(trained, tmp_path, capsys, monkeypatch):
    short = ["--device", "cpu", "--lengths", "32", "--max_tokens", "512", "--out"]
    kinds = {"perplexity": short, "structure": ["--out"], "core": ["--bundle", "none", "--out"]}
    kinds |= {"ruler": ["--tasks", "vt", "--out"]}
    contents = (b"my notes", b"", b"\xff\x00", b"[]", b'{"kind": "compare"}', b'{"kind": ["core"]}')
    out = tmp_path / "mine.json"
    with monkeypatch.context() as idle:
        idle.setattr(evaluation.Session, "open", None)
        for kind, flags in kinds.items():
            for content in contents:
                out.write_bytes(content)
                line = fault(capsys, kind, "--checkpoint", trained / "rope", *flags, out)
                assert "mine.json: holds something else than a result" in line and "--out" in line
                assert out.read_bytes() == content
        out.unlink()
        out.symlink_to(tmp_path / "nowhere")
        line = fault(capsys, "perplexity", "--checkpoint", trained / "rope", *short, out)
        assert "holds something else" in line and out.is_symlink()
        (tmp_path / "file").write_text("")
        flags = [*short, tmp_path / "file/x.json"]
        line = fault(capsys, "perplexity", "--checkpoint", trained / "rope", *flags)
        assert "file: is a file; name a folder" in line
    out.unlink()
    perplexity(trained / "rope", *short, str(out))
    perplexity(trained / "rope", *short, str(out), "--mask_eot")
    assert len(list((tmp_path / "older").iterdir())) == 1


def test_compare_checks_where_it_writes_before_it_reads(trained, tmp_path, capsys, monkeypatch):
    a = tmp_path / "a.json"
    perplexity(trained / "rope", "--lengths", "32", "--max_tokens", "512", "--out", str(a))
    with monkeypatch.context() as idle:
        idle.setattr(comparing, "read_result", None)
        assert "is a folder; name a file" in fault(capsys, "compare", a, a, "--out", tmp_path)
        line = fault(capsys, "compare", a, a, "--out", a)
        assert "holds something else than a result of eval.py (compare)" in line
        for pair in (("", a), (a, f"{a},")):
            assert "must be names joined by single commas" in fault(capsys, "compare", *pair)
    for _ in range(2):
        evaluation.main(["compare", str(a), str(a), "--out", str(tmp_path / "new/deep/c.json")])
    assert read(tmp_path / "new/deep/c.json")["kind"] == "compare"


def test_a_config_that_is_none_is_no_traceback(trained, tmp_path, capsys):
    odd = shutil.copytree(trained / "rope", tmp_path / "odd")
    shutil.rmtree(odd / "eval", ignore_errors=True)
    (odd / "config.yaml").write_text("model: 3\ndata: 3\n")
    assert "no results of the same kind" in fault(capsys, "compare", odd, trained / "rove")
    line = fault(capsys, "perplexity", "--checkpoint", odd, "--device", "cpu")
    assert "--data: the run's data folder (None)" in line


def test_a_path_inside_a_run_is_answered_with_the_folder(trained):
    run = trained / "rove"
    for name in ("checkpoints/latest.json", "config.yaml", "checkpoints", "metrics.jsonl"):
        with pytest.raises(ValueError, match=f"; give the folder {re.escape(str(run))}$"):
            load_checkpoint(run / name)
    with pytest.raises(ValueError, match="give --out_dir of a run$"):
        load_checkpoint(trained / "data")


def test_a_checkpoint_of_other_data_says_what_differs(trained):
    path = next((trained / "rove/checkpoints").glob("*.pt"))
    saved = load_checkpoint(path)
    expected = {"data": saved["data"] | {"train": "e" * 64, "seed": 7}}
    with pytest.raises(ValueError) as caught:
        restore(path, expected, None, None, None)
    train_hash = saved["data"]["train"][:12]
    assert str(caught.value).startswith(
        f"{path}: its data differ: data.seed 1337 (asked: 7), "
        f"data.train {train_hash}.. (asked: {'e' * 12}..); "
    )
    assert "another --out_dir" in str(caught.value)


def test_unknown_evaluation_and_foreign_data_are_refused(trained, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        evaluation.main(["bleu"])
    assert stop.value.code == 2 and "perplexity" in capsys.readouterr().err
    other = make_data(tmp_path / "other", vocab_size=100)
    with pytest.raises(SystemExit):
        perplexity(trained / "rope", "--data", str(other))
    assert "vocab_size 100, the model was trained on 257" in capsys.readouterr().err


# ---------------------------------------------------------------- sample.py


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
        (["--temperature", "1e-310"], "temperature=1e-310: must be 0 (greedy) or from 0.0001"),
        (["--temperature", ".inf"], "temperature=inf"),
        (["--max_new_tokens", "100000000000"], "max_new_tokens=100000000000: must be 0 to 1000000"),
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
