"""`eval.py lm_eval` from start to end: tasks of lm-evaluation-harness, no export needed."""

import contextlib
import difflib
import hashlib
import importlib.metadata
import json
import math
import os
import random
from collections.abc import Iterator
from functools import partial as bind
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rove import distributed as dist
from rove.errors import import_package
from rove.evals.core.run import one_factor
from rove.evals.results import Partial, result_path
from rove.evals.session import Session
from rove.tokenizer import load_tokenizer
from rove.words import names_in

SEED = 0  # of Python's random, as the harness has it
BOOTSTRAP = 100_000  # draws for a standard error that has no formula, as the harness has it
PARTS = ("results", "groups", "versions", "num_fewshot", "higher_is_better")
Loaded = dict[str, Any]  # what TaskManager.load returns: tasks and groups by name


def run(e: Session) -> None:
    """Measure every task and write the results, as the harness gives them."""
    s = e.settings
    check_settings(s)
    with reports_once(e):
        import_package("lm_eval.evaluator", "requirements-eval.txt")
    mode, values = e.only_variant()
    path = result_path(s.out, e.run, "lm_eval", mode, values)
    max_length = e.trained["block_size"] if s.max_length is None else s.max_length
    factor = one_factor(e, mode, max_length, e.trained["block_size"])
    load = bind(load_tasks, s.tasks, s.include_path, s.seed)
    first = dist.on_main(e.world, load)  # the others then find the data in the cache
    with reports_once(e):
        loaded = first or load()
    tokenizer = load_tokenizer(e.saved["tokenizer"]["name"])
    e.open(mode, values)
    setting: dict[str, Any] = {"max_length": max_length, "limit": s.limit, "fewshot_seed": s.seed}
    setting |= {"harness": importlib.metadata.version("lm_eval"), **e.set_factor(factor)}
    setting |= {"tokenizer_sha256": tokenizer.sha256, "tasks": list(loaded)}
    e.say(f"lm_eval {setting['harness']}: {e.describe()}; factor {setting['yarn_factor']:g}, "
          f"at most {max_length} tokens")  # fmt: skip
    from rove.evals.lm_eval.adapter import RoveLM

    _measure(e, RoveLM(e, tokenizer, max_length, s.seed), loaded, setting, path)


def _measure(
    e: Session, lm: Any, loaded: dict[str, Loaded], setting: dict[str, Any], path: Path
) -> None:
    """Measure task by task, as far as that was not done before, and write the result."""
    hashes = {name: hash_tasks(found, e.settings.limit) for name, found in loaded.items()}
    shots = e.settings.num_fewshot
    identity = e.identity("lm_eval", **setting, num_fewshot=shots, hashes=hashes)
    partial = Partial(path, identity, e.world)
    content = e.common("lm_eval") | setting | {part: {} for part in PARTS}
    for name, found in loaded.items():
        measured = partial.get(name, bind(evaluate, e, lm, found))
        for part in PARTS:
            content[part] |= measured[part]
        _say_rows(e, measured["results"])
    docs = [docs for docs, _ in hashes.values()]
    content["data"] = hashlib.sha256(json.dumps(docs).encode()).hexdigest()
    partial.finish(path, content)
    e.say(f"wrote {path}")


def check_settings(s: Any) -> None:
    """Raise ValueError for settings out of their range."""
    part = s.limit is None or 0 < s.limit < 1 or (s.limit >= 1 and s.limit % 1 == 0)
    for key, holds, expected in (
        ("tasks", s.tasks, "names such as hellaswag,piqa"),
        ("limit", part, "a number of items, or a share below 1"),
        ("num_fewshot", s.num_fewshot is None or s.num_fewshot >= 0, "at least 0"),
        ("max_length", s.max_length is None or s.max_length >= 1, "at least 1"),
        ("seed", 0 <= s.seed < 2**32, "at least 0, below 2^32"),
    ):
        if not holds:
            raise ValueError(f"--{key} {getattr(s, key)}: must be {expected}")


@contextlib.contextmanager
def reports_once(e: Session) -> Iterator[None]:
    """Let the harness write its bars and warnings on rank 0 alone."""
    if e.world.is_main:
        yield
    else:
        out, err = contextlib.redirect_stdout, contextlib.redirect_stderr
        with open(os.devnull, "w") as nowhere, out(nowhere), err(nowhere):
            yield


def load_tasks(names: str, include_path: str | None, seed: int) -> dict[str, Loaded]:
    """Return what each name stands for, loaded with its data; ValueError for what cannot be.

    names: of tasks, groups or tags, or patterns such as mmlu_*. include_path: folder of YAML files.
    """
    manager, found = find_tasks(names_in("tasks", names), include_path)
    loaded = {}
    for name in found:
        fix_seeds(seed)  # some tasks shuffle as they are loaded
        try:
            loaded[name] = manager.load([name])
        except Exception as error:  # a task is anyone's code, and its data may be on the network
            what = f"{type(error).__name__}: {error}"
            raise ValueError(f"task {name!r} cannot be loaded: {what}") from error
    return loaded


def find_tasks(names: list[str], include_path: str | None) -> tuple[Any, list[str]]:
    """Return a manager that knows the names, and these with patterns expanded."""
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        if not Path(include_path).is_dir():
            raise ValueError(f"--include_path {include_path}: no such folder")
        own = TaskManager(include_path=include_path, include_defaults=False)
        if set(names) <= set(own.all_subtasks):  # to index the harness's own takes seconds
            return own, list(dict.fromkeys(names))
    manager = TaskManager(include_path=include_path)
    found: list[str] = []
    for name in names:
        matching = manager.match_tasks([name])
        if not matching:
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else "see `lm_eval ls tasks`"
            raise ValueError(f"no task {name!r} in the harness or --include_path; {hint}")
        found += matching
    return manager, list(dict.fromkeys(found))


def fix_seeds(seed: int) -> None:
    """Seed what tasks may draw from, as the harness's `simple_evaluate` does."""
    random.seed(SEED)
    np.random.seed(seed)
    torch.manual_seed(seed)


def hash_tasks(loaded: Loaded, limit: float | None) -> tuple[str, str]:
    """Return the hashes of the documents that are evaluated and of the tasks' settings."""
    from lm_eval.evaluator_utils import get_sample_size

    docs, how = hashlib.sha256(), hashlib.sha256()
    for name in sorted(loaded["tasks"]):
        task = loaded["tasks"][name]
        for _, doc in task.doc_iterator(limit=get_sample_size(task, limit)):
            docs.update(json.dumps(doc, sort_keys=True, default=str).encode())
        config = json.dumps(task.dump_config(), sort_keys=True, default=lambda x: type(x).__name__)
        how.update(config.encode())
    return docs.hexdigest(), how.hexdigest()


def evaluate(e: Session, lm: Any, loaded: Loaded) -> dict[str, Any]:
    """Return PARTS of the harness's results, each by task or group, as plain values."""
    from lm_eval import evaluator

    s = e.settings
    fix_seeds(s.seed)
    for task in loaded["tasks"].values():
        usual = task.get_config("num_fewshot")
        if usual is None or (usual != 0 and s.num_fewshot is not None):  # a fixed 0 stays
            task.set_config("num_fewshot", s.num_fewshot or 0)
        task.set_fewshot_seed(s.seed)
    draws = BOOTSTRAP if e.world.is_main else 0
    with reports_once(e):
        found = evaluator.evaluate(lm, loaded, s.limit, bootstrap_iters=draws, log_samples=False)
    results = {}
    for name, row in found["results"].items():
        if "sample_len" in row:  # a group without a mean of its own has none
            left_out = ("name", "sample_len", "sample_count")
            results[name] = {key: x for key, x in row.items() if key not in left_out}
            results[name]["n"] = row["sample_len"]
    rest = (found["group_subtasks"], found["versions"], found["n-shot"], found["higher_is_better"])
    kept: dict[str, Any] = plain(dict(zip(PARTS, (results, *rest), strict=True)))
    return kept


def plain(value: Any) -> Any:
    """Return a value as JSON has it, null for NaN, infinities and the harness's N/A."""
    if isinstance(value, dict):
        return {str(key): plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [plain(x) for x in value]
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    if value == "N/A" or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)


def _say_rows(e: Session, results: dict[str, dict[str, Any]]) -> None:
    for name, row in results.items():
        e.say(f"  {name}, {row['n']} items")
        for key, x in row.items():
            if isinstance(x, float) and "_stderr" not in key:
                error = row.get(key.replace(",", "_stderr,", 1))
                about = f" +- {error:.4f}" if isinstance(error, float) else ""
                e.say(f"    {key.removesuffix(',none'):30s} {x:.4f}{about}")
