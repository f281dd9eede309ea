"""GPT-2's own positions: the mode `learned`, OpenAI's weights, and runs that start from weights."""

import json
from pathlib import Path

import pytest
import torch
from helpers import make_data, refused, run_script, tiny_flags
from oracle import TOLERANCE, ids, lively, small
from safetensors.torch import save_file

import train
from model import GPT, GPTConfig, KVCache
from rove import overview
from rove.checkpoint import load_checkpoint
from rove.gpt2 import read_gpt2
from rove.metrics import read_metrics


@pytest.fixture(scope="module")
def hf_gpt2():
    """A GPT-2 of transformers with random weights, not all of unit size."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=3, n_head=2, n_embd=16, n_positions=32, vocab_size=97, bos_token_id=96,
        eos_token_id=96, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    net = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return net


def gpt2_folder(folder, net, **changes):
    """Its folder as on the hub: no head, names without the prefix, masks beside the weights."""
    folder.mkdir(exist_ok=True)
    content = json.loads(net.config.to_json_string()) | changes
    (folder / "config.json").write_text(json.dumps(content))
    weights = {n.removeprefix("transformer."): p for n, p in net.state_dict().items()}
    weights = {n: p.contiguous().clone() for n, p in weights.items() if n != "lm_head.weight"}
    weights["h.0.attn.bias"] = torch.ones(1, 1, 32, 32).tril()
    save_file(weights, folder / "model.safetensors")
    return folder


def test_logits_equal_those_of_transformers(hf_gpt2, tmp_path):
    net = GPT.from_checkpoint(read_gpt2(gpt2_folder(tmp_path / "gpt2", hf_gpt2)))
    assert net.config.pos_mode == "learned" and net.config.bias
    idx = ids(net.config, 3, 32)
    with torch.no_grad():
        want = hf_gpt2(idx).logits
        got = net(idx)[0]
    assert got.shape == (3, 32, 97) and want.std() > 0.3
    assert (got - want).abs().max() < 1e-4
    assert torch.equal(got[:, :7].argmax(-1), want[:, :7].argmax(-1))


@pytest.mark.parametrize(
    "changes", [{"activation_function": "relu"}, {"n_inner": 17}, {"layer_norm_epsilon": 1e-6}]
)
def test_a_gpt2_with_other_parts_is_refused(hf_gpt2, tmp_path, changes):
    folder = gpt2_folder(tmp_path / "gpt2", hf_gpt2, **changes)
    with pytest.raises(ValueError, match=next(iter(changes))):
        read_gpt2(folder)
    folder = gpt2_folder(tmp_path / "gpt2", hf_gpt2)
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match="cannot be read"):
        read_gpt2(folder)


def test_learned_positions_add_an_embedding_and_turn_nothing():
    net, rope = lively(small("learned")), GPT(small("rope"))
    names = set(net.state_dict()) - set(rope.state_dict())
    assert names == {"transformer.wpe.weight"}
    assert net.transformer.wpe.weight.shape == (32, 16)
    idx = ids(net.config, 2, 20)
    with torch.no_grad():
        want = net(idx)[0]
        assert (net(idx, pos_offset=5)[0] - want).abs().max() > 0.1, "positions matter"
        net.transformer.wpe.weight.zero_()
        assert torch.allclose(net(idx, pos_offset=5)[0], net(idx)[0], atol=1e-6)


def test_learned_positions_in_chunks_through_the_cache_and_generation():
    net = lively(small("learned"))
    idx = ids(net.config, 2, 30)
    with torch.no_grad():
        want = net(idx)[0]
        for size in (1, 3, 7):
            cache = KVCache(net.config, 30)
            parts = [net.head(net.hidden(part, cache=cache)) for part in idx.split(size, dim=1)]
            assert (torch.cat(parts, 1) - want).abs().max() < TOLERANCE
        tokens = net.generate(idx[:, :5], 20, temperature=0.0)
        for t in range(5, 25):
            assert torch.equal(net(tokens[:, :t])[0][:, -1].argmax(-1), tokens[:, t])
    with pytest.warns(UserWarning, match="outgrows the window"):
        assert net.generate(idx[:, :5], 60, temperature=0.0).shape == (2, 65)
    with pytest.raises(ValueError, match="at most 32"):
        net(ids(net.config, 1, 33))


def test_learned_compiles_without_a_break():
    net = lively(small("learned"))
    idx = ids(net.config, 2, 20)
    with torch.no_grad():
        want = net(idx)[0]
        net.compile(fullgraph=True, backend="eager")
        assert torch.equal(net(idx)[0], want)


def test_learned_and_rotary_weights_are_not_exchanged():
    saved = {"model_config": small("learned").stored(), "model": lively(small("learned"))}
    saved["model"] = saved["model"].state_dict()
    assert GPT.from_checkpoint(saved).config.pos_mode == "learned"
    for retrofit in (False, True):
        with pytest.raises(ValueError, match="trained as 'learned'|do not fit"):
            GPT.from_checkpoint(saved, "rope", allow_retrofit=retrofit)
    with pytest.raises(ValueError, match="pos_mode"):
        GPTConfig(pos_mode="learned+yarn")


def test_a_learned_run_trains_resumes_and_is_evaluated(tmp_path):
    data = make_data(tmp_path / "data")
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    mode = {"model__pos_mode": "learned"}
    train.main(tiny_flags(data, straight, **mode))
    train.main(tiny_flags(data, parts, **mode, train__max_steps=4, optim__min_lr=3e-3))
    first, rows = read_metrics(parts), read_metrics(straight)
    assert len(rows) == 8 and rows[-1]["train/loss"] < rows[0]["train/loss"] - 0.1
    assert len(first) == 4
    result = run_script(
        "eval.py", "perplexity", "--checkpoint", straight, "--max_tokens", "320", "--device", "cpu"
    )
    assert result.returncode == 0, result.stderr
    content = json.loads((straight / "eval/perplexity_packed_learned.json").read_text())
    assert [row["length"] for row in content["results"]] == [16, 32]
    line = refused(run_script("eval.py", "perplexity", "--checkpoint", straight, "--lengths", "64"))
    assert "at most 32" in line


def weights_of(run):
    return load_checkpoint(run)["model"]


def test_a_run_starts_from_weights(tmp_path, hf_gpt2):
    data = make_data(tmp_path / "data")
    train.main(tiny_flags(data, tmp_path / "first"))
    still = {"optim__lr": 0.0, "optim__weight_decay": 0.0, "train__max_steps": 1}
    source = {"train__init_from": tmp_path / "first"}
    train.main(tiny_flags(data, tmp_path / "second", **still, **source))
    first, second = weights_of(tmp_path / "first"), weights_of(tmp_path / "second")
    assert all(torch.equal(first[name], second[name]) for name in first)
    # the context may grow, and a resumed run does not start again
    longer = {"model__block_size": 64, "train__max_steps": 2}
    train.main(tiny_flags(data, tmp_path / "third", **source, **longer))
    gone = {"train__init_from": tmp_path / "nowhere", "train__resume": "auto"}
    train.main(tiny_flags(data, tmp_path / "third", **longer, **gone))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__n_layer": 3}, "model.n_layer=3: it has 2"),
        ({"model__pos_mode": "rove"}, "model.pos_mode=rove: it has rope"),
        ({"model__bias": "true"}, "model.bias=True: it has False"),
        ({"data__dir": "other"}, "vocab_size"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_anything_is_written(
    tmp_path, changes, words, capsys
):
    data = make_data(tmp_path / "data")
    train.main(tiny_flags(data, tmp_path / "first", train__max_steps=1))
    if "data__dir" in changes:
        changes = {"data__dir": make_data(tmp_path / "other", vocab_size=100)}
    flags = tiny_flags(data, tmp_path / "out", train__init_from=tmp_path / "first", **changes)
    with pytest.raises(SystemExit) as stop:
        train.main(flags)
    line = capsys.readouterr().err
    assert stop.value.code == 2 and words in line and "init_from" in line
    assert not (tmp_path / "out").exists()


def test_a_run_explains_itself(tmp_path, capsys):
    data, out = make_data(tmp_path / "data"), tmp_path / "a run"
    flags = tiny_flags(data, out, train__log_interval=2)
    train.main([*flags, "--dry_run"])
    before = capsys.readouterr().out
    for word in ("parameters", "tokens", "8 steps of 256", "FLOPs", "of memory", "checkpoints of"):
        assert word in before, before
    assert not out.exists()
    train.main(flags)
    shown = capsys.readouterr().out
    assert before.endswith("dry run: nothing is written\n")
    assert shown.startswith(before.rpartition("dry run")[0]) and "to go at this rate" in shown
    assert "best val loss" in shown and f"sample.py --checkpoint '{out}'" in shown
    assert f"eval.py perplexity --checkpoint '{out}'" in shown


def test_the_memory_estimate_is_of_the_right_size(tmp_path):
    """Held against the growth of a process that trains for two steps, weights included."""
    sizes = {"n_layer": 4, "n_head": 4, "n_embd": 256, "block_size": 256, "vocab_size": 4096}
    config = GPTConfig(**sizes)
    n_params = sum(p.numel() for p in GPT(config).parameters())
    code = f"""
import torch
from model import GPT, GPTConfig
from rove.optim import make_optimizer
from train import OptimConfig
def peak():  # of this process alone; ru_maxrss counts what its parent held
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
before = peak()
net = GPT(GPTConfig(**{sizes}))
optimizer = make_optimizer(net, OptimConfig())
x = torch.randint(4096, (8, 256))
for _ in range(2):
    net(x, x)[1].backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
print(peak() - before)
"""
    if not Path("/proc/self/status").exists():
        pytest.skip("peaks are read as Linux tells them")
    (tmp_path / "peak.py").write_text(code)
    done = run_script(tmp_path / "peak.py", env={"PYTHONPATH": "."})
    assert done.returncode == 0, done.stderr
    estimate = overview.memory_bytes(config, n_params, 8, is_fp32=True)
    assert 0.5 < int(done.stdout) / estimate < 1.6, (int(done.stdout), estimate)


def test_gpt2_folders_are_checkpoints_of_evaluations_and_runs(hf_gpt2, tmp_path):
    """The vocabulary is 257 ids here, so that byte data fits it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, n_positions=32, vocab_size=257, bos_token_id=256,
        eos_token_id=256,
    )  # fmt: skip
    folder = gpt2_folder(tmp_path / "gpt2", transformers.GPT2LMHeadModel(config))
    saved = load_checkpoint(folder)
    assert saved["model_config"]["pos_mode"] == "learned" and saved["step"] == 0
    data = make_data(tmp_path / "data")
    sizes = {"model__n_layer": 1, "model__n_embd": 16, "model__bias": "true"}
    flags = {**sizes, "model__pos_mode": "learned", "train__init_from": folder}
    line = refused(run_script("train.py", *tiny_flags(data, tmp_path / "run", **flags)))
    assert "tokenizer name of the data byte: it has gpt2" in line
    manifest = json.loads((data / "manifest.json").read_text())
    manifest["tokenizer"]["name"] = "gpt2"
    (data / "manifest.json").write_text(json.dumps(manifest))
    result = run_script(
        "eval.py", "perplexity", "--checkpoint", folder, "--data", data, "--lengths", "16,32",
        "--max_tokens", "1024", "--device", "cpu", "--out", tmp_path / "ppl.json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "ppl.json").read_text())["pos_mode"] == "learned"
    train.main(tiny_flags(data, tmp_path / "run", **flags, train__max_steps=1, optim__lr=0.0))
    first, then = load_checkpoint(folder)["model"], weights_of(tmp_path / "run")
    assert all(torch.equal(first[name], then[name]) for name in then)


def test_a_name_on_the_hub_that_cannot_be_fetched_is_one_line(tmp_path):
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    line = refused(run_script("sample.py", "--checkpoint", "hub:openai-community/gpt2", env=env))
    assert "hub:openai-community/gpt2: cannot be fetched" in line
