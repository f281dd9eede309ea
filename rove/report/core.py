"""CORE: accuracy by task, and the aggregates under their own names."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rove.evals.core.tasks import BY_LABEL, LETTER_TASKS, LONG_TASKS, TASKS
from rove.report.plots import Dots, Series, dots, look_of_result
from rove.report.read import Result
from rove.report.tables import Section, check_same, labels_apart, number, table

SETTINGS = ("mode", "truncation", "max_length", "max_per_task")
AGGREGATES = {
    "core": "CORE",
    "mean_of_present": "mean of present tasks",
    "mean_of_short": f"mean of the {len(TASKS) - len(LONG_TASKS)} short tasks",
}
NOTE = (
    "Centered: 0 is chance, 1 perfect, negative below chance; v1 and v2 are two tables of chance "
    "(v2 corrects three tasks). CORE is the plain mean over all {n} tasks and is not given for "
    "fewer. s.e.: binomial standard error of the mean of the present tasks (v1) over their items; "
    "retraining adds to it. `eval.py compare` gives paired intervals."
)


def core_sections(results: Sequence[Result]) -> list[Section]:
    """Return a section for each way in which CORE was run; ValueError for different items."""
    found = [r for r in results if r.content["kind"] == "core"]
    keys = dict.fromkeys(_settings(r) for r in found)
    return [_section([r for r in found if _settings(r) == key]) for key in keys]


def _settings(result: Result) -> tuple[Any, ...]:
    settings = [result.content[key] for key in SETTINGS]
    if settings[1] == "extrapolate":
        settings[2] = None  # without effect
    return tuple(settings)


def how(result: Result) -> str:
    """Return in words how long prompts were treated: results that differ in it do not compare."""
    _, truncation, max_length, _ = _settings(result)
    return truncation if max_length is None else f"{truncation} {max_length:,}"


def core_labels(results: Sequence[Result]) -> list[str]:
    """Return the label of each result, with the YaRN factor where there is one."""
    factors = [r.content["yarn_factor"] for r in results]
    return [
        label + (f", s={factor:g}" if factor != 1 else "")
        for label, factor in zip(labels_apart(results), factors, strict=True)
    ]


def _section(results: list[Result]) -> Section:
    mode, truncation, max_length, max_per_task = _settings(results[0])
    labels = [t.label for t in TASKS if any(t.label in r.content["tasks"] for r in results)]
    for label in labels:
        having = [r for r in results if label in r.content["tasks"]]
        tasks = [r.content["tasks"][label] for r in having]
        check_same(having, [(t["sha256"], t["n"]) for t in tasks], f"data or items of {label}")
    limit = "" if max_length is None else f", max_length {max_length:,}"
    capped = f", max_per_task {max_per_task:,}" if max_per_task else ""
    kept = " (a capped run is another evaluation, no sample of the full one)" if capped else ""
    intro = f"Mode {mode}, truncation {truncation}{limit}{capped}{kept}. "
    parts = [intro + NOTE.format(n=len(TASKS)), _aggregates(results)]
    parts += [
        f"{r.run.name}, {label}: CORE {r.content['core']}."
        for r, label in zip(results, core_labels(results), strict=True)
        if r.content["core"] is not None
    ]
    parts.append(_tasks(results, labels))
    parts += _histograms(results, labels)
    cap = "" if max_per_task is None else f"_{max_per_task}"
    name = f"core_{mode}_{how(results[0]).replace(' ', '_').replace(',', '')}{cap}.png"
    title = f"CORE, {mode}, {how(results[0])}{capped}"
    return Section(title, "\n\n".join(parts), {name: _plot(results, labels, title)})


def _aggregates(results: Sequence[Result]) -> str:
    columns = [(key, v) for key in AGGREGATES for v in ("v1", "v2")]
    rows = []
    for r, label in zip(results, core_labels(results), strict=True):
        cells = [r.run.name, label, f"{len(r.content['tasks'])} of {len(TASKS)}"]
        cells += [number(r.content[f"{key}_{v}"]) or "n/a" * (key == "core") for key, v in columns]
        rows.append([*cells, number(standard_error(r.content["tasks"]))])
    head = [f"{AGGREGATES[key]}, {v}" for key, v in columns]
    return table(["run", "mode", "tasks", *head, "s.e."], rows)


def standard_error(tasks: dict[str, dict[str, Any]]) -> float:
    """Return the binomial standard error of the mean of the tasks' centered accuracies (v1)."""
    variance = 0.0
    for label, task in tasks.items():
        chance = 0.01 * BY_LABEL[label].baseline_v1
        accuracy = task["accuracy"]
        variance += accuracy * (1 - accuracy) / max(task["n"], 1) / (1 - chance) ** 2
    return math.sqrt(variance) / len(tasks)


def _tasks(results: Sequence[Result], labels: Sequence[str]) -> str:
    columns = [f"{r.run.name} {x}" for r, x in zip(results, core_labels(results), strict=True)]
    head = ["task", "items", "cropped", "chance, %"]
    head += [f"{what}: {column}" for what in ("accuracy", "centered v1") for column in columns]
    lines = []
    for label in labels:
        tasks = [r.content["tasks"].get(label) for r in results]
        there = [task for task in tasks if task is not None]
        cropped = list(dict.fromkeys(_cropped(task) for task in there))
        line = [label, f"{there[0]['n']:,}", " / ".join(cropped)]
        line.append(f"{BY_LABEL[label].baseline_v1:g}")
        for key in ("accuracy", "centered_v1"):
            line += ["" if task is None else number(task[key]) for task in tasks]
        lines.append(line)
    return table(head, lines)


def _cropped(task: dict[str, Any]) -> str:
    capped = f", spans of {task['span_capped']:,}" if task["span_capped"] else ""
    return f"{task['cropped']:,}{capped}"


def _histograms(results: Sequence[Result], labels: Sequence[str]) -> list[str]:
    """Return a table of how often each option was predicted, where options are letters."""
    rows = []
    for label in labels:
        for r, name in zip(results, core_labels(results), strict=True):
            counts = r.content["tasks"].get(label, {}).get("predictions")
            if label in LETTER_TASKS and counts:
                rows.append((label, r.run.name, name, counts))
    if not rows:
        return []
    most = max(len(counts) for *_, counts in rows)
    lines = []
    for *names, counts in rows:
        share = f"{max(counts) / max(sum(counts), 1):.2f}"
        cells = [f"{n:,}" for n in counts] + [""] * (most - len(counts))
        lines.append([*names, *cells, share])
    head = ["task", "run", "mode", *(f"option {i}" for i in range(most)), "largest share"]
    why = "Predictions by option, in the tasks where a model may simply prefer one letter:"
    return [why, table(head, lines)]


def _plot(results: Sequence[Result], labels: Sequence[str], title: str) -> Callable[[], bytes]:
    series = []
    for r, label in zip(results, core_labels(results), strict=True):
        tasks = r.content["tasks"]
        x = [tasks[name]["centered_v1"] if name in tasks else None for name in labels]
        series.append(Series(f"{r.run.short} {label}", look_of_result(r), x, []))
    part = Dots("centered accuracy, v1", series, line=0.0, reference_label="chance")
    return partial(dots, title, labels, [part])
