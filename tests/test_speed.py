"""What must not creep in, whatever the machine: operations, whole logits. Times are in bench/."""

from collections import Counter

import pytest
import torch
from oracle import MODES, ids, lively, small
from torch.utils._python_dispatch import TorchDispatchMode

import model

ROPE_OPERATIONS = 41  # of a layer of rope at most, all of it
EXTRA_OPERATIONS = 10  # RoVE's own in a layer: sin negated, halves, four products, two sums, joined
APART_OPERATIONS = 20  # where values turn by other frequencies, in a pass of their own


class Recorded(TorchDispatchMode):
    """Notes the name and the outputs' shapes of every operation."""

    def __init__(self):
        super().__init__()
        self.names, self.shapes, self.dtypes, self.attention = Counter(), [], set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names[str(func)] += 1
        outputs = out if isinstance(out, tuple | list) else [out]
        tensors = [x for x in outputs if isinstance(x, torch.Tensor)]
        self.shapes += [tuple(x.shape) for x in tensors]
        self.dtypes |= {x.dtype for x in tensors}
        if "attention" in str(func):
            self.attention.append((args[0].dtype, (kwargs or {}).get("attn_mask")))
        return out


def operations(mode, **changes):
    """Operations of a forward pass of two layers, by name."""
    net = lively(small(mode, **changes))
    idx = ids(net.config, 2, 16)
    with torch.no_grad(), Recorded() as recorded:
        net.hidden(idx)
    return recorded.names


def test_rove_adds_one_rotation_a_layer_to_rope():
    rope, rove = operations("rope"), operations("rove")
    assert rope.total() / 2 <= ROPE_OPERATIONS, rope
    added = (rove.total() - rope.total()) / 2
    assert 0 < added <= EXTRA_OPERATIONS, (added, rove - rope)
    apart = operations("rove+yarn", yarn_factor=4.0, yarn_values="orig")
    assert 0 < (apart.total() - rope.total()) / 2 <= APART_OPERATIONS, apart - rope
    products = [name for name in rove if "mm" in name or "attention" in name]
    assert products and all(rove[name] == rope[name] for name in products)


@pytest.mark.parametrize("mode", ["rope", "rove"])
def test_yarn_adds_no_operation(mode):
    assert operations(f"{mode}+yarn", yarn_factor=4.0) == operations(mode)


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_by_token_never_holds_whole_logits(mode, monkeypatch):
    monkeypatch.setattr(model, "HEAD_CHUNK", 8)
    net = lively(small(mode))
    idx = ids(net.config, 1, 64)
    with Recorded() as recorded:
        net.token_nll(idx, idx)
        net.score(idx, idx, torch.ones_like(idx, dtype=torch.bool))
    columns = (net.config.vocab_size, net.transformer.wte.weight.shape[0])
    rows = {shape[0] for shape in recorded.shapes if shape[-1:] and shape[-1] in columns}
    assert rows == {8, net.config.n_embd}, "8 positions at once, and the head's weights"


@pytest.mark.parametrize("mode", MODES)
def test_under_autocast_attention_is_bf16_and_causal_by_its_flag_and_nothing_is_fp64(mode):
    net = lively(small(mode))
    idx = ids(net.config, 2, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Recorded() as recorded:
        net.hidden(idx)
    assert [seen for seen in recorded.attention] == [(torch.bfloat16, None)] * 2
    assert torch.float64 not in recorded.dtypes


@pytest.mark.parametrize("mode", MODES)
def test_no_graph_break_under_autocast(mode):
    net = lively(small(mode))
    idx = ids(net.config, 2, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want = net(idx)[0]
        net.compile(fullgraph=True, backend="eager")
        assert torch.equal(net(idx)[0], want)


def test_the_head_sees_few_positions_at_once():
    assert model.HEAD_CHUNK <= 2048
