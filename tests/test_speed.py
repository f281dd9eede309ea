"""What must not creep in, whatever the machine: operations, whole logits. Times are in bench/."""

from collections import Counter

import pytest
import torch
from oracle import MODES, ids, lively, small
from torch.utils._python_dispatch import TorchDispatchMode

import model

EXTRA_OPERATIONS = 16  # RoVE's own in a layer: sin negated, casts, four products, sums, halves


class Recorded(TorchDispatchMode):
    """Notes the name and the outputs' shapes of every operation."""

    def __init__(self):
        super().__init__()
        self.names, self.shapes = Counter(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names[str(func)] += 1
        outputs = out if isinstance(out, tuple | list) else [out]
        self.shapes += [tuple(x.shape) for x in outputs if isinstance(x, torch.Tensor)]
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
    added = (rove.total() - rope.total()) / 2
    assert 0 < added <= EXTRA_OPERATIONS, rove - rope
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
