"""`eval.py core` from start to end."""

import hashlib
import json
from functools import partial as bind
from pathlib import Path
from typing import Any

from rove import distributed as dist
from rove.evals.core import bundle as bundles
from rove.evals.core.scoring import Setup, aggregate, run_task
from rove.evals.cost import forward_flops
from rove.evals.results import Partial, result_path
from rove.evals.session import Session
from rove.files import sha256_of
from rove.tokenizer import load_tokenizer

USUAL_TOKENS = 512  # of a prompt, for the estimate of costs


def find_bundle(e: Session) -> Path:
    """Return the folder that holds eval_data/, downloaded first where that is asked for."""
    s = e.settings
    if s.download is None:
        if s.bundle is None:
            raise ValueError("--bundle DIR is needed (eval_data/ in it), or --download URL")
        if s.sha256 is not None:
            raise ValueError("--sha256 goes with --download URL")
        return Path(s.bundle)
    if s.sha256 is None:
        raise ValueError("--sha256 H is needed with --download, so that nothing else is unpacked")
    folder = Path(s.bundle or "data/core_bundle")
    fetch = bind(bundles.download, s.download, s.sha256, folder)
    found: Path = dist.gather(dist.on_main(e.world, fetch))[0]  # type: ignore[assignment]
    return found


def run(e: Session) -> None:
    """Measure every task whose data is there; CORE is told only when all 22 are."""
    s, (mode, values) = e.settings, e.only_variant()
    path = result_path(s.out, e.run, f"core_{s.truncation}", mode, values)
    bundle = find_bundle(e)
    tasks, missing = bundles.find_tasks(bundle, s.tasks)
    loaded = [(t, path, bundles.load_items(path, t)) for t in tasks
              for path in [bundles.task_path(bundle, t)]]  # fmt: skip
    for task, file, items in loaded:  # before the first task takes its time
        if len(items[: s.max_per_task]) <= task.n_shots:
            least = f"its {task.n_shots} shots and a question need {task.n_shots + 1}"
            raise ValueError(f"{task.label}: max_per_task={s.max_per_task}, {file}: {least} items")
    context = e.trained["block_size"]
    if s.max_length is not None and s.truncation == "extrapolate":
        e.say(f"warning: max_length={s.max_length} has no effect under extrapolate")
    usual = context if s.max_length is None else s.max_length
    max_length = None if s.truncation == "extrapolate" else usual
    factor = one_factor(e, mode, max_length, context)
    tokenizer = load_tokenizer(e.saved["tokenizer"]["name"])
    e.open(mode, values)
    factor_used = e.set_factor(factor)
    n_items = sum(len(items[: s.max_per_task]) for _, _, items in loaded)
    e.say(f"CORE: {e.describe()}; factor {factor_used['yarn_factor']:g}, {s.truncation}"
          f"{'' if max_length is None else f' to {max_length} tokens'}")  # fmt: skip
    rows_each = 3.0  # options of an item, about
    flops = forward_flops(e.model.config, USUAL_TOKENS, 4) * rows_each * n_items
    e.say(f"cost: {len(tasks)} tasks, {n_items:,} items; {e.describe_cost(flops)}")
    bar = e.bar(-(-n_items // e.world.size), "item")
    setup = Setup(score=e.score, encode=tokenizer.encode, eot_id=tokenizer.eot_id, device=e.device,
                  max_length=max_length, truncation=s.truncation, max_per_task=s.max_per_task,
                  batch_size=s.batch_size, rank=e.world.rank, size=e.world.size,
                  gather=dist.gather, progress=bar.update)  # fmt: skip
    setting: dict[str, Any] = {"mode": "nanochat", "truncation": s.truncation}
    setting |= {"max_length": max_length, "max_per_task": s.max_per_task, **factor_used}
    setting |= {"bos_id": tokenizer.eot_id, "tokenizer_sha256": tokenizer.sha256}
    hashes = {task.label: sha256_of(file) for task, file, _ in loaded}
    partial = Partial(path, e.identity("core", **setting, hashes=hashes), e.world)
    results: dict[str, dict[str, Any]] = {}
    for task, _, items in loaded:
        name = f"{task.label} {hashes[task.label]}"
        measure = bind(run_task, task, items, setup, hashes[task.label])
        results[task.label] = partial.get(name, measure)
        _say_task(e, task.label, results[task.label])
    bar.close()
    total = aggregate(results, missing)
    _say_total(e, total)
    data = hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()
    content = e.common("core") | setting | total | {"data": data, "missing": missing}
    partial.finish(path, content | {"tasks": results})
    e.say(f"wrote {path}")


def one_factor(e: Session, mode: str, max_length: int | None, context: int) -> float:
    """Return the YaRN factor of all prompts: as given, or by max_length; ValueError for neither."""
    if mode.endswith("+yarn") and max_length is None and e.settings.yarn_factor is None:
        raise ValueError("--yarn_factor is needed where prompts of any length are extrapolated")
    factors = e.factors(mode, max_length or context)
    if len(factors) > 1:
        raise ValueError(f"yarn_factor={e.settings.yarn_factor}: one factor at a time here")
    return factors[0]


def _say_task(e: Session, label: str, row: dict[str, Any]) -> None:
    cut = f", {row['cropped']} cropped" if row["cropped"] else ""
    capped = f", {row['span_capped']} spans cut" if row["span_capped"] else ""
    counts = "" if row["predictions"] is None else f", predicted {row['predictions']}"
    measured = f"accuracy {row['accuracy']:.4f}, centered {row['centered_v1']:+.4f}"
    e.say(f"  {label:32s} {measured} (v2 {row['centered_v2']:+.4f}), "
          f"{row['n']} items{cut}{capped}{counts}")  # fmt: skip


def _say_total(e: Session, total: dict[str, Any]) -> None:
    def shown(value: float | None) -> str:
        return "n/a" if value is None else f"{value:.6f}"

    e.say(f"CORE v1 {shown(total['core_v1'])}, v2 {shown(total['core_v2'])}"
          f"{'' if total['core'] is None else ': ' + total['core']}")  # fmt: skip
    for key, what in (("short", "tasks that never exceed 1,024 tokens"), ("present", "tasks run")):
        v1, v2 = shown(total[f"mean_of_{key}_v1"]), shown(total[f"mean_of_{key}_v2"])
        e.say(f"mean over the {what} (not CORE): v1 {v1}, v2 {v2}")
