"""The model card of an export: what was trained on what, what was measured, how to load it."""

import json
from pathlib import Path
from typing import Any

from rove.evals.schema import Content, check_result
from rove.manifest import read_manifest
from rove.metrics import read_metrics
from rove.report.plots import why_no_plots
from rove.report.read import Run
from rove.report.tables import number, table
from rove.report.training import training_section
from rove.runs import run_setting

KINDS = ("perplexity", "core", "ruler")
HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- {path}
- causal-lm
- rotary-position-embedding
- custom_code
---

# {name}

A language model with GPT-2's architecture and rotary positions in place of learned ones, mode
`{mode}`, trained at {T:,} tokens of context.

"""
LOAD = """
## How to load it

```python
{imports}

path = "{name}"  # this folder, or its name on the hub
model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
{ids}
written = model.generate(ids, max_new_tokens=50, do_sample=True, top_k=200)[0].tolist()
print({shown})
```

`trust_remote_code=True` runs the two Python files of this folder, which import torch and
transformers alone. In training, end-of-text (id {eot}) stands before every document, so a prompt
begins with it. {tokenizer}

Contexts longer than {T:,} tokens take YaRN, which needs no training; its factor is their length
over {T:,}:

```python
model = AutoModelForCausalLM.from_pretrained(
    path, trust_remote_code=True, pos_mode="{path}+yarn", yarn_factor=4.0
)
```

## RoPE and RoVE

`rope` rotates queries and keys by their positions. `rove` (Rotary Value Embeddings,
[arXiv 2606.11275](https://arxiv.org/abs/2606.11275)) rotates the values too, with the matrices of
the keys, and turns the output back by the query's: `y_i = R_i^-1 sum_j A_ij R_j v_j`. It adds no
parameters. Channel m of a head turns with channel m + head_dim / 2. Under `+yarn`, values take
YaRN's frequencies as queries and keys do (`yarn_values="orig"`: they keep the original ones), and
its temperature stands in the softmax scale alone.
"""
GPT2 = "The tokenizer is GPT-2's."
BYTE = """There are no tokenizer files: ids 0 to 255 are the bytes of UTF-8 and
{eot} is end-of-text."""
NO_FILES = "Files of the tokenizer, {kind}, are left out."


def read_results(run: Path, step: int, weights_sha256: str) -> tuple[list[Content], list[str]]:
    """Return what eval.py measured of these very weights, and a line on each file left out."""
    found, notices = [], []
    for path in sorted(run.glob("eval/*.json"), key=lambda path: path.stem):
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(value, dict) and value.get("kind") not in KINDS:
                continue
            content = check_result(value)
        except (ValueError, RecursionError) as error:
            notices.append(f"{path}: left out, not a result of eval.py ({str(error)[:100]})")
            continue
        identity = content.get("identity")
        measured = identity.get("weights_sha256") if isinstance(identity, dict) else None
        if content["step"] == step and measured == weights_sha256:
            found.append(content)
        else:
            notices.append(f"{path}: left out, measured of other weights (step {content['step']})")
    return found, notices


def card_files(
    name: str, run: Path, config: dict[str, Any], results: list[Content], has_tokenizer: bool
) -> dict[str, bytes]:
    """Return README.md and, where a run's losses and matplotlib are at hand, loss.png.

    config: config.json. No path of this machine gets into them.
    """
    training, eot = config["rove_training"], config["eos_token_id"]
    rows = [row for row in read_metrics(run) if row["step"] <= training["step"]]
    names = {"name": name, "path": config["value_path"], "mode": config["pos_mode"], "eot": eot}
    names["T"] = config["n_positions"]
    kind = training["tokenizer"]["name"]
    names["imports"] = "import torch\nfrom transformers import AutoModelForCausalLM"
    if has_tokenizer:
        names["imports"] = "from transformers import AutoModelForCausalLM, AutoTokenizer"
        made = "tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)"
        text = 'tokenizer(tokenizer.eos_token + "The reason why", return_tensors="pt").input_ids'
        names["ids"] = f"{made}\nids = {text}"
        names |= {"shown": "tokenizer.decode(written)", "tokenizer": GPT2}
    elif kind == "byte":
        names["ids"] = f'ids = torch.tensor([[{eot}, *"The reason why".encode()]])'
        names["shown"] = f'bytes(i for i in written if i != {eot}).decode(errors="replace")'
        names["tokenizer"] = BYTE.format(eot=eot)
    else:
        names |= {"ids": f"ids = torch.tensor([[{eot}]])", "shown": "written"}
        names["tokenizer"] = NO_FILES.format(kind=kind)
    parts = [HEAD.format(**names) + _facts(run, rows, config), LOAD.format(**names)]
    parts += _measured(results)
    plot = _plot(rows, config)
    if plot is not None:
        parts.append("\n## Training\n\n![Training and validation loss](loss.png)\n")
    files = {"README.md": "".join(parts).encode()}
    return files if plot is None else files | {"loss.png": plot}


def _facts(run: Path, rows: list[dict[str, Any]], config: dict[str, Any]) -> str:
    """Return the table of what was trained on what; losses are those of the last step so far."""
    training, data = config["rove_training"], config["rove_training"]["data"]
    shape = (config[key] for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    facts = {
        "layers / heads / width": " / ".join(map(str, shape)),
        "vocabulary": f"{config['vocab_size']:,} ids, tokenizer {training['tokenizer']['name']}",
        "training context": f"{config['n_positions']:,} tokens",
        "theta": f"{config['rope_theta']:g}",
        "weights": config["dtype"],
        "steps": f"{training['step']:,}",
        "tokens": f"{training['tokens']:,}",
        "seed": str(training["seed"]),
        "data": _data_name(run),
        "data, hash of train": str(data.get("train") or ""),
        "data, hash of val": str(data.get("val") or ""),
    }
    for key, what in (("train/loss", "training loss"), ("val/loss", "validation loss")):
        last = next((row for row in reversed(rows) if row.get(key) is not None), None)
        if last is not None:
            facts[what] = f"{last[key]:.4f} nats/token at step {last['step']:,}"
    return table(["", ""], [[key, value] for key, value in facts.items() if value]) + "\n"


def _data_name(run: Path) -> str:
    """Return the name of a run's data folder, and of the data set where its manifest is here."""
    if (named := run_setting(run, "data.dir")) is None:
        return ""
    folder = Path(named)
    try:
        manifest = read_manifest(folder) or {}
    except (ValueError, OSError):
        manifest = {}
    dataset = manifest.get("dataset")
    source = (manifest.get("settings") or {}).get("source")
    is_public = isinstance(dataset, str) and source in ("fineweb-edu", "hub", "pretokenized")
    return f"{folder.name} ({dataset})" if is_public else folder.name


def _measured(results: list[Content]) -> list[str]:
    """Return a table for each kind of evaluation there is."""
    rows: dict[str, list[list[str]]] = {kind: [] for kind in KINDS}
    for r in results:
        orig = ", values orig" if r["yarn_values"] == "orig" else ""
        how = [f"{r['pos_mode']}{orig}", r["dtype"]]
        if r["kind"] == "core":
            scores = [number(r[f"mean_of_present_{v}"]) for v in ("v1", "v2")]
            cells = [*how, f"{r['yarn_factor']:g}", str(len(r["tasks"])), *scores]
            rows["core"].append([*cells, number(r["core_v1"])])
            continue
        for row in r["results"]:
            factor = f"{row['yarn_factor']:g}"
            if r["kind"] == "ruler":
                cells = [row["task"], f"{row['length']:,}", factor, number(row["nll"])]
                rows["ruler"].append([*how, *cells, number(row["exact"]), str(row["n"])])
            else:
                at = f"{row['from']:,} to {row['to']:,}" if "from" in row else f"{row['length']:,}"
                cells = [r["protocol"], at, factor, number(row.get("ppl"), 2), number(row["nll"])]
                rows["perplexity"].append([*how, *cells, f"{row['tokens']:,}"])
    heads = {
        "perplexity": "protocol|tokens of context|YaRN factor|perplexity|NLL, nats/token|targets",
        "core": "YaRN factor|tasks|mean centred, v1|v2|CORE (all 22 tasks, v1)",
        "ruler": "task|tokens|YaRN factor|NLL of the answer, nats/token|exact|samples",
    }
    titles = {"perplexity": "Perplexity", "core": "CORE", "ruler": "RULER"}
    tables = {k: table(["mode", "dtype", *heads[k].split("|")], rows[k]) for k in KINDS if rows[k]}
    return [f"\n## {titles[kind]}\n\n{text}\n" for kind, text in tables.items()]


def _plot(rows: list[dict[str, Any]], config: dict[str, Any]) -> bytes | None:
    """Return a PNG of losses by tokens; None without any, or without matplotlib."""
    if not any("train/loss" in row for row in rows) or why_no_plots():
        return None
    settings = {"model": {"pos_mode": config["value_path"]}}
    section = training_section([Run(Path(), config["value_path"], 0, settings, rows)])
    return None if section is None else section.plots["loss.png"]()
