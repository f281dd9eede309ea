"""Tasks of lm-evaluation-harness: its metrics by its names, side by side where they compare."""

import json
from collections.abc import Sequence
from typing import Any

from rove.report.core import core_labels
from rove.report.read import Result, is_number
from rove.report.tables import Section, number, table

SAME = (
    "tasks",
    "data",
    "versions",
    "num_fewshot",
    "limit",
    "fewshot_seed",
    "max_length",
    "harness",
)
NOTE = (
    "Metrics and standard errors are the harness's; ↑ and ↓ say where better is. Retraining adds "
    "to an s.e., which is over items alone."
)


def lm_eval_sections(results: Sequence[Result]) -> list[Section]:
    """Return a section for each way in which tasks were run: only equal ones stand together."""
    found = [r for r in results if r.content["kind"] == "lm_eval"]
    keys = list(dict.fromkeys(_settings(r) for r in found))
    sections = []
    for number_, key in enumerate(keys, start=1):
        title = "lm-evaluation-harness" + (f" ({number_} of {len(keys)})" if len(keys) > 1 else "")
        sections.append(_section([r for r in found if _settings(r) == key], title))
    return sections


def _settings(result: Result) -> str:
    return json.dumps([result.content.get(key) for key in SAME], sort_keys=True)


def metrics_of(content: dict[str, Any]) -> dict[tuple[str, str], tuple[float | None, float | None]]:
    """Return (value, standard error) by task and metric ("acc", or "acc (filter)"), in order."""
    found: dict[tuple[str, str], tuple[float | None, float | None]] = {}
    for task, row in content["results"].items():
        for key, value in row.items():
            metric, _, chosen = key.partition(",")
            if not chosen or metric.endswith("_stderr"):
                continue
            error = row.get(f"{metric}_stderr,{chosen}")
            name = metric if chosen == "none" else f"{metric} ({chosen})"
            shown = [float(x) if is_number(x) else None for x in (value, error)]
            found[task, name] = (shown[0], shown[1])
    return found


def _section(results: Sequence[Result], title: str) -> Section:
    c = results[0].content
    limit = "all items" if c["limit"] is None else f"limit {c['limit']:g} (no result of the task)"
    setting = f"harness {c['harness']}, at most {c['max_length']:,} tokens, {limit}"
    measured = [metrics_of(r.content) for r in results]
    rows = []
    for task, metric in dict.fromkeys(key for own in measured for key in own):
        better = (c.get("higher_is_better") or {}).get(task) or {}
        is_better = better.get(metric.split(" ")[0])
        arrow = "" if is_better is None else " ↑" if is_better else " ↓"
        shots = (c.get("num_fewshot") or {}).get(task)
        cells = [_cell(*own.get((task, metric), (None, None))) for own in measured]
        names = [task, "" if shots is None else str(shots), f"{c['results'][task]['n']:,}"]
        rows.append([*names, metric + arrow, *cells])
    columns = [f"{r.run.name} {x}" for r, x in zip(results, core_labels(results), strict=True)]
    text = table(["task", "shots", "items", "metric", *columns], rows)
    return Section(title, f"{setting[0].upper()}{setting[1:]}. {NOTE}\n\n{text}")


def _cell(value: float | None, error: float | None) -> str:
    return number(value) + (f" ± {number(error)}" if error is not None else "")
