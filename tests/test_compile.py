"""torch.compile: one graph in every mode, real arithmetic, the values of eager mode.

All but one test use backends that trace and then run eagerly; inductor compiles once.
"""

import shutil

import pytest
import torch
from oracle import CASES, MODES, TOLERANCE, error, expected, ids, lively, small

from model import GPT


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Recorder:
    """A backend that keeps the graphs it is given and runs them eagerly."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph.forward

    def nodes(self):
        return [node for graph in self.graphs for node in graph.graph.nodes]


@pytest.mark.parametrize("mode, values", CASES)
def test_each_mode_is_one_graph_without_complex_numbers(mode, values):
    net, recorder = lively(small(mode, yarn_factor=4.0, yarn_values=values)), Recorder()
    idx = ids(net.config, 2, 48)
    compiled = torch.compile(net, fullgraph=True, backend=recorder)
    with torch.no_grad():
        got, _ = compiled(idx)
    assert (got - expected(net.config, 2, 48)).abs().max() < TOLERANCE
    assert len(recorder.graphs) == 1
    values = [node.meta.get("example_value") for node in recorder.nodes()]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    assert len(tensors) > 20 and not any(t.is_complex() for t in tensors)
    assert not any("complex" in str(n.target) or "polar" in str(n.target) for n in recorder.nodes())


@pytest.mark.parametrize("mode", MODES)
def test_loss_and_gradients_through_aot_equal_eager(mode):
    net = lively(small(mode, yarn_factor=4.0)).train()
    idx, targets = ids(net.config, 2, 32), ids(net.config, 2, 32, seed=1)
    net(idx, targets)[1].backward()
    want = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    _, loss = torch.compile(net, fullgraph=True, backend="aot_eager")(idx, targets)
    loss.backward()
    assert abs(loss - net(idx, targets)[1]) < 1e-5
    for name, p in net.named_parameters():
        assert (p.grad - want[name]).abs().max() < 1e-5, name


def test_inductor_gives_the_loss_of_eager():
    if not any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++")):
        pytest.skip("inductor needs a C++ compiler, and none is on the PATH")
    net = lively(small("rove", n_layer=1)).train()
    idx, targets = ids(net.config, 2, 32), ids(net.config, 2, 32, seed=1)
    _, want = net(idx, targets)
    net.compile(fullgraph=True)
    _, got = net(idx, targets)
    assert abs(got - want) < 1e-4
    got.backward()
    compiled = net.transformer.h[0].attn.c_attn.weight.grad.clone()
    net.zero_grad()
    want.backward()
    assert (compiled - net.transformer.h[0].attn.c_attn.weight.grad).abs().max() < 1e-4


@pytest.mark.parametrize("mode", MODES)
def test_compiling_in_place_keeps_the_names_of_the_weights(mode):
    plain, net = lively(small(mode)), lively(small(mode), seed=1)
    net.compile(backend="eager")
    idx = ids(net.config, 2, 48)
    net(idx)
    assert net.state_dict().keys() == plain.state_dict().keys()
    assert dict(net.named_parameters()).keys() == plain.state_dict().keys()
    net.load_state_dict(plain.state_dict(), strict=True)
    assert error(net, 2, 48) < TOLERANCE  # the graph reads the new weights
    saved = {"model_config": net.config.stored(), "model": net.state_dict()}
    assert error(GPT.from_checkpoint(saved), 2, 48) < TOLERANCE


@pytest.mark.parametrize("mode", ["rope", "rove+yarn"])
def test_growth_under_compile_gives_the_values_of_eager(mode):
    net, eager = (lively(small(mode, yarn_factor=4.0)) for _ in range(2))
    net.compile(backend="eager")
    for T in (48, 1100, 48, 2100):  # the tables begin with 1024 rows
        idx = ids(net.config, 1, T)
        with torch.no_grad():
            assert (net(idx)[0] - eager(idx)[0]).abs().max() < 1e-5
    assert error(net, 2, 48) < TOLERANCE


def test_no_new_graph_for_every_length():
    """Perplexity by length: the second length makes a graph of any length, and no graph breaks."""
    net, recorder = lively(small("rove")), Recorder()
    compiled = torch.compile(net, fullgraph=True, backend=recorder)
    with torch.no_grad():
        for T in range(20, 40):
            compiled(ids(net.config, 2, T))
    assert len(recorder.graphs) == 2


def test_training_steps_share_one_graph():
    net, recorder = lively(small("rove")).train(), Recorder()
    net.compile(fullgraph=True, backend=recorder)
    for seed in range(4):
        idx = ids(net.config, 2, 32, seed=seed)
        net(idx, idx)[1].backward()
    assert len(recorder.graphs) == 1


@pytest.mark.parametrize("values", ["yarn", "orig"])
def test_set_yarn_factor_after_compile_takes_effect(values):
    net = lively(small("rove+yarn", yarn_values=values))
    net.compile(fullgraph=True, backend="eager")
    assert error(net, 2, 48) < TOLERANCE
    for factor in (4.0, 16.0, 1.0):
        net.set_yarn_factor(factor)
        assert error(net, 2, 48) < TOLERANCE


def test_compiled_models_generate():
    net, eager = lively(small("rove")), lively(small("rove"))
    net.compile(backend="eager")
    start = ids(net.config, 2, 8)
    want = eager.generate(start, 20, temperature=0)
    assert torch.equal(net.generate(start, 20, temperature=0), want)


def test_one_graph_on_another_device():
    """A GPU's first compiled call, and the first after set_yarn_factor: tables that still wait on
    the CPU must not break the graph. The meta device stands for the GPU."""
    net = GPT(small("rove+yarn")).to("meta")
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    idx = torch.zeros(2, 32, dtype=torch.long, device="meta")
    assert compiled(idx)[0].shape == (2, 32, 97)
    net.set_yarn_factor(4.0)
    assert compiled(idx)[0].shape == (2, 32, 97)
