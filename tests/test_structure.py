"""eval.py structure: the mixer against loops and the model, its rank, kernels, the script."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import make_data, refused, run_script, tiny_flags
from oracle import CASES, explicit, ids, inside, lively, matrix, positions, small

import eval as evaluation
import report
import train
from rove.evals.results import read_result
from rove.evals.structure import mixer, run
from rove.evals.structure.picture import draw
from rove.report.publish import scalars
from rove.report.read import read_runs

T = 12
PNG = b"\x89PNG\r\n\x1a\n"
ROVE = [case for case in CASES if case[0].startswith("rove")]
F64 = torch.float64


def make(mode="rove", values="yarn", bias=True):
    """A model with lively weights, YaRN's factor 4 where the mode is a +yarn one."""
    return lively(small(mode, yarn_factor=4.0, yarn_values=values, bias=bias))


def layers_of(net):
    return run.look_inside(net, ids(net.config, 1, T)[0])


def weights_of(net, layer, head):
    """W_Q, W_K, W_V (D, C), their biases (D,) and W_O (C, D) of a head, cut out by hand."""
    C, D, attn = net.config.n_embd, net.config.head_dim, net.transformer.h[layer].attn
    rows = [slice(n * C + head * D, n * C + (head + 1) * D) for n in range(3)]
    whole = attn.c_attn.bias
    bias = torch.zeros(3 * C, dtype=F64) if whole is None else whole.detach()
    w_o = attn.c_proj.weight.detach()[:, head * D : (head + 1) * D]
    return [attn.c_attn.weight.detach()[r] for r in rows], [bias[r] for r in rows], w_o


def by_hand(net, x, layer, head):
    """The head on x (T, C) from the definition: mixer (T * D, T * C), outputs (T, D), A (T, T)."""
    C, D, (omega_qk, omega_v, scale) = net.config.n_embd, net.config.head_dim, positions(net.config)
    w, b, _ = weights_of(net, layer, head)
    q, k, v = (x @ w[n].T + b[n] for n in range(3))
    y, A = explicit(q, k, v, omega_qk, omega_v, scale)
    M = torch.zeros(T * D, T * C, dtype=F64)
    for i in range(T):
        for j in range(i + 1):
            block = A[i, j] * (matrix(omega_v, j - i) @ w[2])
            M[i * D : (i + 1) * D, j * C : (j + 1) * C] = block
    return M, y, A


# ---------------------------------------------------------------- the explicit mixer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("mode", "values"), CASES)
def test_the_mixer_is_the_double_loops_and_does_what_the_model_does(mode, values, bias):
    net = make(mode, values, bias)
    *_, y_float32 = inside(net, ids(net.config, 1, T))
    layers = layers_of(net)
    assert (layers[0].y - y_float32[0]).abs().max() < 1e-4, "layer 0 of the model as it was"
    for n, layer in enumerate(layers):
        for head in range(2):
            M, y, A = by_hand(net, layer.x, n, head)
            blocks, found = run.measure(layers, n, head)
            assert torch.allclose(mixer.as_matrix(blocks), M, rtol=0, atol=1e-12)
            assert torch.allclose(layer.att[head], A, rtol=0, atol=1e-12)
            assert torch.allclose(layer.y[head], y, rtol=0, atol=1e-12)
            largest = y.abs().max().item()
            assert found["max_deviation"] < 1e-12 < 0.1 < largest
            assert found["max_output"] == pytest.approx(largest)
            without_bias = (M @ layer.x.flatten()).view(T, -1)
            assert ((without_bias - y).abs().max() > 0.05) == bias


@pytest.mark.parametrize(("mode", "values"), ROVE)
def test_a_flipped_sign_deviates_and_its_rank_does_not_tell(mode, values):
    own = layers_of(make(mode, values))[1]
    outputs, ranks = [], []
    for turns in (own.turns, own.turns.mT):
        blocks = mixer.make_blocks(own.att[0], turns @ own.w_v[0])
        outputs.append(mixer.apply(blocks, own.x, turns @ own.b_v[0], own.att[0]))
        ranks.append(mixer.schmidt_rank(mixer.schmidt_values(blocks)))
    assert (outputs[0] - own.y[0]).abs().max() < 1e-12
    assert (outputs[1] - own.y[0]).abs().max() > 0.1 * own.y[0].abs().max()
    assert ranks[0] == ranks[1] > 1


def test_learned_positions_turn_nothing():
    net = lively(small("learned", bias=True))
    layers = layers_of(net)
    _, found = run.measure(layers, 1, 1)
    assert found["max_deviation"] < 1e-12 and found["schmidt_rank"] == 1
    with pytest.raises(ValueError, match="length=33.*as learned"):
        run.look_inside(net, ids(net.config, 1, 33)[0])


def test_angles_other_than_the_models_are_not_taken():
    net = make()
    net.tables.omegas[0] = net.tables.omegas[0] * 1.01
    with pytest.raises(AssertionError, match="not the model's angles"):
        run.exact_tables(net.tables, T)


# ---------------------------------------------------------------- rank


@pytest.mark.parametrize(("mode", "values"), CASES)
def test_schmidt_values_are_those_of_a_closed_form(mode, values):
    """Pairs' maps P_m W_V and J_m W_V are orthogonal, of norm |rows m, m'|; so are diagonals of A.
    What is left is a matrix (offsets, 2 pairs) of cos and sin, weighted by both."""
    net = make(mode, values)
    layers = layers_of(net)
    (_, _, w_v), _, _ = weights_of(net, 0, 0)
    _, omega, _ = positions(net.config)
    D, A = net.config.head_dim, by_hand(net, layers[0].x, 0, 0)[2]
    n = torch.arange(T, dtype=F64)
    by_diagonal = torch.stack([A.diagonal(-i).norm() for i in range(T)])
    columns = []
    for m, w in enumerate(omega):
        norm = torch.cat((w_v[m], w_v[m + D // 2])).norm() * by_diagonal
        columns += [norm * (w * n).cos(), norm * (w * n).sin()]
    want = torch.linalg.svdvals(torch.stack(columns, dim=1))
    want = want / want[0]
    _, found = run.measure(layers, 0, 0)
    got = torch.tensor(found["singular_values"], dtype=F64)
    assert torch.allclose(got[:D], want, rtol=0, atol=1e-12) and got[D:].abs().max() < 1e-13
    rank = found["schmidt_rank"]
    assert rank == int((want > 1e-9).sum())
    assert rank == 1 if mode.startswith("rope") else 1 < rank <= D


def test_rank_is_at_most_the_length():
    net = make()
    blocks, found = run.measure(run.look_inside(net, ids(net.config, 1, 3)[0]), 0, 0)
    assert blocks.shape == (3, 3, 8, 16) and found["schmidt_rank"] == 3
    assert len(found["singular_values"]) == 6, "of the blocks that are not 0"


# ---------------------------------------------------------------- kernels by offset


@pytest.mark.parametrize(("mode", "values"), CASES)
def test_cosines_and_norms_are_those_of_whole_maps(mode, values):
    net = make(mode, values)
    layers = layers_of(net)
    _, found = run.measure(layers, 0, 0)
    _, omega, _ = positions(net.config)
    moved = []
    for layer in range(2):
        of_heads = [weights_of(net, layer, head) for head in range(2)]
        weights = [by_hand(net, layers[layer].x, layer, head)[2] for head in range(2)]
        for n in range(T):
            K, still = torch.zeros(2, 16, 16, dtype=F64)
            for head, ((_, _, w_v), _, w_o) in enumerate(of_heads):
                turned, plain = w_o @ matrix(omega, -n) @ w_v, w_o @ w_v
                cosine = (turned * plain).sum() / (turned.norm() * plain.norm())
                got = found["cosine"][layer][head][n]
                assert got == pytest.approx(cosine.item(), abs=1e-12)
                assert n == 0 or (abs(got - 1) < 1e-12) == mode.startswith("rope")
                a = sum(weights[head][i, i - n] for i in range(n, T)) / (T - n)
                assert found["attention_mean"][layer][head][n] == pytest.approx(a.item())
                K, still = K + a * turned, still + a * plain
            assert found["kernel_norm"][layer][n] == pytest.approx(K.norm().item())
            without = found["kernel_norm_unrotated"][layer][n]
            assert without == pytest.approx(still.norm().item())
            moved.append(abs(K.norm().item() / without - 1))
    assert max(moved) > 0.01 if mode.startswith("rove") else max(moved) < 1e-12


def test_maps_that_are_zero_give_no_nan():
    turns = layers_of(make())[0].turns
    w_o, w_v = torch.zeros(2, 16, 8, dtype=F64), torch.ones(2, 8, 16, dtype=F64)
    assert mixer.cosines(w_o, w_v, turns).tolist() == [[0.0] * T] * 2
    assert mixer.kernel_norms(w_o, w_v, turns, torch.ones(2, T, dtype=F64)).tolist() == [0.0] * T
    values = mixer.schmidt_values(torch.zeros(T, T, 8, 16, dtype=F64))
    assert mixer.schmidt_rank(values) == 0 and not values.isnan().any()


# ---------------------------------------------------------------- the script


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("structure")
    data = make_data(folder / "data")
    for mode in ("rope", "rove", "learned"):
        train.main(tiny_flags(data, folder / mode, model__pos_mode=mode))
    return folder


def structure(checkpoint, *flags):
    evaluation.main(["structure", "--checkpoint", str(checkpoint), *flags])


def test_the_script_writes_a_result_and_a_picture(trained):
    flags = ["--length", "20", "--layer", "1", "--head", "1"]
    shown = run_script("eval.py", "structure", "--checkpoint", trained / "rove", *flags)
    assert shown.returncode == 0, shown.stderr
    result = json.loads((trained / "rove/eval/structure_rove.json").read_text())
    common = "kind checkpoint step seed pos_mode yarn_values block_size dtype data created"
    assert set(common.split()) < set(result) and result["kind"] == "structure"
    assert (result["dtype"], result["layer"], result["head"]) == ("float64", 1, 1)
    assert (result["length"], result["step"], result["yarn_factor"]) == (20, 8, 1)
    assert 0 <= result["max_deviation"] < 1e-12 and 1 < result["schmidt_rank"] <= 16
    assert len(result["singular_values"]) == 16 and result["singular_values"][0] == 1
    for key, shape in (("cosine", (2, 2, 20)), ("attention_mean", (2, 2, 20)),
                       ("kernel_norm", (2, 20)), ("kernel_norm_unrotated", (2, 20))):  # fmt: skip
        assert torch.tensor(result[key]).shape == shape
    assert (trained / "rove/eval/structure_rove.png").read_bytes().startswith(PNG)
    assert read_result(trained / "rove/eval/structure_rove.json")["length"] == 20
    assert f"operator-Schmidt rank {result['schmidt_rank']}\n" in shown.stdout
    assert all(f"\n  {layer:5d}" in shown.stdout for layer in (0, 1))
    assert shown.stdout.count("wrote ") == 2 and "warning" not in shown.stdout


def test_modes_have_files_of_their_own_and_another_layer_moves_the_first_aside(trained):
    structure(trained / "rope")
    assert json.loads((trained / "rope/eval/structure_rope.json").read_text())["schmidt_rank"] == 1
    structure(trained / "rope", "--head", "1")
    assert len(list((trained / "rope/eval/older").glob("structure_rope_*.json"))) == 1
    yarn = ["--pos_mode", "rove+yarn", "--yarn_factor", "4"]
    structure(trained / "rove", *yarn)
    structure(trained / "rove", *yarn, "--yarn_values", "orig")
    structure(trained / "rove", "--pos_mode", "rove+yarn", "--length", "64")
    found = [
        json.loads((trained / f"rove/eval/structure_rove+yarn{end}.json").read_text())
        for end in ("_orig", "")
    ]
    assert [content["yarn_factor"] for content in found] == [4, 2]
    assert all(content["max_deviation"] < 1e-12 for content in found)
    structure(trained / "learned")
    learned = json.loads((trained / "learned/eval/structure_learned.json").read_text())
    assert learned["schmidt_rank"] == 1 and learned["max_deviation"] < 1e-12


def test_without_matplotlib_the_result_is_written_and_one_line_says_so(
    trained, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(run, "why_no_plots", lambda: "matplotlib is not here: pip install it")
    structure(trained / "rove", "--out", str(tmp_path / "a.json"), "--batch_size", "2")
    shown = capsys.readouterr().out
    assert shown.count("notice: no picture") == 1 and "pip install" in shown
    assert "warning: batch_size: no effect" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_pictures_of_wide_mixers_and_of_zeros_are_drawn():
    wide = torch.randn(9, 9, 64, 100, dtype=F64)
    for blocks in (wide, torch.zeros_like(wide), wide[:1, :1, :2, :3]):
        assert draw(blocks, "Mixer").startswith(PNG)


@pytest.mark.parametrize(
    ("mode", "flags", "word"),
    [
        ("rove", ["--layer", "2"], "--layer 2: must be 0 to 1"),
        ("rove", ["--layer", "-1"], "--layer -1: must be 0 to 1"),
        ("rove", ["--head", "2"], "--head 2: must be 0 to 1"),
        ("rove", ["--length", "0"], "--length 0: must be 1 to 512"),
        ("rove", ["--length", "513"], "memory for the explicit mixer"),
        ("rove", ["--length", "x"], "--length"),
        ("rove", ["--pos_mode", "rove,rove+yarn"], "one mode at a time"),
        ("rove", ["--pos_mode", "rove+yarn", "--yarn_factor", "2,4"], "one factor at a time"),
        ("rove", ["--pos_mode", "rope"], "--allow_retrofit"),
        ("rove", ["--out", "a.png"], "names the JSON"),
        ("rove", ["--data", "no/such"], "no/such"),
        ("learned", ["--length", "33"], "as learned"),
    ],
)
def test_bad_requests_are_one_line(trained, capsys, mode, flags, word):
    with pytest.raises(SystemExit) as stop:
        structure(trained / mode, *flags)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and word in error, error


def test_a_picture_of_the_users_is_left_alone(trained, tmp_path, capsys):
    (tmp_path / "s.png").write_text("mine")
    with pytest.raises(SystemExit):
        structure(trained / "rove", "--out", str(tmp_path / "s.json"))
    assert "s.png: is none of a result's" in capsys.readouterr().err
    assert [p.read_text() for p in tmp_path.iterdir()] == ["mine"]


def test_text_shorter_than_the_length_is_refused(trained, tmp_path):
    data = make_data(tmp_path / "data", val=10)
    arguments = ["--checkpoint", trained / "rove", "--data", data, "--length", "11"]
    line = refused(run_script("eval.py", "structure", *arguments))
    assert "--length 11: must be 1 to 10" in line


# ---------------------------------------------------------------- who else reads the folder


def test_reports_and_comparisons_pass_it_over(trained, tmp_path, monkeypatch, capsys):
    sent = []
    made = SimpleNamespace(log=sent.append, summary={}, dir=str(tmp_path), save=lambda *_, **__: 0)
    made.define_metric, made.finish = (lambda *_, **__: 0), (lambda: 0)
    fake = SimpleNamespace(init=lambda **_: made, Table=dict, Image=str)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    runs = [str(trained / mode) for mode in ("rope", "rove")]
    for name in runs:
        structure(name)
        flags = ["--lengths", "32", "--max_tokens", "1024", "--device", "cpu"]
        evaluation.main(["perplexity", "--checkpoint", name, *flags])
    report.main([*runs, "--out", str(tmp_path / "report"), "--wandb", "offline"])
    text = (tmp_path / "report/report.md").read_text()
    assert "structure_" not in text and "Perplexity by context length" in text
    tables = [[key for key in row if key.startswith("eval/")] for row in sent]
    assert tables == [[f"eval/perplexity_packed_{mode}"] for mode in ("rope", "rove")]
    names = [name for name, _ in scalars(read_runs(runs)[1])]
    assert names and all(name.startswith("eval/perplexity/") for name in names)
    capsys.readouterr()
    evaluation.main(["compare", *runs, "--out", str(tmp_path / "compare.json")])
    (only,) = json.loads((tmp_path / "compare.json").read_text())["comparisons"]
    assert only["a"] == [str(trained / "rope/eval/perplexity_packed_rope.json")]
    with pytest.raises(SystemExit) as stop:
        evaluation.main(["compare", *[f"{runs[0]}/eval/structure_rope.json"] * 2])
    assert stop.value.code == 2 and "no paired pieces" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"),
    [("layer", -1), ("length", 0), ("max_deviation", None), ("cosine", 1.0), ("kernel_norm", {})],
)
def test_a_damaged_result_is_refused(trained, tmp_path, key, value):
    structure(trained / "rove", "--length", "4", "--out", str(tmp_path / "a.json"))
    content = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps(content | {key: value}))
    with pytest.raises(ValueError, match=key):
        read_result(tmp_path / "a.json")
