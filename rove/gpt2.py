"""OpenAI's GPT-2 as this project's checkpoints hold models: weights from its folder on the hub.

GPT-2 is the model with `pos_mode` learned, biases, and position embeddings `transformer.wpe`. Its
folder (config.json, model.safetensors) stores the matrices of attention and MLP transposed, and
masks, which are no weights, beside them.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rove.tokenizer import GPT2_EOT_ID, GPT2_SHA256, GPT2_VOCAB_SIZE

HUB = "hub:"  # before a name: fetch it from the Hugging Face hub
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
NO_WEIGHTS = (".attn.bias", ".attn.masked_bias")
EXPECTED = {  # what the model has built in, by config.json's names, with the library's defaults
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "tie_word_embeddings": True,
    "add_cross_attention": False,
}


def fetch(name: str) -> Path:
    """Download a GPT-2 folder of the hub, such as openai-community/gpt2; return where it lies.

    Raises ValueError when it cannot be had.
    """
    from huggingface_hub import snapshot_download

    files = ["config.json", "model.safetensors"]
    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except Exception as error:  # the hub's clients share no base class
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(f"{HUB}{name}: cannot be fetched from the hub: {reason}") from error


def read_gpt2(folder: Path) -> dict[str, Any]:
    """Read a GPT-2 folder; return what a checkpoint of ours holds, without a training's state.

    Raises ValueError, naming the file, when it is no GPT-2, or one with other parts than GPT-2's.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sizes = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": GPT2_VOCAB_SIZE}
    sizes = {key: config.get(key, default) for key, default in sizes.items()}
    sizes["block_size"] = config.get("n_positions", config.get("n_ctx", 1024))
    inner = config.get("n_inner") or 4 * sizes["n_embd"]
    for key, wanted in {**EXPECTED, "n_inner": 4 * sizes["n_embd"]}.items():
        value = inner if key == "n_inner" else config.get(key, wanted)
        if value != wanted:
            raise ValueError(f"{folder / 'config.json'}: {key}={value!r}: must be {wanted!r}")
    path = folder / "model.safetensors"
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read ({error!r:.80}); fetch it again") from error
    # plain numbers and names only: what model.py's GPTConfig.stored() has
    model_config = {
        **sizes,
        "dropout": 0.0,
        "bias": True,
        "pos_mode": "learned",
        "rope_theta": 10000.0,
        "yarn_factor": 1.0,
        "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0,
        "yarn_values": "yarn",
        "rotary_pairing": "halves",
    }
    is_gpt2 = sizes["vocab_size"] == GPT2_VOCAB_SIZE
    tokenizer = {"name": "gpt2", "vocab_size": sizes["vocab_size"], "eot_id": GPT2_EOT_ID}
    return {
        "model": _weights(found, sizes["vocab_size"]),
        "model_config": model_config,
        "tokenizer": tokenizer | {"sha256": GPT2_SHA256 if is_gpt2 else None},
        "step": 0,
        "tokens": 0,
        "data": {"seed": 0, "train": None, "val": None},
        "file": str(path),
    }


def _weights(found: dict[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """Rename and turn GPT-2's weights; rows of wte are padded with zeros to a multiple of 64."""
    weights = {}
    for name, value in found.items():
        name = name.removeprefix("transformer.")
        if name.endswith(NO_WEIGHTS) or name == "lm_head.weight":  # the head is wte
            continue
        value = value.float()
        if name.endswith(TRANSPOSED):
            value = value.t().contiguous()
        if name == "wte.weight":
            padding = -vocab_size % 64
            value = torch.cat((value, value.new_zeros(padding, value.shape[1])))
        weights[f"transformer.{name}"] = value
    return weights
