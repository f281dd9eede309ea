"""An export folder: what transformers loads without this project, and this project without it.

config.json holds the model_config by transformers' names and, under `rove_training`, what an
evaluation needs of the checkpoint; model.safetensors holds the weights by their own names, rows of
wte cut to vocab_size. Both are read as data: no code of a folder is run here.
"""

import json
import os
import shutil
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rove.files import write_atomic
from rove.tokenizer import EOT_TEXT, Tokenizer

Content = dict[str, Any]
CONFIG, WEIGHTS, WTE = "config.json", "model.safetensors", "transformer.wte.weight"
CODE = {"RoveConfig": "configuration_rove.py", "RoveForCausalLM": "modeling_rove.py"}
RENAMED = {
    "block_size": "max_position_embeddings",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
}
SIZES = (*RENAMED, "vocab_size")
MODEL_KEYS = {
    *(*SIZES, "dropout", "bias", "pos_mode", "rope_theta", "yarn_factor", "yarn_beta_fast"),
    *("yarn_beta_slow", "yarn_values", "rotary_pairing"),
}
TRAINING = {"step": int, "tokens": int, "seed": int, "data": dict, "tokenizer": dict}
PADDED_TO = 64  # rows of wte in a checkpoint


def export_config(model_config: Content, training: Content, dtype: str) -> Content:
    """Return config.json for a checkpoint's model_config.

    training: the keys of TRAINING. dtype: float32 or bfloat16. Raises ValueError for a model that
    the exported code does not know.
    """
    path = str(model_config["pos_mode"]).removesuffix("+yarn")
    if path not in ("rope", "rove"):
        known = "only models with rotary positions can be exported, rope or rove"
        raise ValueError(f"pos_mode={model_config['pos_mode']!r}: {known}")
    assert set(model_config) == MODEL_KEYS and set(training) == set(TRAINING)
    eot = training["tokenizer"]["eot_id"]
    classes = {"AutoConfig": "RoveConfig", "AutoModelForCausalLM": "RoveForCausalLM"}
    return {
        "model_type": "rove",
        "architectures": ["RoveForCausalLM"],
        "auto_map": {key: f"{CODE[name][:-3]}.{name}" for key, name in classes.items()},
        **{RENAMED.get(key, key): model_config[key] for key in sorted(MODEL_KEYS)},
        "n_positions": model_config["block_size"],
        "value_path": path,
        "bos_token_id": eot,
        "eos_token_id": eot,
        "tie_word_embeddings": True,
        "dtype": dtype,
        "rove_training": training,
    }


def check_out(out: Path) -> None:
    """Raise ValueError for a folder to export into that holds something already."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out_dir {out}: exists and is not empty; name another, or remove it")


def write_folder(
    out: Path, config: Content, weights: dict[str, Tensor], files: dict[str, bytes]
) -> int:
    """Write config, weights, the model's code and more files; the folder appears when it is whole.

    weights: as a checkpoint has them. Returns the number of parameters. Raises ValueError when
    weights do not fit the config or are not finite, and when the folder cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    check_out(out)
    weights = weights | {WTE: weights[WTE][: config["vocab_size"]]}
    _check_weights(weights, _model_config(config))
    # no pad_token_id: generate could take the end-of-text that opens a prompt for padding
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    files = files | {CONFIG: as_json(config), "generation_config.json": as_json(ids)}
    files |= {name: Path(__file__).with_name(name).read_bytes() for name in CODE.values()}
    temporary = out.with_name(f"{out.name}.tmp")
    left = {path.name.removesuffix(".tmp") for path in temporary.glob("*")}  # by a killed export
    if not left <= {*files, WEIGHTS}:
        raise ValueError(f"{temporary}: in the way, and no part of an export; move it elsewhere")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        dtype = getattr(torch, config["dtype"])
        weights = {name: weight.to(dtype).contiguous() for name, weight in weights.items()}
        for name, content in files.items():
            write_atomic(temporary / name, methodcaller("write", content))
        save_file(weights, temporary / WEIGHTS, metadata={"format": "pt"})
        with (temporary / WEIGHTS).open("rb") as file:
            os.fchmod(file.fileno(), (temporary / CONFIG).stat().st_mode)  # the library's is 0600
            os.fsync(file.fileno())
        temporary.replace(out)
        return sum(weight.numel() for weight in weights.values())
    except SafetensorError as error:
        raise ValueError(f"{temporary / WEIGHTS}: cannot be written ({error!r:.100})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_weights(weights: dict[str, Tensor], model_config: Content) -> None:
    _check_shapes({name: tuple(w.shape) for name, w in weights.items()}, model_config, "model")
    for name in (name for name, weight in weights.items() if not weight.isfinite().all()):
        raise ValueError(f"{name}: some weights are not finite; export an earlier checkpoint")


def as_json(content: Content) -> bytes:
    """Return indented JSON."""
    return (json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def tokenizer_files(tokenizer: Tokenizer, model_max_length: int) -> dict[str, bytes]:
    """Return the files from which AutoTokenizer makes GPT-2's tokenizer."""
    plain = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in plain]
    shown = {b: chr(b) for b in plain} | {b: chr(256 + n) for n, b in enumerate(others)}
    tokens = [tokenizer.encoding.decode_single_token_bytes(i) for i in range(tokenizer.eot_id)]
    ranks = {token: i for i, token in enumerate(tokens)}
    text = ["".join(shown[b] for b in token) for token in tokens]
    vocab = {token: i for i, token in enumerate([*text, EOT_TEXT])}
    pairs = [_merged_from(token, ranks) for token in tokens if len(token) > 1]
    merges = [" ".join("".join(shown[b] for b in part) for part in pair) for pair in pairs]
    level: Content = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    eot: Content = {"id": tokenizer.eot_id, "content": EOT_TEXT, "special": True}
    eot |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    model: Content = {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False}
    model |= {"continuing_subword_prefix": "", "end_of_word_suffix": "", "byte_fallback": False}
    whole: Content = {"version": "1.0", "truncation": None, "padding": None}
    whole |= {"added_tokens": [eot], "normalizer": None, "pre_tokenizer": level}
    whole |= {"post_processor": None, "decoder": level}
    special = {key: EOT_TEXT for key in ("bos_token", "eos_token", "unk_token")}
    settings = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": model_max_length}
    return {
        "vocab.json": as_json(vocab),
        "merges.txt": "\n".join(["#version: 0.2", *merges, ""]).encode(),
        "tokenizer.json": as_json(whole | {"model": model | {"vocab": vocab, "merges": merges}}),
        "tokenizer_config.json": as_json(settings | special | {"add_prefix_space": False}),
        "special_tokens_map.json": as_json(special),
    }


def _merged_from(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Return the two parts that byte pair encoding merges into a token last."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        found = [ranks.get(a + b, len(ranks)) for a, b in zip(parts, parts[1:], strict=False)]
        i = min(range(len(found)), key=found.__getitem__)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def is_export(folder: Path) -> bool:
    """Whether a folder is meant as an export: it has a file that a run's folder never has."""
    return any((folder / name).exists() for name in (CONFIG, WEIGHTS))


def read_export(folder: Path) -> Content:
    """Return what an export folder knows of its checkpoint, rows of wte padded with zeros again.

    Weights stay in the file until they are looked at. Raises ValueError, naming the file, for a
    folder that is damaged or holds another model.
    """
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict) or config.get("model_type") != "rove":
            raise ValueError("its model_type is not 'rove'")
        model_config = _model_config(config)
        training = _training(config.get("rove_training"), model_config)
    except FileNotFoundError:
        raise ValueError(f"{path}: missing; export the checkpoint again") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not what export_hf.py writes ({error})") from None
    weights = _read_weights(folder / WEIGHTS, model_config)
    padding = -model_config["vocab_size"] % PADDED_TO
    weights[WTE] = torch.nn.functional.pad(weights[WTE], (0, 0, 0, padding))
    kept = {key: training[key] for key in ("step", "tokens", "data", "tokenizer")}
    return kept | {"model": weights, "model_config": model_config, "file": str(folder / WEIGHTS)}


def _model_config(config: Content) -> Content:
    names = {key: RENAMED.get(key, key) for key in sorted(MODEL_KEYS)}
    if missing := [name for name in names.values() if name not in config]:
        raise ValueError(f"it lacks {', '.join(missing)}")
    for name in (names[key] for key in SIZES):
        if type(config[name]) is not int or config[name] < 1:
            raise ValueError(f"{name}={config[name]!r}: must be at least 1")
    return {key: config[name] for key, name in names.items()}


def _training(value: Any, model_config: Content) -> Content:
    found = value if isinstance(value, dict) else {}
    for key, kind in TRAINING.items():
        if type(found.get(key)) is not kind:
            raise ValueError(f"rove_training.{key}={found.get(key)!r}: must be a {kind.__name__}")
    tokenizer = found["tokenizer"]
    if missing := {"name", "vocab_size", "sha256", "eot_id"} - set(tokenizer):
        raise ValueError(f"rove_training.tokenizer lacks {', '.join(sorted(missing))}")
    if tokenizer["vocab_size"] != model_config["vocab_size"] or "seed" not in found["data"]:
        raise ValueError("rove_training is of another model")
    return found


def _read_weights(path: Path, model_config: Content) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    try:
        with safe_open(path, "pt") as file:
            found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes = {name: tuple(part.get_shape()) for name, part in found.items()}
            dtypes = {part.get_dtype() for part in found.values()}
        _check_shapes(shapes, model_config, str(path))
        if not dtypes <= {"F32", "F16", "BF16"}:
            raise ValueError(f"{path}: weights of dtype {sorted(dtypes)}; must be floats")
        return load_file(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: missing; export the checkpoint again") from None
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: damaged ({error!r:.80}); export it again") from error


def _check_shapes(found: dict[str, Any], model_config: Content, where: str) -> None:
    """Raise ValueError unless these are all weights of the model, each of its shape."""
    C, has_bias = model_config["n_embd"], model_config["bias"]
    parts = {"ln_1": (C,), "attn.c_attn": (3 * C, C), "attn.c_proj": (C, C), "ln_2": (C,)}
    parts |= {"mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C)}
    layers = range(model_config["n_layer"])
    of = {f"transformer.h.{n}.{part}": shape for n in layers for part, shape in parts.items()}
    of["transformer.ln_f"] = (C,)
    expected = {WTE: (model_config["vocab_size"], C)}
    expected |= {f"{name}.weight": shape for name, shape in of.items()}
    expected |= {f"{name}.bias": shape[:1] for name, shape in of.items() if has_bias}
    for name in sorted(set(found) | set(expected)):
        if found.get(name) != expected.get(name):
            both = f"{found.get(name, 'missing')}, by the config {expected.get(name, 'not there')}"
            raise ValueError(f"{where}: {name} is {both}; export the checkpoint again")
