"""Rotary positions, RoVE and YaRN against the oracle, against transformers, and by property."""

import math

import pytest
import torch
from oracle import (
    CASES,
    MODES,
    TOLERANCE,
    bare,
    error,
    expected,
    explicit,
    frequencies,
    ids,
    inside,
    lively,
    logits,
    matrix,
    pairs,
    positions,
    small,
    temperature,
    wide,
)

import model
from model import GPT, GPTConfig, rotary_frequencies, rotate

CPU = torch.device("cpu")
WIDE = [wide("rope"), wide("rove")] + [
    wide(mode, factor, yarn_values=values)
    for factor in (4.0, 16.0)
    for mode, values in CASES
    if "yarn" in mode
]


def label(config):
    return f"{config.pos_mode}-{config.yarn_values}-{config.yarn_factor:g}"


def tables(net, stop):
    """cos and sin (stop, D / 2) of queries and keys."""
    return net.tables.at(0, stop, CPU).qk


def angles(omega, stop, start=0):
    t = torch.arange(start, stop, dtype=torch.float64)
    return torch.outer(t, torch.tensor(omega, dtype=torch.float64))


# ---------------------------------------------------------------- the oracle, then the model by it


@pytest.mark.parametrize("mode, values", CASES)
def test_the_oracle_agrees_with_sums_over_rotation_matrices(mode, values):
    config = small(mode, yarn_factor=4.0, yarn_values=values)
    q, k, v, y = inside(lively(config), ids(config, 2, 12))
    for b in range(2):
        for h in range(config.n_head):
            by_matrices, _ = explicit(q[b, h], k[b, h], v[b, h], *positions(config))
            assert (by_matrices - y[b, h]).abs().max() < 1e-5  # and so does the model's attention


@pytest.mark.parametrize("factor", [1.0, 4.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mode, values", CASES)
def test_logits_equal_the_oracle(mode, values, bias, factor):
    config = small(mode, yarn_factor=factor, yarn_values=values, bias=bias)
    assert error(lively(config), B=2, T=48) < TOLERANCE


@pytest.mark.parametrize("config", WIDE, ids=label)
def test_logits_equal_the_oracle_at_the_published_geometry(config):
    assert error(lively(config), B=1, T=1100) < TOLERANCE


@pytest.mark.parametrize("mode", MODES)
def test_a_double_model_is_as_exact_as_its_float32_tables(mode):
    # the tables stay float32 and so does the arithmetic of rotate: 1e-7 each is the floor
    config = small(mode, yarn_factor=4.0)
    assert error(lively(config).double(), B=2, T=48) < 1e-5


@pytest.mark.parametrize("make, T", [(small, 48), (wide, 1100)])
def test_these_models_see_every_difference_of_positions(make, T):
    """What the comparisons above would be worth little without: each setting moves the logits."""
    config = make("rove")
    settings = [make("rope"), config]
    for factor in (4.0, 16.0):
        settings += [make(m, yarn_factor=factor, yarn_values=v) for m, v in CASES if "yarn" in m]
    B = 2 if make is small else 1
    outcomes = [expected(setting, B, T) for setting in settings]
    for i, one in enumerate(outcomes):
        for other in outcomes[:i]:
            assert (one - other).abs().max() > 1000 * TOLERANCE
    idx = ids(config, 1, T)
    reordered = torch.cat((idx[:, :-1].flip(1), idx[:, -1:]), dim=1)
    with torch.no_grad():
        change = lively(config)(idx)[0][0, -1] - lively(config)(reordered)[0][0, -1]
    assert change.abs().max() > 1000 * TOLERANCE


# ---------------------------------------------------------------- frequencies and temperature


@pytest.mark.parametrize("factor", [1.0, 1.7, 4.0, 8.0, 16.0])
@pytest.mark.parametrize(
    "head_dim, length, theta",
    [(64, 1024, 1e4), (32, 128, 1e4), (8, 32, 1e4), (8, 1024, 10.0), (64, 4096, 5e5)],
)
def test_yarn_frequencies_equal_the_script(head_dim, length, theta, factor):
    config = GPTConfig(block_size=length, n_head=2, n_embd=2 * head_dim, rope_theta=theta)
    got = rotary_frequencies(config, factor)
    want = torch.tensor(frequencies(head_dim, theta, length, factor), dtype=torch.float64)
    assert got.dtype == torch.float64
    assert (got / want - 1).abs().max() < 1e-12


@pytest.mark.parametrize("factor", [4.0, 8.0, 16.0])
@pytest.mark.parametrize(
    "head_dim, length, theta", [(64, 1024, 1e4), (32, 128, 1e4), (8, 1024, 10.0)]
)
def test_yarn_frequencies_and_temperature_equal_transformers(head_dim, length, theta, factor):
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    theirs = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=int(length * factor),
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": length,
        },
    )
    want, mscale = rope_utils.ROPE_INIT_FUNCTIONS["yarn"](theirs, CPU)
    ours = GPTConfig(
        block_size=length,
        n_head=2,
        n_embd=2 * head_dim,
        rope_theta=theta,
        pos_mode="rope+yarn",
        yarn_factor=factor,
    )
    got = rotary_frequencies(ours, factor)
    assert (got / want.double() - 1).abs().max() < 1e-6
    assert ours.mscale == pytest.approx(mscale, rel=1e-12)


@pytest.mark.parametrize(
    "head_dim, length, theta, low, high",
    [
        (64, 1024, 1e4, 5, 18),  # neither bound clamps
        (32, 128, 1e4, 0, 6),  # the fastest pair makes 20 turns: the lower bound clamps
        (8, 1024, 10.0, 2, 7),  # the slowest pair makes 29: the upper bound clamps to head_dim - 1
    ],
)
def test_ramp_bounds(head_dim, length, theta, low, high):
    config = GPTConfig(block_size=length, n_head=1, n_embd=head_dim, rope_theta=theta)
    ratio = rotary_frequencies(config, 4.0) / rotary_frequencies(config, 1.0)
    for m, r in enumerate(ratio.tolist()):
        kept = min(max((high - m) / (high - low), 0.0), 1.0)
        assert r == pytest.approx(kept + (1 - kept) / 4, rel=1e-12)


def test_betas_move_the_ramp():
    config = GPTConfig(n_head=1, n_embd=64, yarn_beta_fast=16.0, yarn_beta_slow=2.0)
    want = frequencies(64, 1e4, 1024, 4.0, beta_fast=16.0, beta_slow=2.0)
    assert rotary_frequencies(config, 4.0).tolist() == pytest.approx(want, rel=1e-12)
    assert want != pytest.approx(frequencies(64, 1e4, 1024, 4.0), rel=1e-3)


def test_a_ramp_of_no_width_is_a_step():
    # theta 4: both bounds lie beyond the last pair, all of which turn more than 32 times
    config = GPTConfig(block_size=4096, n_head=1, n_embd=8, rope_theta=4.0)
    assert torch.equal(rotary_frequencies(config, 16.0), rotary_frequencies(config, 1.0))


@pytest.mark.parametrize("mode", ["rope", "rove"])
@pytest.mark.parametrize("values", ["yarn", "orig"])
def test_factor_1_is_the_mode_without_yarn_bit_for_bit(mode, values):
    plain = lively(wide(mode))
    yarn = lively(wide(mode + "+yarn", 1.0, yarn_values=values))
    idx = ids(plain.config, 1, 1100)
    assert torch.equal(plain(idx)[0], yarn(idx)[0])


@pytest.mark.parametrize("mode", ["rope", "rove"])
def test_without_yarn_the_factor_changes_nothing(mode):
    net = lively(small(mode))
    idx = ids(net.config, 2, 48)
    before = net(idx)[0]
    net.set_yarn_factor(16.0)
    assert torch.equal(net(idx)[0], before)


def test_set_yarn_factor_equals_a_model_made_with_it():
    net = lively(small("rove+yarn"))
    idx = ids(net.config, 2, 48)
    before = net(idx)[0]
    net.set_yarn_factor(4.0)
    assert error(net, B=2, T=48) < TOLERANCE
    net.set_yarn_factor(1)
    assert torch.equal(net(idx)[0], before)


@pytest.mark.parametrize("factor, mscale", [(1.0, 1.0), (4.0, 1.1386), (16.0, 1.2773)])
@pytest.mark.parametrize("mode", MODES)
def test_temperature_multiplies_scores_squared_and_nothing_else(mode, factor, mscale, monkeypatch):
    """M5, watched at the attention call: its inputs keep their norms, its scale takes mscale^2."""
    assert temperature(factor) == pytest.approx(mscale, abs=5e-5)
    calls = []

    def spy(*args, scale=None, **kwargs):
        calls.append((args[:3], scale))
        return real(*args, scale=scale, **kwargs)

    real = model.F.scaled_dot_product_attention
    monkeypatch.setattr(model.F, "scaled_dot_product_attention", spy)
    net = lively(wide(mode, factor))
    before = inside(net, ids(net.config, 1, 200))
    (inputs, scale), mscale = calls[0], mscale if "yarn" in mode else 1.0
    assert scale * math.sqrt(64) == pytest.approx(mscale**2, abs=2e-4)
    if "yarn" in mode:
        assert scale * math.sqrt(64) == pytest.approx(temperature(factor) ** 2, rel=1e-12)
    for plain, seen in zip(before, inputs, strict=False):
        assert (pairs(plain).abs() - pairs(seen.double()).abs()).abs().max() < 1e-5
    if mode == "rope":
        assert torch.equal(before[2].float(), inputs[2])


@pytest.mark.parametrize("factor", [0.99, 0.0, -4.0, math.nan, math.inf])
def test_a_factor_below_1_is_an_error(factor):
    with pytest.raises(ValueError, match="yarn_factor="):
        small("rove+yarn", yarn_factor=factor)
    net = lively(small("rove+yarn"))
    idx = ids(net.config, 1, 8)
    before = net(idx)[0]
    with pytest.raises(ValueError, match="yarn_factor="):
        net.set_yarn_factor(factor)
    assert torch.equal(net(idx)[0], before)


# ---------------------------------------------------------------- tables: precision and growth


def check_tables(cos, sin, omega):
    """M1: within 1e-3 (float32 does better) of float64, every position unlike its neighbour."""
    want = angles(omega, len(cos))
    assert cos.dtype == sin.dtype == torch.float32
    assert (cos - want.cos()).abs().max() < 1e-7
    assert (sin - want.sin()).abs().max() < 1e-7
    same = (cos[1:] == cos[:-1]) & (sin[1:] == sin[:-1])
    assert not same.all(dim=1).any()


@pytest.mark.parametrize("config", [wide("rope"), wide("rove+yarn", 16.0)], ids=label)
@pytest.mark.parametrize("how", ["fp32", "autocast", "bfloat16", "default_dtype", "roundtrip"])
def test_tables_match_float64_whatever_the_precision(config, how):
    omega, _, _ = positions(config)
    if how == "default_dtype":
        torch.set_default_dtype(torch.bfloat16)
        try:
            cos, sin = tables(GPT(config), 16384)
        finally:
            torch.set_default_dtype(torch.float32)
    elif how == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            cos, sin = tables(GPT(config), 16384)
    else:
        net = GPT(config)
        before = tables(net, 1024)
        if how != "fp32":
            net = net.bfloat16()
        if how == "roundtrip":  # M2
            net = net.float()
        cos, sin = tables(net, 16384)
        assert torch.equal(cos[:1024], before[0]) and torch.equal(sin[:1024], before[1])
    check_tables(cos, sin, omega)


@pytest.mark.parametrize("mode", ["rope", "rove"])
def test_bf16_sees_a_far_position_as_well_as_a_near_one(mode):
    net = lively(wide(mode)).bfloat16()
    idx = ids(net.config, 1, 64)
    with torch.no_grad():
        near, far = (net(idx, pos_offset=offset)[0] for offset in (0, 16000))
    assert (near - far).abs().max() < 0.1  # the rounding of activations


def test_tables_grow_without_changing_their_values():
    net, fresh = lively(small("rove+yarn", yarn_factor=4.0)), lively(small("rove+yarn"))
    fresh.set_yarn_factor(4.0)
    few = [t.clone() for t in tables(net, 40)]
    for stop in (1024, 1025, 5000):
        tables(net, stop)
    many = tables(fresh, 5000)
    assert all(torch.equal(a, b[:40]) for a, b in zip(few, many, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tables(net, 5000), many, strict=True))


@pytest.mark.parametrize("T", [1, 31, 33, 1023, 1024, 1025, 2049])
def test_any_length_is_accepted_and_a_prefix_does_not_see_what_follows(T):
    net = lively(small("rove"))
    idx = ids(net.config, 1, T)
    with torch.no_grad():
        longer, _ = net(torch.cat((idx, idx[:, :1]), dim=1))
        got, _ = net(idx)
    assert got.shape == (1, T, 97)
    assert (got - longer[:, :T]).abs().max() < TOLERANCE


def test_growing_in_inference_mode_leaves_training_possible():
    net = GPT(small("rove")).train()
    idx = ids(net.config, 1, 1100)
    with torch.inference_mode():
        net(idx)  # the first to need more than a block of tables
    _, loss = net(idx, idx)
    loss.backward()
    assert net.transformer.wte.weight.grad.isfinite().all()


# ---------------------------------------------------------------- M9, M10: rotate, golden vectors


def test_rotate_golden_example():
    """M10: channel m turns with channel m + 2; theta 10000 in four dimensions, 1 and 0.01 rad."""
    net = GPT(GPTConfig(32, 64, n_layer=1, n_head=1, n_embd=4))
    cos, sin = tables(net, 4)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    one = rotate(x.expand(4, 4), cos, sin)
    assert one[0].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert one[1].tolist() == pytest.approx([-1.984111, 1.959901, 2.462378, 4.019799], abs=2e-6)
    assert one[3].tolist() == pytest.approx([-1.413353, 1.879118, -2.828857, 4.058191], abs=2e-6)


def test_rove_golden_example_at_an_offset():
    """Half of the previous token's value turned by -1 position, half of one's own; and so on. The
    flipped sign gives -0.742055 in the first channel of the second row, no rotation gives 0.75."""
    v = [[1.0, 2.0, 3.0, 4.0], [0.5, -1.0, 0.25, 2.0], [-2.0, 0.0, 1.0, -1.0]]
    *_, y = inside(bare(torch.tensor(v)), torch.tensor([[0, 1, 2]]))
    want = [
        [1.0, 2.0, 3.0, 4.0],
        [1.782358, 0.519950, 0.514718, 2.989900],
        [0.264088, 0.366548, -0.481133, 1.656368],
    ]
    assert y[0, 0].tolist() == [pytest.approx(row, abs=2e-6) for row in want]
    *_, y = inside(bare(torch.tensor(v), "rope"), torch.tensor([[0, 1, 2]]))
    assert y[0, 0, 1].tolist() == pytest.approx([0.75, 0.5, 1.625, 3.0], abs=2e-6)


def test_rotate_is_linear_invertible_and_keeps_norms_and_dtypes():
    x = torch.randn(2, 3, 50, 16, generator=torch.Generator().manual_seed(0))
    angle = angles(frequencies(16, 1e4, 32, 1.0), 50)
    cos, sin = angle.cos(), angle.sin()
    exact = rotate(x.double(), cos, sin)
    assert exact.dtype == torch.float64
    assert (
        pairs(exact) - pairs(x.double()) * torch.polar(torch.ones_like(angle), angle)
    ).abs().max() < 1e-14
    assert (rotate(exact, cos, -sin) - x).abs().max() < 1e-14
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        got = rotate(x.to(dtype), cos.float(), sin.float())
        assert got.dtype == dtype and (got - exact).abs().max() < tolerance
    got = rotate(x.double(), cos.float(), sin.float())  # float32 tables: float32 arithmetic
    assert torch.equal(got, rotate(x, cos.float(), sin.float()).double())


def test_rotate_computes_a_bf16_input_in_float32():
    x = torch.randn(50, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    angle = angles(frequencies(16, 1e4, 32, 1.0), 50).float()
    cos, sin = angle.cos(), angle.sin()
    assert torch.equal(rotate(x, cos, sin), rotate(x.float(), cos, sin).bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rotate(x, cos, sin), rotate(x.float(), cos, sin).bfloat16())


def test_rove_by_rotate_in_float64_ignores_a_shift_of_all_positions():
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 40, 64, dtype=torch.float64, generator=generator).unbind(0)
    omega = frequencies(64, 1e4, 1024, 4.0)

    def attend_at(start):
        angle = angles(omega, start + 40, start)
        cos, sin = angle.cos(), angle.sin()
        A = (rotate(q, cos, sin) @ rotate(k, cos, sin).T / 8).softmax(-1)
        return rotate(A @ rotate(v, cos, sin), cos, -sin)

    assert (attend_at(0) - attend_at(1000)).abs().max() < 1e-9


@pytest.mark.parametrize("mode", MODES)
def test_the_model_ignores_a_shift_of_all_positions(mode):
    torch.manual_seed(0)
    fresh, trained = GPT(wide(mode, 4.0)).eval(), lively(wide(mode, 4.0))
    for net, tolerance in ((fresh, 1e-5), (trained, TOLERANCE / 2)):
        idx = ids(net.config, 1, 300)
        with torch.no_grad():
            near, far = (net(idx, pos_offset=offset)[0] for offset in (0, 1000))
            losses = [net(idx, idx, pos_offset=offset)[1] for offset in (0, 1000)]
        assert (near - far).abs().max() < tolerance
        assert abs(losses[0] - losses[1]) < 1e-5


def test_attention_on_the_diagonal_returns_the_value():
    # each token asks for its own pair of channels, which no other token has
    rows = torch.eye(64)[:32]
    value = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    net = bare(rows, query=8000.0, value=value)
    for offset in (0, 700):
        _, _, v, y = inside(net, torch.arange(32)[None], pos_offset=offset)
        assert v.abs().max() > 1
        assert (y - v).abs().max() < 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_the_first_token_gets_its_own_value(mode):
    net = lively(wide(mode, 4.0))
    for offset in (0, 700):
        _, _, v, y = inside(net, ids(net.config, 1, 20), pos_offset=offset)
        assert (y[:, :, 0] - v[:, :, 0]).abs().max() < 1e-5


def test_rove_with_the_value_rotation_off_is_rope_bit_for_bit(monkeypatch):
    rope, rove = lively(wide("rope")), lively(wide("rove"))
    idx = ids(rope.config, 1, 300)
    assert not torch.equal(rope(idx)[0], rove(idx)[0])
    real = rove.tables.at

    def unturned(start, stop, device):
        cos, sin = real(start, stop, device).v
        return real(start, stop, device)._replace(v=(torch.ones_like(cos), torch.zeros_like(sin)))

    monkeypatch.setattr(rove.tables, "at", unturned)
    assert torch.equal(rope(idx)[0], rove(idx)[0])


def test_uniform_attention_over_a_constant_value():
    """PAPER.md's law, with the angle that tells the sign (the norm alone is blind to it): pair m of
    the output at position i is v e^(-i omega i / 2) sin((i+1) omega/2) / ((i+1) sin(omega/2))."""
    row = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    *_, v, y = inside(bare(row), torch.zeros(1, 300, dtype=torch.long))
    i = torch.arange(300, dtype=torch.float64)[:, None]
    omega = torch.tensor(frequencies(64, 1e4, 32, 1.0), dtype=torch.float64)
    law = (omega * (i + 1) / 2).sin() / ((i + 1) * (omega / 2).sin())
    got, value = pairs(y[0, 0]), pairs(v[0, 0])
    assert (got.abs() - value.abs() * law.abs()).abs().max() < 1e-5
    assert (got - value * torch.polar(law, -omega * i / 2)).abs().max() < 1e-5
    *_, v, y = inside(bare(row, "rope"), torch.zeros(1, 300, dtype=torch.long))
    assert (y - v).abs().max() < 1e-5


# ---------------------------------------------------------------- the three readings of the paper


@pytest.fixture(params=["rope", "rove"])
def one_head(request):
    """A lively one-head model: config, inputs x (T, C), W_V, A and the attention's y (T, D)."""
    config = small(request.param, n_head=1, n_embd=8, n_layer=1)
    net, idx = lively(config), ids(config, 1, 9)
    q, k, v, y = (part[0, 0] for part in inside(net, idx))
    with torch.no_grad():
        x = net.transformer.h[0].ln_1(net.transformer.wte(idx))[0].double()
    _, A = explicit(q, k, v, *positions(config))
    return config, x, net.transformer.h[0].attn.c_attn.weight[16:].detach().double(), A, y


def turned(config, delta):
    return matrix(positions(config)[1], delta)


def test_reading_1_attentive_convolution(one_head):
    config, x, W_V, A, y = one_head
    kernel = {delta: turned(config, delta) @ W_V for delta in range(-8, 9)}  # psi
    want = [sum(A[i, j] * (kernel[j - i] @ x[j]) for j in range(9)) for i in range(9)]
    assert (torch.stack(want) - y).abs().max() < 1e-5


def test_reading_2_matrix_mixer(one_head):
    config, x, W_V, A, y = one_head
    T, D = y.shape
    i = torch.arange(T)
    offset = (i[None, :] - i[:, None]).double()  # D_ij = j - i
    mixer = sum(
        torch.kron(A * (offset == delta), turned(config, delta) @ W_V) for delta in range(-8, 9)
    )
    assert ((mixer @ x.flatten()).view(T, D) - y).abs().max() < 1e-5

    blocks = mixer.view(T, D, T, D).transpose(1, 2)
    assert torch.allclose(blocks[5, 2], A[5, 2] * turned(config, -3) @ W_V, atol=1e-12)

    closed = torch.zeros_like(mixer)
    for m, omega in enumerate(positions(config)[1]):
        P, J = torch.zeros(2, D, D, dtype=torch.float64)
        P[m, m] = P[m + D // 2, m + D // 2] = J[m + D // 2, m] = 1
        J[m, m + D // 2] = -1
        closed += torch.kron(A * (omega * offset).cos(), P @ W_V)
        closed += torch.kron(A * (omega * offset).sin(), J @ W_V)
    assert (closed - mixer).abs().max() < 1e-12

    rank = torch.linalg.matrix_rank(blocks.reshape(T * T, D * D), rtol=1e-9)  # operator-Schmidt
    if config.pos_mode == "rope":
        assert rank == 1 and torch.allclose(mixer, torch.kron(A, W_V))
    else:
        assert 1 < rank <= D


def test_reading_3_change_of_frame(one_head):
    config, x, W_V, A, y = one_head
    frame = torch.stack([turned(config, t) for t in range(len(x))])  # to the shared frame
    shared = torch.einsum("jde,je->jd", frame, x @ W_V.T)
    assert (torch.einsum("ide,id->ie", frame, A @ shared) - y).abs().max() < 1e-5  # R^T: back


# ---------------------------------------------------------------- M3, M10: what a checkpoint holds


def checkpoint(net):
    return {"model_config": net.config.stored(), "model": net.state_dict()}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_the_state_dict_holds_the_documented_names_and_no_table(mode, bias):
    names = ["transformer.wte.weight"]
    for n in range(2):
        for part in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"):
            names += [f"transformer.h.{n}.{part}.{kind}" for kind in ("weight", "bias")]
    names += ["transformer.ln_f.weight", "transformer.ln_f.bias"]
    net = lively(small(mode, bias=bias))
    net(ids(net.config, 1, 1100))
    state = net.state_dict()
    assert sorted(state) == sorted(n for n in names if bias or not n.endswith("bias"))
    assert dict(net.named_parameters()).keys() == state.keys()
    assert not list(net.buffers())
    assert state["transformer.h.0.attn.c_attn.weight"].shape == (48, 16)


@pytest.mark.parametrize("path", ["rope", "rove"])
@pytest.mark.parametrize("values", ["yarn", "orig"])
def test_a_checkpoint_loads_at_16_times_its_length_with_yarn(path, values):
    trained = lively(small(path))
    loaded = GPT.from_checkpoint(
        checkpoint(trained), pos_mode=f"{path}+yarn", yarn_factor=16.0, yarn_values=values
    )
    assert loaded.config.block_size == 32 and not loaded.training
    assert error(loaded, B=1, T=512) < TOLERANCE
    assert all(torch.equal(p, loaded.state_dict()[n]) for n, p in trained.state_dict().items())


def test_none_keeps_what_is_stored():
    net = lively(small("rove+yarn", yarn_factor=4.0, yarn_values="orig", dropout=0.1))
    loaded = GPT.from_checkpoint(checkpoint(net), pos_mode=None, yarn_factor=None, dropout=None)
    assert loaded.config == net.config
    assert GPT.from_checkpoint(checkpoint(net), dropout=0.0).config.dropout == 0.0
    assert GPT.from_checkpoint(checkpoint(net), pos_mode="rove").config.pos_mode == "rove"


@pytest.mark.parametrize("other", ["", "+yarn"])
@pytest.mark.parametrize("path, changed", [("rope", "rove"), ("rove", "rope")])
def test_another_value_path_needs_the_override(path, changed, other):
    trained = lively(small(path))
    with pytest.raises(ValueError, match="allow_retrofit") as refused:
        GPT.from_checkpoint(checkpoint(trained), pos_mode=changed + other)
    assert "hurt" in str(refused.value) and "\n" not in str(refused.value)
    net = GPT.from_checkpoint(checkpoint(trained), pos_mode=changed + other, allow_retrofit=True)
    assert net.config.pos_mode == changed + other
    assert error(net, B=2, T=48) < TOLERANCE


@pytest.mark.parametrize("key, value", [("block_size", 64), ("rope_theta", 1e6), ("typo", 1)])
def test_other_overrides_are_refused(key, value):
    with pytest.raises(ValueError, match=key):
        GPT.from_checkpoint(checkpoint(lively(small())), **{key: value})


def test_the_pairing_is_stored_and_a_mismatch_is_refused():
    saved = checkpoint(lively(small()))
    assert saved["model_config"]["rotary_pairing"] == "halves"
    for pairing in ("neighbours", None):
        other = {**saved["model_config"], "rotary_pairing": pairing}
        with pytest.raises(ValueError, match="rotary_pairing"):
            GPT.from_checkpoint({**saved, "model_config": other})
    unsaid = {k: v for k, v in saved["model_config"].items() if k != "rotary_pairing"}
    with pytest.raises(ValueError, match="rotary_pairing"):
        GPT.from_checkpoint({**saved, "model_config": unsaid})


def test_weights_load_strictly():
    saved = checkpoint(lively(small()))
    with pytest.raises(ValueError, match="extra"):
        GPT.from_checkpoint({**saved, "model": {**saved["model"], "extra": torch.zeros(1)}})
    fewer = {k: v for k, v in saved["model"].items() if "ln_f" not in k}
    with pytest.raises(ValueError, match="ln_f"):
        GPT.from_checkpoint({**saved, "model": fewer})


def test_the_oracle_is_told_apart_by_its_own_weights():
    """A guard on the guard: one changed weight in the last layer norm shows in the comparison."""
    net = lively(small())
    with torch.no_grad():
        net.transformer.ln_f.weight[0] += 0.05
    assert error(net, B=2, T=48) > 10 * TOLERANCE
    changed = logits(net.state_dict(), net.config, ids(net.config, 2, 48))
    assert (changed - net(ids(net.config, 2, 48))[0]).abs().max() < TOLERANCE
