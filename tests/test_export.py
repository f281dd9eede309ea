"""The export: transformers loads it without this project, with our logits and our generations; this
project reads it back; what is written is whole; what is damaged is one line."""

import ast
import contextlib
import importlib.util
import inspect
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from helpers import ROOT, make_data, small_disk
from oracle import CASES, TOLERANCE, ids, lively, logits, small
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

import eval as evaluation
import export_hf
import sample
from model import GPT
from rove.checkpoint import FORMAT, KEYS, load_checkpoint, save_checkpoint
from rove.export import folder
from rove.files import sha256_of
from rove.tokenizer import load_tokenizer

FACTOR, V, EOT = 4.0, 257, 256
LENGTHS = (5, 20, 12)  # of the prompts; block_size is 32
NEW = 24  # tokens generated, as `greedy` has it
WTE = "transformer.wte.weight"


def case_name(mode, values, bias):
    return f"{mode}_{values}_{bias}".replace("+", "_")


BY_NAME = {case_name(*case, bias): (*case, bias) for case in CASES for bias in (False, True)}


def net_of(name):
    mode, values, bias = BY_NAME[name]
    how = {"yarn_factor": FACTOR, "yarn_values": values, "bias": bias}
    return lively(small(mode, vocab_size=V, **how))


def make_run(run, net, tokenizer="byte"):
    """A run folder with one checkpoint of a model."""
    found = load_tokenizer(tokenizer)
    keys = ("name", "vocab_size", "sha256", "eot_id")
    data = {"train": "a" * 64, "val": "b" * 64, "order": "c" * 64, "seed": 3}
    state = dict.fromkeys(KEYS) | {"format": FORMAT, "step": 8, "tokens": 2048, "data": data}
    state |= {"model": net.state_dict(), "model_config": net.config.stored()}
    state |= {"tokenizer": {key: getattr(found, key) for key in keys}, "best_val_loss": 2.0}
    save_checkpoint(run, state, is_best=True, keep=2)
    return run


def export(run, out, *more):
    export_hf.main(["--checkpoint", str(run), "--out_dir", str(out), *more])
    return out


def prompts():
    """Three prompts (n,) of different lengths, each opened by end-of-text."""
    tokens = torch.randint(EOT, (3, max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    tokens[:, 0] = EOT
    return [row[:n] for row, n in zip(tokens, LENGTHS, strict=True)]


def labels_of(idx):
    """Labels (B, T) as fine-tuning has them: the first ten and the last three are left out."""
    labels = idx.clone()
    labels[:, :10] = -100
    labels[:, -3:] = -100
    return labels


# ---------------------------------------------------------------- what runs where transformers is
# The sources of these functions run in a process of their own, where this project is not.


def load(folder, **how):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **how)


def greedy(model, prompt, **how):
    how = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None} | how
    return model.generate(prompt, **how)


def answer_logits(model, half, idx):
    """Logits of all kinds of reading: at once, tied anew, in bf16, elsewhere, in parts."""
    from transformers import StaticCache

    assert model.dtype == torch.float32 and half.dtype == torch.bfloat16 and not model.training
    out = {"logits": model(idx).logits}
    model.tie_weights()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    out["tied"], out["bf16"] = model(idx).logits, half(idx).logits
    where = torch.arange(1000, 1000 + idx.shape[1])[None]
    out["shifted"] = model(idx, position_ids=where).logits
    parts, cache = [], None
    for part in idx.split([1, 30, 2, 67], dim=1):
        found = model(part, past_key_values=cache, use_cache=True)
        parts, cache = [*parts, found.logits], found[1]
    out["chunked"] = torch.cat(parts, dim=1)
    static = StaticCache(config=model.config, max_cache_len=128)
    parts = [model(part, past_key_values=static).logits for part in idx.split(50, dim=1)]
    out["static"] = torch.cat(parts, dim=1)
    states = model(idx, output_hidden_states=True, logits_to_keep=1)
    assert len(states.hidden_states) == 3 and states.logits.shape[1] == 1
    out["last"] = model.lm_head(states.hidden_states[-1])
    out["embedded"] = model(inputs_embeds=model.transformer.wte(idx), return_dict=False)[0]
    return out


def answer_generations(model, half, prompts):
    """Greedy generations, alone and left-padded together, with and without a cache, and beams."""
    seen, new, pad, width = [], 24, 256, max(prompt.shape[1] for prompt in prompts)

    def note(module, args, kwargs):
        seen.append(kwargs["input_ids"].shape[1])

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    out = {f"greedy{i}": greedy(model, prompt) for i, prompt in enumerate(prompts)}
    assert seen == [n for prompt in prompts for n in (prompt.shape[1], *[1] * (new - 1))], seen
    handle.remove()
    for i, prompt in enumerate(prompts):
        out[f"uncached{i}"] = greedy(model, prompt, use_cache=False)
    gaps = [width - prompt.shape[1] for prompt in prompts]
    pairs = list(zip(prompts, gaps, strict=True))
    padded = torch.cat([F.pad(prompt, (gap, 0), value=pad) for prompt, gap in pairs])
    mask = torch.stack([torch.arange(width) >= gap for gap in gaps]).long()
    out["padded"] = greedy(model, padded, attention_mask=mask)
    out["padded_uncached"] = greedy(model, padded, attention_mask=mask, use_cache=False)
    out["padded_logits"] = model(padded, attention_mask=mask).logits
    how = {"num_beams": 3, "max_new_tokens": 12}
    out["beams"] = greedy(model, prompts[2], **how)
    out["beams_uncached"] = greedy(model, prompts[2], use_cache=False, **how)
    return out | {"half": greedy(half, prompts[1])}


def answer_training(model, idx, labels):
    """Loss and gradients; a few steps of fine-tuning lower the loss."""
    model.train()
    found = model(idx, labels=labels)
    assert len(found.to_tuple()) == 2, "no cache in training"
    found.loss.backward()
    out = {"loss": found.loss.detach()}
    out |= {f"grad.{key}": p.grad.clone() for key, p in model.named_parameters()}
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(idx, labels=idx).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.05, losses
    n_targets = idx[:, 1:].numel()  # of one of two micro-batches
    half = model(idx, labels=idx, num_items_in_batch=torch.tensor(2 * n_targets)).loss.item()
    assert abs(2 * half / model(idx, labels=idx).loss.item() - 1) < 1e-5
    model.eval()
    return out


def answer_overrides(base, idx):
    """Logits under settings given at load; what is said of those that are refused."""
    out, said = {}, {}
    for path, values in (("rope", "yarn"), ("rove", "yarn"), ("rove", "orig")):
        how = {"pos_mode": f"{path}+yarn", "yarn_factor": 4.0, "yarn_values": values}
        out[f"{path}.{values}"] = load(base / f"{path}_yarn_False", **how)(idx).logits
    retrofit = load(base / "rope_yarn_False", pos_mode="rove", value_path="rove")
    out["retrofit"] = retrofit(idx).logits
    for key, value in (("pos_mode", "rove"), ("yarn_factor", 0.5), ("rotary_pairing", "pairs")):
        try:
            load(base / "rope_yarn_False", **{key: value})
        except ValueError as error:
            said[key] = str(error)
    try:
        retrofit(idx, attention_mask=torch.ones(2, 3))
    except ValueError as error:
        said["attention_mask"] = str(error)
    return out, said


def answer_texts(folder, texts):
    """Ids of texts, the texts of these ids, and the special ids."""
    from transformers import AutoTokenizer

    for trusted in (False, True):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
        found = [tokenizer(text).input_ids for text in texts]
        special = (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer))
        said = found, [tokenizer.decode(ids) for ids in found], special
    return said


def answer_card(folder):
    """Run the examples of a model card; return what they print."""
    os.chdir(folder.parent)
    printed, names = io.StringIO(), {}
    for code in (folder / "README.md").read_text().split("```python\n")[1:]:
        with contextlib.redirect_stdout(printed):
            exec(code.split("```")[0], names)
    assert names["model"].config.yarn_factor == 4.0
    return printed.getvalue()


def answer_all(base):
    """Load every export under base and write down what it answers."""
    torch.set_num_threads(1)
    assert not any(importlib.util.find_spec(name) for name in ("model", "rove", "export_hf"))
    asked, said = (
        load_file(base / "asked.safetensors"),
        json.loads((base / "asked.json").read_text()),
    )
    idx, out = asked["idx"], {}
    prompts = [asked["prompts"][i, :n][None] for i, n in enumerate(said["lengths"])]
    for name in said["names"]:
        model, half = load(base / name), load(base / name, dtype=torch.bfloat16)
        with torch.no_grad():
            found = answer_logits(model, half, idx)
            found |= answer_generations(model, half, prompts)
        found |= answer_training(model, idx, asked["labels"])
        model.save_pretrained(base / f"{name}_tuned")
        with torch.no_grad():
            found["tuned"] = model(idx).logits
            assert torch.equal(load(base / f"{name}_tuned")(idx).logits, found["tuned"])
        out |= {f"{name}.{key}": value for key, value in found.items()}
    with torch.no_grad():
        overridden, refusals = answer_overrides(base, idx)
    save_file({k: v.contiguous() for k, v in (out | overridden).items()}, base / "out.safetensors")
    answers = {"refusals": refusals, "texts": answer_texts(base / "gpt2", said["texts"])}
    answers["cards"] = [answer_card(base / name) for name in ("rove_yarn_False", "gpt2")]
    (base / "answers.json").write_text(json.dumps(answers))


ELSEWHERE = (load, greedy, answer_logits, answer_generations, answer_training)
ELSEWHERE += (answer_overrides, answer_texts, answer_card, answer_all)
IMPORTS = """
import contextlib, importlib.util, io, json, os, sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
"""
TEXTS = (
    "The reason why, I'm sure; they'll say: 'naïve'  \n\n\tx = 1234567",
    " leading, trailing ",
    "日本語 العربية 🙂 \u00a0\u200b\x00 end",
    "",
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder of exports, one of each case and one with GPT-2's vocabulary."""
    base = tmp_path_factory.mktemp("exports")
    for name in BY_NAME:
        export(make_run(base / "runs" / name, net_of(name)), base / name)
    export(make_run(base / "runs" / "gpt2", lively(small(vocab_size=50257)), "gpt2"), base / "gpt2")
    return base


@pytest.fixture(scope="module")
def answers(base):
    """What transformers answers, in one process that does not know this project."""
    idx = ids(net_of("rope_yarn_False").config, 2, 100)
    padded = torch.stack([F.pad(p, (0, max(LENGTHS) - len(p))) for p in prompts()])
    asked = {"idx": idx, "labels": labels_of(idx), "prompts": padded}
    save_file(asked, base / "asked.safetensors")
    said = {"names": list(BY_NAME), "lengths": LENGTHS, "texts": TEXTS}
    (base / "asked.json").write_text(json.dumps(said))
    parts = [IMPORTS, *map(inspect.getsource, ELSEWHERE), "answer_all(Path(sys.argv[1]))"]
    own = {"HF_HOME": base / "hf", "HF_MODULES_CACHE": base / "modules", "HF_HUB_OFFLINE": "1"}
    own |= {"PYTHONPATH": base, "OMP_NUM_THREADS": "1"}
    env = {**os.environ, **{key: str(value) for key, value in own.items()}}
    command, cwd = [sys.executable, "-c", "\n\n".join(parts), base], base / "runs"
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(base / "out.safetensors"), json.loads((base / "answers.json").read_text())


@pytest.fixture
def idx(base):
    return load_file(base / "asked.safetensors")["idx"]


def ours(net, idx, **how):
    with torch.no_grad():
        return net(idx, **how)[0]


def gap(a, b):
    return (a.double() - b.double()).abs().max().item()


# ---------------------------------------------------------------- in transformers


@pytest.mark.parametrize("name", BY_NAME)
def test_logits_are_ours_and_the_oracles_beyond_the_training_length(name, answers, idx):
    out, net = answers[0], net_of(name)
    assert out[f"{name}.logits"].shape == (2, 100, V) and net.config.block_size == 32
    assert gap(out[f"{name}.logits"], ours(net, idx)) < 1e-5
    assert gap(out[f"{name}.logits"], logits(net.state_dict(), net.config, idx)) < TOLERANCE
    assert torch.equal(out[f"{name}.tied"], out[f"{name}.logits"]), "after tie_weights()"
    assert gap(out[f"{name}.shifted"], ours(net, idx, pos_offset=1000)) < 1e-5
    for kind in ("last", "embedded", "chunked", "static"):
        assert gap(out[f"{name}.{kind}"], out[f"{name}.logits"]) < 2e-5, kind


@pytest.mark.parametrize("name", BY_NAME)
def test_in_bf16_the_tables_stay_exact(name, answers, idx):
    half = net_of(name).bfloat16()
    found = answers[0][f"{name}.bf16"]
    assert found.dtype == torch.float32 and gap(found, ours(half, idx)) < 1e-5
    assert half.tables.qk.dtype == torch.float32


@pytest.mark.parametrize("name", BY_NAME)
def test_greedy_generation_is_ours_with_and_without_cache_alone_and_padded(name, answers):
    out, net = answers[0], net_of(name)
    for i, prompt in enumerate(prompts()):
        wanted = net.generate(prompt[None], NEW, temperature=0.0, max_context=None)
        assert wanted.shape[1] == len(prompt) + NEW
        assert torch.equal(out[f"{name}.greedy{i}"], wanted)
        assert torch.equal(out[f"{name}.uncached{i}"], wanted)
        for kind in ("padded", "padded_uncached"):
            row = out[f"{name}.{kind}"][i]
            assert torch.equal(row[max(LENGTHS) - len(prompt) :], wanted[0]), kind
        last = out[f"{name}.padded_logits"][i, -1]
        assert gap(last, ours(net, prompt[None])[0, -1]) < 2e-5
    padding = out[f"{name}.padded_logits"][0, 0]  # it sees itself: no NaN arises
    assert gap(padding, ours(net, torch.tensor([[EOT]]))[0, 0]) < 1e-5
    assert torch.equal(out[f"{name}.beams"], out[f"{name}.beams_uncached"])
    half = net.bfloat16().generate(prompts()[1][None], NEW, temperature=0.0, max_context=None)
    assert torch.equal(out[f"{name}.half"], half)


@pytest.mark.parametrize("name", BY_NAME)
def test_loss_and_gradients_are_ours(name, answers, idx):
    out, net = answers[0], net_of(name)
    targets = labels_of(idx)[:, 1:]
    found = net(idx[:, :-1])[0]
    loss = F.cross_entropy(found.flatten(0, 1), targets.flatten(), ignore_index=-100)
    loss.backward()
    assert out[f"{name}.loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    for key, p in net.named_parameters():
        grad = p.grad[:V] if key == WTE else p.grad
        assert gap(out[f"{name}.grad.{key}"], grad) < 1e-5 * max(1, grad.abs().max().item()), key


@pytest.mark.parametrize("path, values", [("rope", "yarn"), ("rove", "yarn"), ("rove", "orig")])
def test_settings_overridden_at_load_are_ours(path, values, base, answers, idx):
    how = {"yarn_factor": FACTOR, "yarn_values": values}
    net = GPT.from_checkpoint(base / "runs" / f"{path}_yarn_False", f"{path}+yarn", **how)
    found = answers[0][f"{path}.{values}"]
    assert gap(found, ours(net, idx)) < 1e-5
    plain = net_of(f"{path}_yarn_False")
    assert gap(found, ours(plain, idx)) > 0.01, "YaRN makes a difference"


def test_another_value_path_or_pairing_is_refused_at_load(base, answers, idx):
    out, said = answers
    assert set(said["refusals"]) == {"pos_mode", "yarn_factor", "rotary_pairing", "attention_mask"}
    assert "hurt" in said["refusals"]["pos_mode"]
    run = base / "runs" / "rope_yarn_False"
    net = GPT.from_checkpoint(run, "rove", allow_retrofit=True)
    assert gap(out["retrofit"], ours(net, idx)) < 1e-5


def test_autotokenizer_gives_gpt2s_ids(answers):
    found, texts, special = answers[1]["texts"]
    tokenizer = load_tokenizer("gpt2")
    assert found == [tokenizer.encode(text).tolist() for text in TEXTS]
    assert texts == list(TEXTS) and special == [50256, 50256, 50257]


def test_the_examples_of_the_card_run(answers):
    assert all("The reason why" in printed for printed in answers[1]["cards"])


def test_merges_are_the_released_ones(base):
    # the hash that tiktoken pins for the release's vocab.bpe
    known = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
    assert sha256_of(base / "gpt2" / "merges.txt") == known


# ---------------------------------------------------------------- read back by this project


@pytest.mark.parametrize("name", BY_NAME)
def test_an_export_is_a_checkpoint(name, base, idx):
    net, saved = net_of(name), load_checkpoint(base / name, mmap=True)
    assert set(saved) == KEYS | {"file"} and saved["optimizer"] is None
    original = load_checkpoint(base / "runs" / name)
    for key in ("model_config", "tokenizer", "step", "tokens", "data"):
        assert saved[key] == original[key], key
    assert saved["file"] == str(base / name / "model.safetensors")
    wte = saved["model"][WTE]
    assert wte.shape == net.transformer.wte.weight.shape and not wte[V:].any()
    found = GPT.from_checkpoint(base / name)
    assert found.config == net.config and torch.equal(ours(found, idx), ours(net, idx))
    assert GPT.from_checkpoint(base / name, yarn_factor=2.0).config.yarn_factor == 2.0


def test_what_transformers_saved_is_a_checkpoint_too(base, answers, idx):
    for name in BY_NAME:
        found = GPT.from_checkpoint(base / f"{name}_tuned")
        assert gap(ours(found, idx), answers[0][f"{name}.tuned"]) < 1e-5


def test_bf16_weights_are_rounded_once(base, tmp_path, idx):
    name = "rove_yarn_False"
    export(base / "runs" / name, tmp_path / "half", "--dtype", "bfloat16")
    stored = load_file(tmp_path / "half" / "model.safetensors")
    assert {w.dtype for w in stored.values()} == {torch.bfloat16} and WTE in stored
    net = net_of(name)
    for p in net.parameters():
        p.data = p.data.bfloat16().float()
    assert torch.equal(ours(GPT.from_checkpoint(tmp_path / "half"), idx), ours(net, idx))
    again = export(tmp_path / "half", tmp_path / "whole")
    assert torch.equal(ours(GPT.from_checkpoint(again), idx), ours(net, idx))


def test_sample_and_eval_read_an_export_as_they_read_the_run(base, tmp_path, capsys):
    data = make_data(tmp_path / "data")
    found, said = {}, {}
    export(base / "runs" / "rove_yarn_False", tmp_path / "hf")
    for kind, checkpoint in (("run", base / "runs" / "rove_yarn_False"), ("hf", tmp_path / "hf")):
        capsys.readouterr()
        argv = ["--checkpoint", str(checkpoint), "--max_new_tokens", "20", "--prompt", "def "]
        sample.main([*argv, "--pos_mode", "rove+yarn", "--device", "cpu"])
        said[kind] = capsys.readouterr().out
        argv = ["perplexity", "--checkpoint", str(checkpoint), "--data", str(data)]
        modes = ["--pos_mode", "rove,rove+yarn", "--lengths", "16,64", "--device", "cpu"]
        evaluation.main([*argv, *modes])
        for mode in ("rove", "rove+yarn"):
            file = checkpoint / "eval" / f"perplexity_packed_{mode}.json"
            content = json.loads(file.read_text())
            found[kind, mode] = [row["nll"] for row in content["results"]]
    assert said["run"] == said["hf"] and "sample 1 of 1" in said["hf"]
    assert found["run", "rove"] == found["hf", "rove"]
    assert found["run", "rove+yarn"] == found["hf", "rove+yarn"]
    assert found["hf", "rove+yarn"] != found["hf", "rove"]
    assert content["identity"]["weights_sha256"] == sha256_of(tmp_path / "hf" / folder.WEIGHTS)
    again = export(tmp_path / "hf", tmp_path / "again")
    assert f"{found['hf', 'rove'][0]:.4f}" in (again / "README.md").read_text()


def test_no_code_of_a_folder_is_run_when_it_is_read(base, tmp_path):
    copy = shutil.copytree(base / "rope_yarn_False", tmp_path / "copy")
    for name in folder.CODE.values():
        (copy / name).write_text("raise SystemExit('code of the folder was run')\n")
    assert GPT.from_checkpoint(copy).config.pos_mode == "rope"


def cut(path, n_bytes):
    path.write_bytes(path.read_bytes()[:n_bytes])


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def rewrite(path, **changes):
    weights = {key: changes.get(key, w) for key, w in load_file(path).items()}
    save_file(weights | changes, path, metadata={"format": "pt"})


CONFIG, WEIGHTS = folder.CONFIG, folder.WEIGHTS
DAMAGE = {
    "another model": (CONFIG, "model_type", lambda p: change(p, model_type="llama")),
    "no config": (CONFIG, "missing", Path.unlink),
    "no JSON": (CONFIG, "not what", lambda p: cut(p, 100)),
    "a list": (CONFIG, "model_type", lambda p: p.write_text("[]")),
    "no size": (CONFIG, "hidden_size", lambda p: change(p, hidden_size=None)),
    "no training": (CONFIG, "rove_training", lambda p: change(p, rove_training=None)),
    "another vocabulary": (CONFIG, "rove_training", lambda p: change(p, vocab_size=99)),
    "more layers": (WEIGHTS, "h.2", lambda p: change(p.with_name(CONFIG), num_hidden_layers=3)),
    "another pairing": (WEIGHTS, "pairing", lambda p: change(p.parent / CONFIG, rotary_pairing=1)),
    "no weights": (WEIGHTS, "missing", Path.unlink),
    "half the weights": (WEIGHTS, "damaged", lambda p: cut(p, 20_000)),
    "no safetensors": (WEIGHTS, "damaged", lambda p: p.write_bytes(b"\x00" * 5000)),
    "another shape": (WEIGHTS, WTE, lambda p: rewrite(p, **{WTE: torch.zeros(3, 16)})),
    "integers": (WEIGHTS, "I8", lambda p: rewrite(p, **{WTE: torch.ones(V, 16).to(torch.int8)})),
    "one more": (WEIGHTS, "lm_head", lambda p: rewrite(p, **{"lm_head.weight": torch.ones(2)})),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_foreign_folder_is_one_line_that_names_the_file(damage, base, tmp_path):
    name, said, damage_it = DAMAGE[damage]
    copy = shutil.copytree(base / "rope_yarn_False", tmp_path / "copy")
    damage_it(copy / name)
    with pytest.raises(ValueError, match=said) as refused:
        GPT.from_checkpoint(copy)
    assert str(copy / name) in str(refused.value) and "\n" not in str(refused.value)


# ---------------------------------------------------------------- what is written, and how


def error_of(capsys, *argv):
    with pytest.raises(SystemExit) as stop:
        export_hf.main([str(arg) for arg in argv])
    lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


def test_config_says_what_other_tools_look_for(base):
    config = json.loads((base / "rove_yarn_orig_True" / "config.json").read_text())
    assert config["model_type"] == "rove" and config["architectures"] == ["RoveForCausalLM"]
    assert config["auto_map"] == {
        "AutoConfig": "configuration_rove.RoveConfig",
        "AutoModelForCausalLM": "modeling_rove.RoveForCausalLM",
    }
    wanted = {"vocab_size": V, "n_positions": 32, "max_position_embeddings": 32}
    wanted |= {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "bias": True}
    wanted |= {"bos_token_id": EOT, "eos_token_id": EOT, "tie_word_embeddings": True}
    wanted |= {"pos_mode": "rove+yarn", "yarn_factor": 4.0, "yarn_values": "orig"}
    wanted |= {"rotary_pairing": "halves", "rope_theta": 10000.0, "dtype": "float32"}
    assert {key: config[key] for key in wanted} == wanted
    assert json.loads((base / "gpt2" / "config.json").read_text())["vocab_size"] == 50257
    stored = load_file(base / "gpt2" / "model.safetensors")
    assert stored[WTE].shape == (50257, 16) and not any("head" in key for key in stored)
    ids = json.loads((base / "gpt2" / "generation_config.json").read_text())
    assert ids["eos_token_id"] == ids["bos_token_id"] == 50256


def test_the_exported_code_imports_torch_transformers_and_itself():
    for name in folder.CODE.values():
        path = ROOT / "rove" / "export" / name
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and f"{node.module}.py" in folder.CODE.values()
            elif isinstance(node, ast.Import | ast.ImportFrom):
                module = getattr(node, "module", None) or node.names[0].name
                assert module.split(".")[0] in {"torch", "transformers", "math", "typing"}


def test_a_folder_that_holds_something_is_refused(base, tmp_path, capsys):
    run, out = base / "runs" / "rope_yarn_False", tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    said = error_of(capsys, "--checkpoint", run, "--out_dir", out)
    assert str(out) in said and "name another" in said
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "notes.txt"]
    (out / "notes.txt").unlink()
    capsys.readouterr()
    export(run, out)
    assert GPT.from_checkpoint(out).config.pos_mode == "rope"
    assert f"from_pretrained('{out}', trust_remote_code=True)" in capsys.readouterr().out
    assert "is a file" in error_of(capsys, "--checkpoint", run, "--out_dir", out / "config.json/x")
    assert "not empty" in error_of(capsys, "--checkpoint", run, "--out_dir", out)
    modes = {path.stat().st_mode for path in out.iterdir()}
    assert len(modes) == 1, "files have the modes that the umask gives"


@pytest.mark.parametrize("fails", ["write_atomic", "fsync"])
def test_an_export_that_fails_leaves_nothing(fails, base, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    where = folder if fails == "write_atomic" else os
    monkeypatch.setattr(where, fails, full)
    run = base / "runs" / "rope_yarn_False"
    assert "No space" in error_of(capsys, "--checkpoint", run, "--out_dir", tmp_path / "deep/out")
    assert not [path for path in tmp_path.rglob("*") if path.name != "deep"]


def test_what_a_killed_export_left_is_replaced_and_nothing_else(base, tmp_path, capsys):
    left, run = tmp_path / "out.tmp", base / "runs" / "rope_yarn_False"
    left.mkdir()
    (left / "config.json.tmp").write_text("{")
    (left / "model.safetensors").write_text("")
    export(run, tmp_path / "out")
    assert not left.exists()
    (tmp_path / "other.tmp").mkdir()
    (tmp_path / "other.tmp" / "thesis.txt").write_text("mine")
    said = error_of(capsys, "--checkpoint", run, "--out_dir", tmp_path / "other")
    assert "other.tmp" in said and "move it" in said
    assert (tmp_path / "other.tmp" / "thesis.txt").read_text() == "mine"


def test_models_that_cannot_be_exported_are_refused(tmp_path, capsys):
    net = lively(small(vocab_size=V))
    with torch.no_grad():
        net.transformer.h[1].mlp.c_fc.weight[0, 0] = float("nan")
    run = make_run(tmp_path / "run", net)
    said = error_of(capsys, "--checkpoint", run, "--out_dir", tmp_path / "out")
    assert "not finite" in said and "c_fc" in said
    for path in (tmp_path / "none", tmp_path):
        said = error_of(capsys, "--checkpoint", path, "--out_dir", tmp_path / "out")
        assert str(path) in said
    learned = net.config.stored() | {"pos_mode": "learned"}
    with pytest.raises(ValueError, match="learned"):
        folder.export_config(learned, {}, "float32")


def test_transformers_is_not_needed_and_a_missing_vocabulary_is_said(
    base, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "transformers", None)
    out = export(base / "runs" / "gpt2", tmp_path / "with")
    files = {"vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json"}
    files |= {"special_tokens_map.json"}
    assert files < {path.name for path in out.iterdir()}

    def absent(name):
        raise ValueError("the vocabulary is not on this machine")

    monkeypatch.setattr(export_hf, "load_tokenizer", absent)
    capsys.readouterr()
    out = export(base / "runs" / "gpt2", tmp_path / "without")
    notices = [line for line in capsys.readouterr().out.splitlines() if "tokenizer files" in line]
    assert notices == [
        "notice: tokenizer files are left out: the vocabulary is not on this machine"
    ]
    assert not files & {path.name for path in out.iterdir()}
    assert "left out" in (out / "README.md").read_text()
    assert GPT.from_checkpoint(out).config.vocab_size == 50257


def test_the_card_says_what_was_measured_of_these_weights_and_no_path(tmp_path, capsys):
    run = make_run(tmp_path / "secret" / "run", lively(small(vocab_size=V)))
    data = make_data(tmp_path / "secret" / "walk")
    (run / "config.yaml").write_text(yaml.safe_dump({"data": {"dir": str(data)}}))
    rows = [{"step": n, "tokens": 256 * n, "train/loss": 5 - n / 10} for n in range(1, 12)]
    rows[7]["val/loss"] = 4.4321
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["--checkpoint", str(run), "--data", str(data), "--lengths", "16,32", "--device", "cpu"]
    evaluation.main(["perplexity", *argv])
    file = run / "eval" / "perplexity_packed_rove.json"
    content = json.loads(file.read_text())
    other = content | {"identity": {"weights_sha256": "0" * 64}}
    file.with_name("perplexity_other.json").write_text(json.dumps(other))
    file.with_name("perplexity_broken.json").write_text("{}")
    file.with_name("compare.json").write_text('{"kind": "compare"}')
    capsys.readouterr()
    out = export(run, tmp_path / "hf")
    said = capsys.readouterr().out
    assert said.count("notice: ") == 1 and "other weights" in said and "1 evaluations" in said
    text = (out / "README.md").read_text()
    header = yaml.safe_load(text.split("---\n")[1])
    assert header["library_name"] == "transformers" and "rove" in header["tags"]
    for row in content["results"]:
        assert text.count(f"| {row['length']} | 1 | {row['ppl']:.2f} | {row['nll']:.4f} |") == 1
    for fact in ("`rove`", "trained at 32 tokens", "| steps | 8 |", "a" * 64, "| data | walk |"):
        assert fact in text, fact
    assert "4.2000 nats/token at step 8" in text and "4.4321 nats/token at step 8" in text
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG") and "(loss.png)" in text
    for path in out.iterdir():
        assert str(tmp_path).encode() not in path.read_bytes(), path
        assert b"secret" not in path.read_bytes(), path


def test_a_full_disk_is_one_line_and_leaves_nothing(base, tmp_path, capsys):
    with small_disk(tmp_path / "disk", 3000) as disk:  # KiB; the weights alone are 3141
        said = error_of(capsys, "--checkpoint", base / "runs" / "gpt2", "--out_dir", disk / "out")
        assert "space" in said and not list(disk.iterdir())
