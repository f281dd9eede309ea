"""What GPT-2 is apart from positions: loss, scores, head, initial weights, gradients, dropout."""

import math

import pytest
import torch
from oracle import CASES, MODES, TOLERANCE, error, expected, ids, lively, logits, small
from torch.nn import functional as F

import model
from model import GPT, GPTConfig


def naive_scores(net, idx, targets):
    """nll, is_argmax and rank (B, T) of the targets by the oracle's float64 logits and loops."""
    found = logits(net.state_dict(), net.config, idx).detach()
    nll, top, rank = [], [], []
    for row, target in zip(found.flatten(0, 1).tolist(), targets.flatten().tolist(), strict=True):
        largest = max(row)
        total = sum(math.exp(x - largest) for x in row)
        nll.append(math.log(total) + largest - row[target])
        top.append(row[target] == largest)
        rank.append(sum(x > row[target] for x in row))
    return [torch.tensor(part).view(targets.shape) for part in (nll, top, rank)]


# ---------------------------------------------------------------- loss and scores (E1)


@pytest.mark.parametrize("mode, values", CASES)
def test_loss_and_token_nll_equal_the_oracle(mode, values):
    net = lively(small(mode, yarn_factor=4.0, yarn_values=values))
    idx, targets = ids(net.config, 2, 48), ids(net.config, 2, 48, seed=1)
    want, _, _ = naive_scores(net, idx, targets)
    got = net.token_nll(idx, targets)
    assert got.shape == (2, 48) and got.dtype == torch.float32 and not got.requires_grad
    assert (got - want).abs().max() < TOLERANCE
    nothing, loss = net(idx, targets)
    assert nothing is None and loss.shape == () and loss.dtype == torch.float32
    assert abs(loss.item() - want.mean()) < 1e-5
    assert net(idx)[1] is None and net(idx)[0].shape == (2, 48, 97)


@pytest.mark.parametrize("B, T", [(1, 2047), (1, 2048), (1, 2049), (3, 1500)])
def test_token_nll_in_chunks_equals_one_piece(B, T, monkeypatch):
    net = lively(small(n_layer=1, n_head=1))
    idx, targets = ids(net.config, B, T), ids(net.config, B, T, seed=1)
    with torch.no_grad():
        whole = F.cross_entropy(net(idx)[0].transpose(1, 2), targets, reduction="none")
        loss = net(idx, targets)[1]
    got = net.token_nll(idx, targets)
    assert (got - whole).abs().max() < 1e-5
    assert abs(got.mean() - loss) < 1e-5
    monkeypatch.setattr(model, "HEAD_CHUNK", 7)
    assert (net.token_nll(idx, targets) - whole).abs().max() < 1e-5


def test_the_head_never_sees_more_than_a_chunk(monkeypatch):
    """Memory stays flat in T: neither token_nll nor score holds all logits."""
    net, rows = lively(small(n_layer=1, n_head=1)), []
    real = net.head

    def spy(x):
        rows.append(x.shape[:-1].numel())
        return real(x)

    monkeypatch.setattr(net, "head", spy)
    idx = ids(net.config, 2, 2500)
    net.token_nll(idx, idx)
    assert sum(rows) == 5000 and max(rows) <= 2048
    rows.clear()
    mask = torch.rand(2, 2500, generator=torch.Generator().manual_seed(0)) < 0.9
    net.score(idx, idx, mask)
    assert sum(rows) == mask.sum() and max(rows) <= 2048  # masked positions only


@pytest.mark.parametrize("chunk", [5, 2048])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_score_equals_plain_loops(share, chunk, monkeypatch):
    monkeypatch.setattr(model, "HEAD_CHUNK", chunk)
    net = lively(small(bias=True))
    idx, targets = ids(net.config, 2, 40), ids(net.config, 2, 40, seed=1)
    with torch.no_grad():
        targets[0] = net(idx[:1])[0][0].argmax(-1)  # so that some are the argmax
    mask = torch.rand(2, 40, generator=torch.Generator().manual_seed(0)) < share
    nll, top, rank = net.score(idx, targets, mask)
    assert (nll.dtype, top.dtype, rank.dtype) == (torch.float32, torch.bool, torch.int64)
    want_nll, want_top, want_rank = naive_scores(net, idx, targets)
    assert ((nll - want_nll)[mask].abs() < TOLERANCE).all()
    assert torch.equal(top[mask], want_top[mask]) and torch.equal(rank[mask], want_rank[mask])
    assert torch.equal(top[mask], rank[mask] == 0)
    assert (nll[~mask] == 0).all() and not top[~mask].any() and (rank[~mask] == -1).all()
    assert not nll.requires_grad


def test_loss_of_an_untrained_model_is_that_of_guessing():
    torch.manual_seed(0)
    for mode in MODES:
        net = GPT(small(mode, vocab_size=257, n_embd=64))
        idx = ids(net.config, 4, 32)
        assert abs(net(idx, ids(net.config, 4, 32, seed=1))[1].item() - math.log(257)) < 0.05


@pytest.mark.parametrize("mode", MODES)
def test_loss_does_not_depend_on_pos_offset(mode):
    net = lively(small(mode, yarn_factor=4.0))
    idx = ids(net.config, 2, 32)
    with torch.no_grad():
        losses = [net(idx, idx, pos_offset=offset)[1].item() for offset in (0, 1, 1000, 5000)]
    assert max(losses) - min(losses) < 1e-5


# ---------------------------------------------------------------- the head


def test_padded_rows_exist_nowhere():
    """257 ids take 320 rows; with NaN in the other 63 nothing that comes out may change."""
    net = lively(small(vocab_size=257))
    assert net.transformer.wte.weight.shape == (320, 16)
    idx, mask = ids(net.config, 2, 20), torch.ones(2, 20, dtype=torch.bool)

    def outcomes():
        out = [net(idx)[0], net(idx, idx)[1], net.token_nll(idx, idx), *net.score(idx, idx, mask)]
        return [*out, net.generate(idx, 8, seed=0), net.generate(idx, 8, temperature=0)]

    before = outcomes()
    assert before[0].shape == (2, 20, 257)
    with torch.no_grad():
        net.transformer.wte.weight[257:] = math.nan
    for one, other in zip(before, outcomes(), strict=True):
        assert torch.equal(one, other)
    net(idx, idx)[1].backward()
    assert (net.transformer.wte.weight.grad[257:] == 0).all()


@pytest.mark.parametrize("vocab_size, rows", [(64, 64), (65, 128), (50257, 50304)])
def test_rows_are_padded_to_a_multiple_of_64(vocab_size, rows):
    net = GPT(small(vocab_size=vocab_size))
    assert net.transformer.wte.num_embeddings == rows
    assert net(torch.zeros(1, 2, dtype=torch.long))[0].shape[-1] == vocab_size


def test_the_head_is_the_embedding():
    net = lively(small())
    idx = ids(net.config, 1, 8)
    x = net.hidden(idx)
    want = x.double() @ net.transformer.wte.weight[:97].double().T
    assert (net.head(x) - want).abs().max() < 1e-5
    with torch.no_grad():
        net.transformer.wte.weight *= 2.0  # also what is read: layer norm takes its factor out
    assert net(idx)[0].std() > 1.5 * want.std()


# ---------------------------------------------------------------- initial weights


def test_init_statistics():
    torch.manual_seed(0)
    net = GPT(small(vocab_size=2048, n_layer=3, n_head=4, n_embd=128, bias=True))
    for name, p in net.named_parameters():
        if p.dim() == 2:
            std = 0.02 / math.sqrt(2 * 3) if name.endswith("c_proj.weight") else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(p.mean().item()) < 5 * std / math.sqrt(p.numel()), name
        else:
            assert (p == (0 if name.endswith("bias") else 1)).all(), name


def test_the_same_seed_gives_the_same_weights_in_every_mode():
    states = []
    for mode in MODES:
        torch.manual_seed(7)
        states.append(GPT(small(mode, bias=True)).state_dict())
    for other in states[1:]:
        assert states[0].keys() == other.keys()
        assert all(torch.equal(states[0][name], other[name]) for name in other)


@pytest.mark.parametrize(
    "sizes, parameters",
    [(dict(), 123_587_328), (dict(n_layer=24, n_head=16, n_embd=1024), 353_551_360)],
)
def test_the_published_sizes(sizes, parameters):
    with torch.device("meta"):
        net = GPT(GPTConfig(**sizes))
    assert sum(p.numel() for p in net.parameters()) == parameters  # with 47 padded rows


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("mode, values", CASES)
def test_gradients_equal_autograd_through_the_oracle(mode, values):
    config = small(mode, yarn_factor=4.0, yarn_values=values, bias=True)
    net = lively(config).train()
    idx, targets = ids(config, 2, 20), ids(config, 2, 20, seed=1)
    net(idx, targets)[1].backward()
    state = {name: p.detach().double().requires_grad_() for name, p in net.named_parameters()}
    found = logits(state, config, idx).flatten(0, 1)
    chosen = found.log_softmax(-1)[torch.arange(len(found)), targets.flatten()]
    (-chosen.mean()).backward()
    for name, p in net.named_parameters():
        want = state[name].grad
        assert (p.grad - want).abs().max() < 1e-4 * want.abs().max(), name


def test_gradients_tell_rove_from_rope():
    grads = []
    for mode in ("rope", "rove"):
        net = lively(small(mode))
        idx = ids(net.config, 2, 20)
        net(idx, idx)[1].backward()
        grads.append(net.transformer.h[0].attn.c_attn.weight.grad[32:])  # of the values
    assert (grads[0] - grads[1]).abs().max() > 0.1 * grads[0].abs().max()


# ---------------------------------------------------------------- dropout, causality, config


def test_dropout_acts_in_training_only():
    config = small(dropout=0.3)
    net = lively(config)
    assert error(net, 2, 48) < TOLERANCE
    net.train()
    torch.manual_seed(0)
    first, second = net(ids(config, 2, 48))[0], net(ids(config, 2, 48))[0]
    assert (first - second).abs().max() > 0.1
    torch.manual_seed(0)
    assert torch.equal(net(ids(config, 2, 48))[0], first)


def test_dropout_stands_where_gpt_2_has_it(monkeypatch):
    """After the embedding, on attention weights, and after both projections of a block."""
    net, at = GPT(small(dropout=0.3)).train(), []
    dropout, attention = F.dropout, F.scaled_dot_product_attention

    def counting(real, place, key):
        def spy(*args, **kwargs):
            at.append(args[place] if len(args) > place else kwargs[key])
            return real(*args, **kwargs)

        return spy

    monkeypatch.setattr(model.F, "dropout", counting(dropout, 1, "p"))
    spy = counting(attention, 4, "dropout_p")
    monkeypatch.setattr(model.F, "scaled_dot_product_attention", spy)
    net(ids(net.config, 1, 8))
    assert at == [0.3] * (1 + 3 * 2)


@pytest.mark.parametrize("mode", MODES)
def test_no_token_sees_what_follows(mode):
    net = lively(small(mode, yarn_factor=4.0))
    idx = ids(net.config, 1, 40)
    changed = idx.clone()
    changed[0, 25:] = (changed[0, 25:] + 1) % 97
    with torch.no_grad():
        one, other = net(idx)[0], net(changed)[0]
    assert torch.equal(one[:, :25], other[:, :25])
    assert (one[:, 25:] - other[:, 25:]).abs().amax(-1).min() > 0.1


def test_rows_of_a_batch_do_not_mix():
    net = lively(small())
    want = expected(net.config, 2, 48)
    with torch.no_grad():
        alone = [net(row[None])[0][0] for row in ids(net.config, 2, 48)]
    assert (torch.stack(alone) - want).abs().max() < TOLERANCE


def test_bf16_and_autocast_stay_near_float32():
    net, idx = lively(small("rove+yarn", yarn_factor=4.0)), ids(small(), 2, 48)
    _, want = net(idx, idx)
    with torch.autocast("cpu", torch.bfloat16):
        assert net(idx)[0].dtype == torch.float32
        assert abs(net(idx, idx)[1] - want) < 0.05
        assert (net.token_nll(idx, idx).mean() - want).abs() < 0.05
    net.bfloat16()
    assert net(idx)[0].dtype == net(idx, idx)[1].dtype == torch.float32
    assert abs(net(idx, idx)[1] - want) < 0.05


@pytest.mark.parametrize(
    "key, value",
    [
        ("block_size", 0),
        ("vocab_size", 0),
        ("n_layer", 0),
        ("n_head", 0),
        ("n_head", 3),
        ("n_embd", 0),
        ("n_embd", 18),
        ("dropout", 1.0),
        ("dropout", -0.1),
        ("dropout", math.nan),
        ("pos_mode", "alibi"),
        ("rope_theta", 1.0),
        ("yarn_factor", 0.5),
        ("yarn_beta_slow", 0.0),
        ("yarn_beta_slow", 32.0),
        ("yarn_values", "none"),
    ],
)
def test_an_impossible_config_names_key_value_and_what_would_work(key, value):
    named = "n_embd" if key == "n_head" and value == 3 else key
    with pytest.raises(ValueError, match=f"^{named}=.*must be") as refused:
        small(**{key: value})
    assert "\n" not in str(refused.value)


def test_the_stored_config_is_of_plain_types_and_complete():
    config = small("rove+yarn", yarn_factor=4.0)
    stored = config.stored()
    assert {type(v) for v in stored.values()} <= {int, float, str, bool}
    assert stored.pop("rotary_pairing") == "halves"
    assert GPTConfig(**stored) == config
