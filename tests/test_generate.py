"""The KV cache against one pass and against the oracle, and generate against plain loops."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
from oracle import CASES, TOLERANCE, chunked, expected, ids, lively, small, wide
from torch.nn import functional as F

import model
from model import GPT, KVCache, sample_ids

SHORT = dict(n_layer=1, block_size=32)  # the window rules need no depth


def greedy(net, text, window=None):
    """The next id by full passes, at positions from 0, of the last `window` of a list of ids."""
    text = text if window is None else text[-window:]
    with torch.no_grad():
        return int(net(torch.tensor([text]))[0][0, -1].argmax())


def by_the_documented_rule(net, prompt, new, window):
    """generate's docstring in plain Python: crop an over-long prompt from the left; when more than
    the window is there to read, go on with its last half."""
    text, attended = list(prompt), list(prompt[-window:])
    for _ in range(new):
        if len(attended) > window:
            attended = attended[-(window // 2) :]
        token = greedy(net, attended)
        text.append(token)
        attended.append(token)
    return text


def quietly(net, *args, **kwargs):
    """generate without its notice about the window."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return net.generate(*args, **kwargs)


# ---------------------------------------------------------------- the cache (M11, S3)


@pytest.mark.parametrize("size", [1, 3, 7, 64])
@pytest.mark.parametrize("mode, values", CASES)
def test_chunked_prefill_equals_one_pass_and_the_oracle(mode, values, size):
    net = lively(small(mode, yarn_factor=4.0, yarn_values=values, bias=True))
    got = chunked(net, ids(net.config, 2, 64), size)
    with torch.no_grad():
        whole, _ = net(ids(net.config, 2, 64))
    assert (got - whole).abs().max() < TOLERANCE
    assert (got - expected(net.config, 2, 64)).abs().max() < TOLERANCE


@pytest.mark.parametrize("mode, values", CASES)
def test_uneven_chunks_across_the_block_and_the_table(mode, values):
    net = lively(wide(mode, 4.0, yarn_values=values))
    idx = ids(net.config, 1, 1100)
    cache = KVCache(net.config, 1100)
    with torch.no_grad():
        parts = idx.split([1, 1000, 23, 1, 75], dim=1)
        got = torch.cat([net.head(net.hidden(part, cache=cache)) for part in parts], dim=1)
    assert cache.length == 1100
    assert (got - expected(net.config, 1, 1100)).abs().max() < TOLERANCE


def test_a_cache_takes_the_models_dtype():
    net = lively(small("rove")).bfloat16()
    idx = ids(net.config, 2, 40)
    whole, _ = net(idx)
    assert (chunked(net, idx, 7) - whole).abs().max() < 0.1
    with torch.autocast("cpu", torch.bfloat16):
        net = lively(small("rove"))
        assert (chunked(net, idx, 7) - net(idx)[0]).abs().max() < 0.1


def test_a_cache_of_another_factor_is_refused():
    net = lively(small("rove+yarn"))
    idx, cache = ids(net.config, 1, 8), KVCache(net.config, 32)
    net.hidden(idx, cache=cache)
    net.set_yarn_factor(4.0)
    with pytest.raises(AssertionError, match="another config"):
        net.hidden(idx, cache=cache)


@pytest.mark.parametrize("size", [1, 2])
def test_a_full_cache_is_an_error(size):
    """Not tokens that are attended by nobody: a slice of length 0 takes a token without a word."""
    net = lively(small())
    cache = KVCache(net.config, 4)
    net.hidden(ids(net.config, 1, 4), cache=cache)
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        net.hidden(ids(net.config, 1, size), cache=cache)


@pytest.mark.parametrize("mode, values", CASES)
def test_200_cached_steps_equal_full_passes(mode, values, monkeypatch):
    net = lively(small(mode, yarn_factor=8.0, yarn_values=values))
    seen = []

    def spy(logits, **settings):
        seen.append(logits.clone())
        return sample_ids(logits, **settings)

    monkeypatch.setattr(model, "sample_ids", spy)
    text = net.generate(ids(net.config, 1, 10), 200, temperature=0)
    assert text.shape == (1, 210) and len(seen) == 200
    with torch.no_grad():
        whole, _ = net(text)
    assert (torch.stack(seen, dim=1) - whole[:, 9:-1]).abs().max() < TOLERANCE
    assert torch.equal(whole[:, 9:-1].argmax(-1), text[:, 10:])
    assert len(set(text[0, 10:].tolist())) > 5  # no fixed point, which would prove little


# ---------------------------------------------------------------- the window (S4)


@pytest.mark.parametrize("mode", ["rope", "rove", "rove+yarn"])
@pytest.mark.parametrize("prompt, window", [(10, "auto"), (10, 9), (50, "auto"), (3, 2), (64, 33)])
def test_generation_past_the_window_follows_the_documented_rule(mode, prompt, window):
    net = lively(small(mode, **SHORT))
    start, new = ids(net.config, 1, prompt), 3 * 32
    with pytest.warns(UserWarning, match="window"):
        got = net.generate(start, new, temperature=0, max_context=window)
    rule = by_the_documented_rule(net, start[0].tolist(), new, 32 if window == "auto" else window)
    assert got.tolist() == [rule]


def test_the_window_grows_with_the_factor():
    net = lively(small("rove+yarn", **SHORT))
    net.set_yarn_factor(2.5)
    start = ids(net.config, 1, 10)
    with pytest.warns(UserWarning, match="80"):
        got = net.generate(start, 100, temperature=0)
    assert got.tolist() == [by_the_documented_rule(net, start[0].tolist(), 100, 80)]


def test_without_a_window_nothing_is_cropped():
    net = lively(small(**SHORT))
    start = ids(net.config, 1, 50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = net.generate(start, 60, temperature=0, max_context=None)
    assert got.tolist() == [by_the_documented_rule(net, start[0].tolist(), 60, 1000)]


def test_the_window_warns_only_when_it_is_outgrown():
    net = lively(small(**SHORT))
    start = ids(net.config, 1, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net.generate(start, 23, temperature=0)  # the 33rd token is written, never read
    with pytest.warns(UserWarning, match="window of 32"):
        net.generate(start, 24, temperature=0)
    with pytest.warns(UserWarning, match="cropped"):
        got = net.generate(ids(net.config, 1, 40), 1, temperature=0)
    assert got[0, :40].tolist() == ids(net.config, 1, 40)[0].tolist()  # cropped, yet returned whole


def test_the_warning_points_at_the_caller():
    net = lively(small(**SHORT))
    with pytest.warns(UserWarning) as caught:
        net.generate(ids(net.config, 1, 40), 1)
    assert caught[0].filename == __file__


# ---------------------------------------------------------------- batches (S5)


@pytest.mark.parametrize("block_size", [64, 32])
@pytest.mark.parametrize("mode, values", CASES)
def test_prompts_of_3_10_and_40_in_one_batch_equal_their_single_runs(mode, values, block_size):
    config = small(mode, yarn_values=values, block_size=block_size, yarn_factor=1.0)
    net, lengths = lively(config), [3, 10, 40]
    prompts = ids(config, 3, 40)
    alone = [quietly(net, prompts[b : b + 1, :n], 30, temperature=0) for b, n in enumerate(lengths)]
    for b, n in enumerate(lengths):
        prompts[b, n:] = 96  # padding that attention must not see
    got = quietly(net, prompts, 30, temperature=0, prompt_lengths=lengths)
    assert got.shape == (3, 70)
    for row, n, single in zip(got, lengths, alone, strict=True):
        assert row[: n + 30].tolist() == single[0].tolist()
        assert row[n + 30 :].tolist() == [0] * (40 - n)


def test_prompt_lengths_as_a_tensor_and_shorter_than_the_padding():
    net = lively(small())
    prompts = ids(net.config, 2, 20)
    got = net.generate(prompts, 5, temperature=0, prompt_lengths=torch.tensor([4, 9]))
    assert got.shape == (2, 14)
    for b, n in enumerate((4, 9)):
        want = by_the_documented_rule(net, prompts[b, :n].tolist(), 5, window=32)
        assert got[b, : n + 5].tolist() == want


@pytest.mark.parametrize("lengths", [[], [1], [0, 3], [3, 6], [-1, 2]])
def test_wrong_prompt_lengths_are_refused(lengths):
    net = lively(small())
    with pytest.raises(ValueError, match="prompt_lengths"):
        net.generate(ids(net.config, 2, 5), 1, prompt_lengths=lengths)


# ---------------------------------------------------------------- stopping


def test_stop_ids_end_a_row_and_then_the_batch():
    net = lively(small())
    prompts, lengths = ids(net.config, 3, 12), [3, 7, 12]
    full = [
        net.generate(prompts[b : b + 1, :n], 18, temperature=0)[0].tolist()
        for b, n in enumerate(lengths)
    ]
    stops = [full[0][3 + 2], full[1][7 + 5], full[2][12 + 1]]
    got = net.generate(prompts, 18, temperature=0, stop_ids=stops, prompt_lengths=lengths)
    ends = []
    for b, n in enumerate(lengths):
        new = full[b][n:]
        ends.append(n + 1 + min(i for i, token in enumerate(new) if token in stops))
        assert got[b, : ends[b]].tolist() == full[b][: ends[b]]  # the stop id itself included
        assert got[b, ends[b] :].tolist() == [stops[0]] * (got.shape[1] - ends[b])
    assert got.shape[1] == max(ends) < 30  # stopped early, all three


def test_a_batch_ends_when_no_row_has_anything_left_to_write():
    """A short row runs out of new tokens, the long one stops: no column of padding follows."""
    net = lively(small())
    prompts = ids(net.config, 2, 12)
    first = net.generate(prompts[1:], 1, temperature=0)[0, 12].item()
    short = net.generate(prompts[:1, :3], 5, temperature=0)[0].tolist()
    assert first not in short[3:]
    got = net.generate(prompts, 5, temperature=0, stop_ids=[first], prompt_lengths=[3, 12])
    assert got.tolist() == [short + [first] * 5, prompts[1].tolist() + [first]]


def test_a_stop_id_in_the_prompt_does_not_stop():
    net = lively(small())
    start = ids(net.config, 1, 8)
    full = net.generate(start, 20, temperature=0)
    absent = next(t for t in start[0].tolist() if t not in full[0, 8:].tolist())
    assert torch.equal(net.generate(start, 20, temperature=0, stop_ids=[absent]), full)


def test_nothing_but_stop_ids_stops_early():
    net = lively(small())
    got = net.generate(ids(net.config, 2, 5), 25, seed=0)
    assert got.shape == (2, 30)


def test_no_new_tokens():
    net = lively(small())
    start = ids(net.config, 2, 20)
    assert torch.equal(net.generate(start, 0), start)
    assert torch.equal(net.generate(start, 0, stop_ids=[5]), start)
    got = net.generate(start, 0, stop_ids=[5], prompt_lengths=[3, 9])
    assert got.tolist() == [start[0, :3].tolist() + [5] * 6, start[1, :9].tolist()]


# ---------------------------------------------------------------- drawing (S1, S2)


def test_every_id_is_below_vocab_size():
    """S1: 10,000 ids at temperature 2 from an untrained model whose padded rows would all win."""
    torch.manual_seed(0)
    net = GPT(small(vocab_size=257, **SHORT)).eval()
    with torch.no_grad():
        net.transformer.wte.weight[257:] = 50.0 * net.transformer.wte.weight[:1].sign()
    start = torch.zeros(100, 1, dtype=torch.long)
    for temperature in (2.0, 0.0):
        got = quietly(net, start, 100, temperature=temperature, seed=1)
        assert got.shape == (100, 101) and got.min() >= 0 and got.max() < 257
        assert temperature == 0 or len(got.unique()) == 257


def test_temperature_0_is_greedy_and_repeatable():
    net = lively(small())
    start = ids(net.config, 2, 8)
    first = net.generate(start, 20, temperature=0)
    torch.manual_seed(5)
    assert torch.equal(net.generate(start, 20, temperature=0, top_k=3, top_p=0.1), first)
    assert [by_the_documented_rule(net, row.tolist(), 20, 32) for row in start] == first.tolist()


def test_top_k_and_top_p_that_are_off():
    net = lively(small())
    start = ids(net.config, 2, 8)
    free = net.generate(start, 20, seed=3)
    for off in (dict(top_k=10**6), dict(top_k=0), dict(top_p=1.0), dict(top_k=97, top_p=None)):
        assert torch.equal(net.generate(start, 20, seed=3, **off), free)
    assert torch.equal(net.generate(start, 20, top_k=1), net.generate(start, 20, temperature=0))
    tiny = net.generate(start, 20, top_p=1e-6)
    assert torch.equal(tiny, net.generate(start, 20, temperature=0))


@pytest.mark.parametrize(
    "setting",
    [
        dict(temperature=-0.1),
        dict(temperature=math.nan),
        dict(temperature=math.inf),
        dict(top_k=-1),
        dict(top_p=-0.5),
        dict(top_p=0.0),
        dict(top_p=1.5),
        dict(max_new_tokens=-1),
        dict(max_context=1),
        dict(max_context=-8),
    ],
    ids=str,
)
def test_impossible_settings_are_one_line_errors(setting):
    net = lively(small())
    with pytest.raises(ValueError, match=f"^{next(iter(setting))}=.*must be") as refused:
        net.generate(ids(net.config, 1, 4), **{"max_new_tokens": 2, **setting})
    assert "\n" not in str(refused.value)


def draws(logits, n=20000, **settings):
    """Shares of n draws, (V,)."""
    rng = torch.Generator().manual_seed(0)
    settings = {"temperature": 1.0, "top_k": None, "top_p": None, **settings}
    got = sample_ids(torch.tensor([logits]).expand(n, -1), rng=rng, **settings)
    return torch.bincount(got, minlength=len(logits)) / n


@pytest.mark.parametrize(
    "settings, want",
    [
        (dict(), [0.1, 0.4, 0.2, 0.3]),
        (dict(top_k=1), [0, 1, 0, 0]),
        (dict(top_k=2), [0, 4 / 7, 0, 3 / 7]),
        (dict(top_k=3), [0, 4 / 9, 2 / 9, 3 / 9]),
        (dict(top_p=0.35), [0, 1, 0, 0]),
        (dict(top_p=0.45), [0, 4 / 7, 0, 3 / 7]),
        (dict(top_p=0.65), [0, 4 / 7, 0, 3 / 7]),
        (dict(top_p=0.75), [0, 4 / 9, 2 / 9, 3 / 9]),
        (dict(top_p=0.95), [0.1, 0.4, 0.2, 0.3]),
        (dict(top_k=2, top_p=0.55), [0, 1, 0, 0]),  # 4/7 of the two reaches it
        (dict(temperature=0.5), [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        (dict(temperature=0.5, top_p=0.55), [0, 16 / 25, 0, 9 / 25]),  # heat first, then mass
        (dict(temperature=0.5, top_p=0.5), [0, 1, 0, 0]),
        (dict(temperature=1e-4), [0, 1, 0, 0]),
        (dict(temperature=0), [0, 1, 0, 0]),
    ],
    ids=str,
)
def test_draws_on_known_logits(settings, want):
    got = draws(torch.tensor([0.1, 0.4, 0.2, 0.3]).log().tolist(), **settings)
    assert (got - torch.tensor(want)).abs().max() < 0.015
    assert all((share > 0) == (w > 0) for share, w in zip(got.tolist(), want, strict=True))


def test_the_fewest_ids_that_reach_top_p_exactly():
    assert (draws([0.0, 0.0], n=500, top_p=0.5) > 0).sum() == 1


def test_top_k_keeps_k_ids_of_a_tie():
    """bf16 logits tie often: top_k 1 is to be greedy, of four equals two are to be drawn."""
    assert (draws([1.0, 1.0, 0.0, 1.0, 1.0], n=500, top_k=2) > 0).sum() == 2
    assert (draws([0.0, 1.0, 1.0, 0.0], n=500, top_k=1) > 0).sum() == 1


def test_a_seed_repeats_the_text_and_leaves_the_global_generator_alone():
    net = lively(small())
    start = ids(net.config, 2, 8)
    torch.manual_seed(11)
    state = torch.get_rng_state()
    first = net.generate(start, 20, seed=3)
    net.generate(start, 5, temperature=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(net.generate(start, 20, seed=3), first)
    assert not torch.equal(net.generate(start, 20, seed=4), first)
    assert not torch.equal(net.generate(start, 20), net.generate(start, 20))  # the global one
    assert not torch.equal(torch.get_rng_state(), state)


def test_the_mode_the_weights_and_the_prompt_are_left_as_they_were():
    net = lively(replace(small(), dropout=0.5))
    start = ids(net.config, 1, 8)
    before, weights = start.clone(), {k: v.clone() for k, v in net.state_dict().items()}
    calm = net.generate(start, 20, temperature=0)
    assert not net.training
    net.train()
    assert torch.equal(net.generate(start, 20, temperature=0), calm)  # no dropout while it writes
    assert net.training and all(module.training for module in net.modules())
    assert not calm.requires_grad and torch.equal(start, before)
    assert all(torch.equal(v, net.state_dict()[k]) for k, v in weights.items())


def test_the_mode_is_restored_when_generation_fails():
    net = lively(small()).train()
    with pytest.raises(IndexError):
        net.generate(torch.tensor([[5000]]), 2)
    assert net.training


def test_generation_reads_each_token_once(monkeypatch):
    """The cache is used: a prompt of 10 and 20 new ids cost 29 rows of attention, not 390."""
    net, rows = lively(small(**SHORT)), []
    real = F.scaled_dot_product_attention

    def spy(q, *args, **kwargs):
        rows.append(q.shape[2])
        return real(q, *args, **kwargs)

    monkeypatch.setattr(model.F, "scaled_dot_product_attention", spy)
    net.generate(ids(net.config, 1, 10), 20, temperature=0)
    assert rows == [10] + [1] * 19
