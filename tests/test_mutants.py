"""Known slips of rotary code, put into the model on purpose: the oracle must see every one.

A mutant of positions hands attention other tables or another scale through `Positions`; a mutant
of attention replaces its forward. Each is measured on logits, at toy size and at the published
geometry (block_size 1024, head_dim 64, factors 4 and 16), against 1000 times the tolerance that
the true model is held to. The last test shows which properties would have let a slip pass.
"""

import math

import pytest
import torch
from oracle import (
    CASES,
    TOLERANCE,
    bare,
    chunked,
    error,
    expected,
    frequencies,
    ids,
    inside,
    lively,
    pairs,
    positions,
    small,
    temperature,
    wide,
)
from torch.nn import functional as F

import model
from model import Positions

FAR = 1000 * TOLERANCE
YARN = [case for case in CASES if "yarn" in case[0]]
CONFIGS = [small("rope", bias=True), small("rove", bias=True), wide("rope"), wide("rove")]
CONFIGS += [small(mode, yarn_factor=4.0, yarn_values=values) for mode, values in YARN]
CONFIGS += [wide(mode, s, yarn_values=values) for s in (4.0, 16.0) for mode, values in YARN]


def label(config):
    size = f"{config.block_size}x{config.head_dim}"
    return f"{config.pos_mode}-{config.yarn_values}-{config.yarn_factor:g}-{size}"


def sizes(config):
    """B and T of the measurement: beyond block_size, where YaRN is for."""
    return (2, 48) if config.block_size == 32 else (1, 1100)


def is_rove(config):
    return config.value_path == "rove"


def is_yarn(config):
    return config.factor > 1


def is_both(config):
    return is_rove(config) and is_yarn(config)


# ------------------------------------------------------------- mutants of tables and temperature


def put(net, omega_qk, omega_v, scale, qk_gain=1.0, v_gain=1.0, dtype=torch.float64):
    """Let attention read tables of these frequencies, times a gain, and this scale."""

    def table(omega, start, stop, gain):
        t = torch.arange(start, stop).to(dtype).double()
        angle = torch.outer(t, torch.tensor(omega, dtype=torch.float64))
        return (angle.cos() * gain).float(), (angle.sin() * gain).float()

    def at(start, stop, device):
        qk, v = table(omega_qk, start, stop, qk_gain), table(omega_v, start, stop, v_gain)
        return Positions(qk, v, scale)

    net.tables.at = at


def ramp(config, kept):
    """YaRN frequencies from the share kept of each pair: kept(m, turns over block_size)."""
    D, L = config.head_dim, config.block_size
    omegas = frequencies(D, config.rope_theta, L, 1.0)
    share = [min(max(kept(m, L * w / (2 * math.pi)), 0.0), 1.0) for m, w in enumerate(omegas)]
    return [w * k + w / config.factor * (1 - k) for w, k in zip(omegas, share, strict=True)]


def bound(config, turns):
    """The fractional pair index at which a pair makes so many turns over block_size."""
    D, L = config.head_dim, config.block_size
    return D / 2 * math.log(L / (2 * math.pi * turns), config.rope_theta)


def with_ramp(kept):
    """A mutant whose YaRN frequencies follow another ramp, values like queries and keys."""

    def mutate(net):
        omega, (_, v, scale) = ramp(net.config, kept(net.config)), positions(net.config)
        put(net, omega, omega if net.config.yarn_values == "yarn" else v, scale)

    return mutate


def inverted(config):
    qk, _, _ = positions(config)
    plain = frequencies(config.head_dim, config.rope_theta, config.block_size, 1.0)
    s = config.factor
    share = [(w / p - 1 / s) / (1 - 1 / s) for w, p in zip(qk, plain, strict=True)]
    return lambda m, turns: 1 - share[m]


def linear_in_turns(config):
    return lambda m, turns: (turns - 1) / (32 - 1)


def over_the_target_length(config):
    fast, slow = (bound(config, turns / config.factor) for turns in (32, 1))
    low, high = max(math.floor(fast), 0), math.ceil(slow)
    return lambda m, turns: (high - m) / (high - low)


def unclamped(config):
    low, high = math.floor(bound(config, 32)), math.ceil(bound(config, 1))
    return lambda m, turns: (high - m) / (high - low)


def scaled(power):
    """A mutant whose scores take mscale to this power, not squared."""

    def mutate(net):
        qk, v, _ = positions(net.config)
        put(net, qk, v, temperature(net.config.factor) ** power / math.sqrt(net.config.head_dim))

    return mutate


def folded_into_shared_tables(net):
    """mscale in cos and sin, as usual for YaRN, and the values read the same tables."""
    qk, v, _ = positions(net.config)
    mscale = temperature(net.config.factor)
    put(net, qk, v, 1 / math.sqrt(net.config.head_dim), qk_gain=mscale, v_gain=mscale)


def values_times(multiple):
    """A mutant whose values turn this many times as fast; -1 is the flipped sign, 0 is RoPE."""

    def mutate(net):
        qk, v, scale = positions(net.config)
        put(net, qk, [multiple * omega for omega in v], scale)

    return mutate


def the_other_yarn_values(net):
    qk, _, scale = positions(net.config)
    c = net.config
    plain = frequencies(c.head_dim, c.rope_theta, c.block_size, 1.0)
    put(net, qk, plain if c.yarn_values == "yarn" else qk, scale)


def positions_in_bf16(net):
    put(net, *positions(net.config), dtype=torch.bfloat16)


POSITION_MUTANTS = {
    "sign flipped, R_(i-j)": (is_rove, values_times(-1)),
    "value frequencies doubled": (is_rove, values_times(2)),
    "values not rotated": (is_rove, values_times(0)),
    "the other reading of yarn_values": (is_both, the_other_yarn_values),
    "temperature on values": (is_both, folded_into_shared_tables),
    "temperature not squared": (is_yarn, scaled(1)),
    "temperature missing": (is_yarn, scaled(0)),
    "ramp inverted": (is_yarn, with_ramp(inverted)),
    "ramp linear in turns": (is_yarn, with_ramp(linear_in_turns)),
    "ramp over the target length": (is_yarn, with_ramp(over_the_target_length)),
    "ramp unclamped": (lambda c: is_yarn(c) and bound(c, 32) < 0, with_ramp(unclamped)),
    "positions in bf16": (lambda config: config.block_size > 256, positions_in_bf16),
    "all pairs slowed": (is_yarn, with_ramp(lambda config: lambda m, turns: 0)),
    "no pair slowed": (is_yarn, with_ramp(lambda config: lambda m, turns: 1)),
}


def concerned(mutants):
    return [
        pytest.param(config, mutate, id=f"{name}-{label(config)}")
        for name, (concerns, mutate) in mutants.items()
        for config in CONFIGS
        if concerns(config)
    ]


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_the_harness_itself_is_no_mutant(config):
    net = lively(config)
    assert error(net, *sizes(config)) < TOLERANCE
    put(net, *positions(config))
    assert error(net, *sizes(config)) < TOLERANCE


@pytest.mark.parametrize("config, mutate", concerned(POSITION_MUTANTS))
def test_the_oracle_sees_mutants_of_positions(config, mutate):
    net = lively(config)
    mutate(net)
    assert error(net, *sizes(config)) > FAR


# ------------------------------------------------------------- mutants of attention


def neighbours(x, cos, sin):
    """`rotate` for the other pairing, (2m, 2m + 1)."""
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(-2)


def attention(
    inverse=True,
    forth=model.rotate,
    back=model.rotate,
    keys=model.rotate,
    cached_unrotated=False,
    top_left=False,
):
    """CausalSelfAttention.forward once more, with a switch for each slip."""

    def forward(self, x, pos, cache):
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = model.rotate(q, *pos.qk), keys(k, *pos.qk)
        turned = forth(v, *pos.v) if self.rotates_values else v
        fresh = turned
        if cache is not None:
            k, turned = cache.append(self.layer, k, v if cached_unrotated else turned)
        past = k.shape[2] - T
        if cached_unrotated:  # new tokens are right in their own call, and wrong ever after
            turned = torch.cat((turned[:, :, :past], fresh), dim=2)
        mask = torch.ones(T, past + T, dtype=torch.bool).tril(0 if top_left else past)
        y = F.scaled_dot_product_attention(q, k, turned, mask, scale=pos.scale)
        if self.rotates_values and inverse:
            cos, sin = pos.v
            y = back(y, cos, -sin)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))

    return forward


ATTENTION_MUTANTS = {
    "inverse missing": (is_rove, attention(inverse=False)),
    "inverse turns on": (is_rove, attention(back=lambda y, cos, sin: model.rotate(y, cos, -sin))),
    "values paired by neighbours": (is_rove, attention(forth=neighbours, back=neighbours)),
    "output paired by neighbours": (is_rove, attention(back=neighbours)),
    "values not rotated, outputs are": (is_rove, attention(forth=lambda v, cos, sin: v)),
    "keys paired by neighbours": (lambda config: True, attention(keys=neighbours)),
    "keys not rotated": (lambda config: True, attention(keys=lambda k, cos, sin: k)),
}
CACHE_MUTANTS = {
    "values cached unrotated": (is_rove, attention(cached_unrotated=True)),
    "mask aligned to the top left": (lambda config: True, attention(top_left=True)),
}


def cached_error(net):
    """As `error`, the text read through a KV cache in three chunks and a bit."""
    B, T = sizes(net.config)
    got = chunked(net, ids(net.config, B, T), (T - 1) // 3)
    return (got.double() - expected(net.config, B, T)).abs().max().item()


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_the_second_attention_is_no_mutant(config, monkeypatch):
    net = lively(config)
    assert cached_error(net) < TOLERANCE
    monkeypatch.setattr(model.CausalSelfAttention, "forward", attention())
    assert error(net, *sizes(config)) < TOLERANCE
    assert cached_error(net) < TOLERANCE


@pytest.mark.parametrize("config, forward", concerned(ATTENTION_MUTANTS))
def test_the_oracle_sees_mutants_of_attention(config, forward, monkeypatch):
    monkeypatch.setattr(model.CausalSelfAttention, "forward", forward)
    assert error(lively(config), *sizes(config)) > FAR


@pytest.mark.parametrize("config, forward", concerned(CACHE_MUTANTS))
def test_the_oracle_sees_mutants_of_the_cache(config, forward, monkeypatch):
    monkeypatch.setattr(model.CausalSelfAttention, "forward", forward)
    net = lively(config)
    assert error(net, *sizes(config)) < TOLERANCE  # one pass does not show it
    assert cached_error(net) > FAR


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_the_oracle_sees_positions_that_restart_with_each_chunk(config, monkeypatch):
    net = lively(config)
    real = net.tables.at
    monkeypatch.setattr(net.tables, "at", lambda start, stop, device: real(0, stop - start, device))
    assert error(net, *sizes(config)) < TOLERANCE
    assert cached_error(net) > FAR


# ------------------------------------------------------------- what weaker properties do not see


@pytest.mark.parametrize("multiple", [-1, 2, 0], ids=["flipped", "doubled", "rope"])
def test_weak_properties_let_wrong_value_rotations_pass(multiple):
    """Shift invariance, the first token's value, attention on the diagonal and kept norms hold for
    R_(i-j), for doubled frequencies and for RoPE; the definition tells each of them from RoVE."""

    def mutant(net):
        values_times(multiple)(net)
        return net

    net = mutant(lively(wide("rove")))
    idx = ids(net.config, 1, 100)
    with torch.no_grad():
        near, far = (net(idx, pos_offset=offset)[0] for offset in (0, 1000))
    assert (near - far).abs().max() < TOLERANCE
    *_, v, y = inside(net, idx)
    assert (y[:, :, 0] - v[:, :, 0]).abs().max() < 1e-5
    *_, v, y = inside(mutant(bare(torch.eye(64)[:32], query=8000.0)), torch.arange(32)[None])
    assert (y - v).abs().max() < 1e-5
    assert error(mutant(lively(wide("rove"))), 1, 1100) > FAR


def test_the_law_of_uniform_attention_needs_its_angle_to_see_the_sign():
    """The flipped sign has the norms of RoVE; doubled frequencies and RoPE have not."""
    row, idx = torch.ones(1, 64), torch.zeros(1, 50, dtype=torch.long)
    *_, want = inside(bare(row), idx)
    for multiple, same_norms in ((-1, True), (2, False), (0, False)):
        net = bare(row)
        values_times(multiple)(net)
        *_, y = inside(net, idx)
        difference = (pairs(y).abs() - pairs(want).abs()).abs().max()
        assert difference < 1e-5 if same_norms else difference > 0.1
        assert (pairs(y) - pairs(want)).abs().max() > 0.1
