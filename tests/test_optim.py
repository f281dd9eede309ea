"""An update of the weights, against AdamW and clipping written out in float64."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from rove import device as dev
from rove.optim import make_optimizer, update

CPU = torch.device("cpu")
SETTINGS = SimpleNamespace(lr=1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1)


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def gradients_of(net, size, generator):
    """Return gradients of a norm of about `size`, float64, by name."""
    named = dict(net.named_parameters())
    count = sum(p.numel() for p in named.values())
    draw = {n: torch.randn(p.shape, generator=generator).double() for n, p in named.items()}
    return {name: g * size / math.sqrt(count) for name, g in draw.items()}


def written_out(weights, moments, grads, step, lr, clip):
    """Return the weights and moments after AdamW's step, all float64 by name."""
    norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
    factor = min(1.0, clip / norm) if clip else 1.0
    for name, w in weights.items():
        first, second = moments[name]
        first += 0.1 * (grads[name] * factor - first)
        second += 0.05 * ((grads[name] * factor).square() - second)
        unbiased = first / (1 - 0.9**step), second / (1 - 0.95**step)
        w -= lr * (0.1 if w.dim() >= 2 else 0.0) * w
        w -= lr * unbiased[0] / (unbiased[1].sqrt() + 1e-8)
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_updates_are_those_written_out(dtype, clip):
    net, generator = small_net(), torch.Generator().manual_seed(1)
    optimizer, scaler = make_optimizer(net, SETTINGS), dev.make_scaler(CPU, dtype)
    weights = {name: p.detach().double().clone() for name, p in net.named_parameters()}
    moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}
    for step, size in enumerate([0.2, 7.0, 0.9, 30.0, 1.1], start=1):
        grads, lr = gradients_of(net, size, generator), 1e-2 / step
        scale = float(scaler.scale(torch.ones(())))
        for name, p in net.named_parameters():
            p.grad = (grads[name] * scale).float()
        norm = update(optimizer, scaler, lr, clip)
        assert float(norm) == pytest.approx(written_out(weights, moments, grads, step, lr, clip))
        assert all(p.grad is None for p in net.parameters())
        for name, p in net.named_parameters():
            torch.testing.assert_close(p.double(), weights[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_without_a_gradient_stay_and_nothing_is_left_for_the_next_step(dtype):
    net = small_net()
    optimizer, scaler = make_optimizer(net, SETTINGS), dev.make_scaler(CPU, dtype)
    before = net[2].weight.detach().clone()
    for size in (math.nan, 1e4):  # one skipped, one clipped
        scaler.scale(torch.ones(()))
        net[0].weight.grad = torch.full_like(net[0].weight, size)
        update(optimizer, scaler, 1e-2, 1.0)
    assert torch.equal(net[2].weight, before) and not optimizer.state[net[2].weight]
    other = make_optimizer(small_net(), SETTINGS)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    weights = [group["params"][0] for group in (*optimizer.param_groups, *other.param_groups)]
    weights[2].data.copy_(weights[0].data)
    for plain in (optimizer, other):
        plain.param_groups[0]["params"][0].grad = torch.ones_like(weights[0])
        plain.step()
    assert torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_an_update_that_is_not_finite_changes_nothing(bad, dtype, clip):
    net, generator = small_net(), torch.Generator().manual_seed(1)
    optimizer, scaler = make_optimizer(net, SETTINGS), dev.make_scaler(CPU, dtype)

    def step(broken):
        scaler.scale(torch.ones(()))
        for name, grad in gradients_of(net, 1.0, generator).items():
            net.get_parameter(name).grad = grad.float()
        if broken:
            net[2].weight.grad[1, 2] = bad
        return update(optimizer, scaler, 1e-2, clip)

    def state():
        return [w for p in net.parameters() for w in (p.detach(), *optimizer.state[p].values())]

    step(False)
    before = [tensor.clone() for tensor in state()]
    assert not step(True).isfinite()
    assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
    assert step(False).isfinite()  # and the next one is made again
    assert not any(torch.equal(a, b) for a, b in zip(before, state(), strict=True))


def test_clipping_is_no_pass_of_its_own():
    net = small_net()
    optimizer, scaler = make_optimizer(net, SETTINGS), dev.make_scaler(CPU, torch.bfloat16)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    with torch.profiler.profile() as trace:
        update(optimizer, scaler, 1e-2, 1.0)
    names = {event.key for event in trace.key_averages()}
    assert {"aten::_foreach_norm", "aten::_fused_adamw_"} <= names
    assert not {"aten::_foreach_mul_", "aten::_amp_foreach_non_finite_check_and_unscale_"} & names


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_an_update_waits_for_nothing(clip):
    with FakeTensorMode():  # tensors without values: to ask for one is an error
        net = small_net()
        optimizer, scaler = make_optimizer(net, SETTINGS), dev.make_scaler(CPU, torch.bfloat16)
        for _ in range(2):
            for p in net.parameters():
                p.grad = torch.ones_like(p)
            norm = update(optimizer, scaler, 1e-2, clip)
        with pytest.raises(DataDependentOutputException):
            float(norm)
