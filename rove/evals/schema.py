"""What a result of eval.py must hold before anything is made of it.

A schema maps a key to the kind of its value; a kind that ends in "?" may be null or absent, which
mean the same: not measured. Keys that no schema names are let through.
"""

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from rove.evals.core.tasks import BY_LABEL
from rove.evals.ruler.tasks import TASKS

Schema = dict[str, str]
Content = dict[str, Any]
EVALUATIONS = ("perplexity", "core", "ruler", "lm_eval", "structure")  # of a checkpoint
MODES = ("learned", "rope", "rove", "rope+yarn", "rove+yarn")
BY_LENGTH = ("packed", "tail", "sliding")

COMMON: Schema = {
    **{key: "text" for key in ("kind", "checkpoint", "pos_mode", "yarn_values", "dtype")},
    **{key: "text" for key in ("data", "created")},
    **{"step": "count", "seed": "count", "block_size": "size"},
}
PERPLEXITY: Schema = {"protocol": "text", "mask_eot": "flag?", "results": "list"}
LENGTH_ROW: Schema = {
    **{"length": "size", "nll": "number", "tokens": "count", "yarn_factor": "number"},
    **{key: "number?" for key in ("ppl", "bits_per_byte", "degradation")},
    **{key: "interval?" for key in ("interval", "degradation_interval")},
    "block_nll": "numbers?",
}
POSITION_ROW: Schema = {
    **{"from": "count", "to": "count", "nll": "number?", "tokens": "count"},
    "yarn_factor": "number",
}
CORE: Schema = {
    **{"mode": "text", "truncation": "text", "yarn_factor": "number", "tasks": "object"},
    **{"max_length": "count?", "max_per_task": "count?", "core": "text?"},
    **{f"{key}_{v}": "number?" for key in ("core", "mean_of_present") for v in ("v1", "v2")},
    **{f"mean_of_short_{v}": "number?" for v in ("v1", "v2")},
}
CORE_TASK: Schema = {
    **{"accuracy": "number", "centered_v1": "number", "centered_v2": "number"},
    **{"n": "count", "cropped": "count", "span_capped": "count", "sha256": "text"},
    **{"predictions": "counts?", "correct": "bits?"},
}
RULER: Schema = {
    **{"layout": "text?", "samples_seed": "count?", "results": "list", "categories": "object"},
}
RULER_ROW: Schema = {
    **{"task": "text", "length": "size", "n": "count", "nll": "number", "exact": "number"},
    **{"yarn_factor": "number", "by_depth": "list?", "by_hop": "list?", "samples": "list?"},
    **{f"nll_{key}": "number?" for key in ("content", "control", "guess", "min_reference")},
    **{key: "number?" for key in ("gain", "string_match", "first_rank_median")},
    **{"sha256": "text?", "variant": "text?"},
    **{"nll_interval": "interval?", "gain_interval": "interval?", "n_prefix_mismatch": "count?"},
}
LM_EVAL: Schema = {
    **{"harness": "text", "tasks": "list", "max_length": "size", "yarn_factor": "number"},
    **{"limit": "number?", "fewshot_seed": "count", "results": "object", "versions": "object"},
}
STRUCTURE: Schema = {
    **{"layer": "count", "head": "count", "length": "size", "yarn_factor": "number"},
    **{"max_deviation": "number", "schmidt_rank": "count", "singular_values": "numbers"},
    **{key: "list" for key in ("cosine", "kernel_norm", "kernel_norm_unrotated")},
}
PART: Schema = {"n": "count", "nll": "number?", "gain": "number?", "exact": "number?"}


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_interval(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


KINDS: dict[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "flag": lambda value: isinstance(value, bool),
    "list": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "count": _is_count,
    "size": lambda value: _is_count(value) and value > 0,
    "number": _is_number,
    "interval": _is_interval,
    "counts": _are_counts,
    "numbers": lambda value: isinstance(value, list) and all(map(_is_number, value)),
    "bits": lambda value: isinstance(value, str) and not set(value) - set("01"),
}


def conform(value: Any, schema: Schema, where: str = "") -> Content:
    """Return a copy of an object with null for what it lacks; ValueError where it does not fit."""
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'top'}: expected an object, got {_show(value)}")
    content = dict(value)
    for key, kind in schema.items():
        found = content.setdefault(key, None)
        if not (found is None and kind.endswith("?")) and not KINDS[kind.rstrip("?")](found):
            raise ValueError(f"{where}{key}: expected {kind.rstrip('?')}, got {_show(found)}")
    return content


def check_result(value: Any) -> Content:
    """Return a result of any kind but compare, complete; ValueError says what does not fit."""
    content = conform(value, COMMON)
    _one_of(content, "kind", EVALUATIONS)
    _one_of(content, "pos_mode", MODES)
    _one_of(content, "yarn_values", ("yarn", "orig"))
    checks = {"perplexity": _perplexity, "core": _core, "ruler": _ruler, "lm_eval": _lm_eval}
    checks["structure"] = partial(conform, schema=STRUCTURE)
    return checks[content["kind"]](content)


def _perplexity(content: Content) -> Content:
    content = conform(content, PERPLEXITY)
    _one_of(content, "protocol", (*BY_LENGTH, "positions"))
    content["mask_eot"] = bool(content["mask_eot"])
    schema = POSITION_ROW if content["protocol"] == "positions" else LENGTH_ROW
    content["results"] = _rows(content["results"], schema, "results")
    return content


def _core(content: Content) -> Content:
    content = conform(content, CORE)
    tasks = content["tasks"]
    for label in tasks:
        _one_of({"task": label}, "task", tuple(BY_LABEL))
    content["tasks"] = {k: conform(v, CORE_TASK, f"tasks.{k}.") for k, v in tasks.items()}
    if not tasks:
        raise ValueError("tasks: none")
    return content


def _ruler(content: Content) -> Content:
    content = conform(content, RULER)
    content["categories"] = {
        length: conform(means, dict.fromkeys(_keys(means), "number?"), f"categories.{length}.")
        for length, means in content["categories"].items()
    }
    rows = _rows(content["results"], RULER_ROW, "results")
    for i, row in enumerate(rows):
        _one_of(row, "task", tuple(TASKS))
        for key in ("by_depth", "by_hop"):
            where = f"results[{i}].{key}."
            schema = PART | ({"hop": "count"} if key == "by_hop" else {})
            parts = row[key] or []
            row[key] = [None if p is None else conform(p, schema, where) for p in parts]
    content["results"] = rows
    return content


def _lm_eval(content: Content) -> Content:
    content = conform(content, LM_EVAL)
    for name, row in content["results"].items():
        conform(row, {"n": "count"}, f"results.{name}.")
    return content


def _rows(values: list[Any], schema: Schema, where: str) -> list[Content]:
    if not values:
        raise ValueError(f"{where}: none")
    return [conform(value, schema, f"{where}[{i}].") for i, value in enumerate(values)]


def _keys(value: Any) -> list[str]:
    return list(value) if isinstance(value, dict) else []


def _one_of(content: Content, key: str, known: tuple[str, ...]) -> None:
    if content[key] not in known:
        raise ValueError(f"{key}: expected {' | '.join(known)}, got {_show(content[key])}")


def _show(value: Any) -> str:
    return json.dumps(value, default=str)[:60]
