"""RULER: what is gained over the control, exact answers, and the raw loss beside a guesser's."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from rove.evals.ruler.tasks import TASKS
from rove.report.plots import Dots, Frame, Series, dots, look_of_result, panels
from rove.report.read import Result
from rove.report.tables import Section, check_same, labels_apart, number, table, with_interval

Row = dict[str, Any]
NOTE = (
    "Gain: how much less the answer's NLL is than in the control, the same prompt with another "
    "value in place of the one asked for (nats/token; above 0: the model reads the value). Exact: "
    "share of answers whose every token is the likeliest."
)
RAW = (
    "Raw NLL of the answer, nats/token (down). Guess: a guesser that knows the format alone, on "
    "these samples; levels can differ by tenths at no retrieval at all, which is calibration."
)
CATEGORIES = (
    "Mean NLL by category over its tasks that were run, FWE and vt_hops apart; no average over "
    "categories:"
)
DETAIL = {
    "nll_content": "content only",
    "nll_control": "control",
    "nll_min_reference": "least over references",
    "first_rank_median": "median rank of the first token (0: likeliest)",
    "n_prefix_mismatch": "prefix mismatches",
}


class Column(NamedTuple):
    """A result at one length and YaRN factor."""

    result: Result
    label: str
    rows: dict[str, Row]
    """by task"""

    @property
    def name(self) -> str:
        return f"{self.result.run.name} {self.label}"

    def series(self, x: Sequence[Any], y: Sequence[float | None]) -> Series:
        """Return numbers of this column, ready to be drawn."""
        return Series(f"{self.result.run.short} {self.label}", look_of_result(self.result), x, y)


def ruler_sections(results: Sequence[Result]) -> list[Section]:
    """Return a section for each length; ValueError where the samples are different ones."""
    found = [r for r in results if r.content["kind"] == "ruler"]
    lengths = sorted({row["length"] for r in found for row in r.content["results"]})
    return [_section(found, length) for length in lengths]


def _section(results: Sequence[Result], length: int) -> Section:
    columns = _columns(results, length)
    tasks = [task for task in TASKS if any(task in c.rows for c in columns)]
    for task in tasks:
        having = [c for c in columns if task in c.rows]
        prints = [_fingerprint(c, task) for c in having]
        check_same([c.result for c in having], prints, f"samples of {task} at {length}")
    layouts = dict.fromkeys(str(c.result.content["layout"]) for c in columns)
    counts = sorted({row["n"] for c in columns for row in c.rows.values()})
    samples = " to ".join(f"{n:,}" for n in dict.fromkeys((counts[0], counts[-1])))
    intro = f"{samples} samples a task, layout {', '.join(layouts)}. {NOTE}"
    parts = [intro, _headline(columns, tasks), RAW, _raw(columns, tasks), _detail(columns, tasks)]
    parts += _categories(columns, length) + _by_hop(columns) + _by_depth(columns, tasks)
    plots = {f"ruler_{length}.png": _task_plot(columns, tasks, length)}
    deep = [task for task in tasks if any(_depths(c, task) for c in columns)]
    if deep:
        plots[f"ruler_{length}_depth.png"] = _depth_plot(columns, deep)
    return Section(f"RULER at {length:,} tokens", "\n\n".join(parts), plots)


def _columns(results: Sequence[Result], length: int) -> list[Column]:
    columns = []
    for r, label in zip(results, labels_apart(results), strict=True):
        here = [row for row in r.content["results"] if row["length"] == length]
        for factor in sorted({row["yarn_factor"] for row in here}):
            name = label + (f", s={factor:g}" if "+yarn" in r.mode else "")
            rows = {row["task"]: row for row in here if row["yarn_factor"] == factor}
            columns.append(Column(r, name, rows))
    return columns


def _fingerprint(column: Column, task: str) -> tuple[Any, ...]:
    """Return what is alike for all models on the same samples: their hash, where it was kept."""
    row, content = column.rows[task], column.result.content
    if row["sha256"] is not None:
        return (row["sha256"],)
    keys = ("depth", "hop", "n_tokens")
    samples = [tuple(sample.get(key) for key in keys) for sample in row["samples"] or []]
    guess = None if row["nll_guess"] is None else round(row["nll_guess"], 9)
    return content["layout"], content["samples_seed"], row["n"], guess, samples


def _headline(columns: Sequence[Column], tasks: Sequence[str]) -> str:
    measures: dict[str, Callable[[Row], str]] = {
        "gain": lambda row: with_interval(row["gain"], row["gain_interval"]),
        "exact": lambda row: number(row["exact"], 3),
        "string match, %": lambda row: number(row["string_match"], 1),
    }
    if all(row["string_match"] is None for c in columns for row in c.rows.values()):
        del measures["string match, %"]
    head = [f"{measure}: {c.name}" for measure in measures for c in columns]
    lines = [
        [task, *(_of(c, task, show) for show in measures.values() for c in columns)]
        for task in tasks
    ]
    return table(["task", *head], lines)


def _of(column: Column, task: str, show: Callable[[Row], str]) -> str:
    return show(column.rows[task]) if task in column.rows else ""


def _raw(columns: Sequence[Column], tasks: Sequence[str]) -> str:
    lines = []
    for task in tasks:
        nll = [
            _of(c, task, lambda row: with_interval(row["nll"], row["nll_interval"]))
            for c in columns
        ]
        lines.append([task, number(_guess(columns, task)), *nll])
    return table(["task", "guess", *(f"NLL: {c.name}" for c in columns)], lines)


def _guess(columns: Sequence[Column], task: str) -> float | None:
    """Return the guesser's NLL, which is the same in all columns that have the task."""
    return next(c.rows[task]["nll_guess"] for c in columns if task in c.rows)


def _detail(columns: Sequence[Column], tasks: Sequence[str]) -> str:
    rows = [(task, c) for task in tasks for c in columns if task in c.rows]
    keys = [key for key in DETAIL if any(c.rows[task][key] is not None for task, c in rows)]
    lines = []
    for task, c in rows:
        row = c.rows[task]
        digits = {"first_rank_median": 1, "n_prefix_mismatch": 0}
        cells = [number(row[key], digits.get(key, 4)) for key in keys]
        lines.append([task, c.result.run.name, c.label, f"{row['n']:,}", *cells])
    head = [DETAIL[key] for key in keys]
    return table(["task", "run", "mode", "samples", *head], lines)


def _categories(columns: Sequence[Column], length: int) -> list[str]:
    found = {c.result: c.result.content["categories"].get(str(length), {}) for c in columns}
    names = {key for means in found.values() for key, mean in means.items() if mean is not None}
    shown = [name for name in dict.fromkeys(t.category for t in TASKS.values()) if name in names]
    label = dict(zip(found, labels_apart(list(found)), strict=True))
    lines = [
        [r.run.name, label[r], *(number(means.get(name)) for name in shown)]
        for r, means in found.items()
    ]
    return [CATEGORIES, table(["run", "mode", *shown], lines)] if shown else []


def _by_hop(columns: Sequence[Column]) -> list[str]:
    having = [(c, row) for c in columns for row in c.rows.values() if row["by_hop"]]
    lines = []
    for c, row in having:
        for part in row["by_hop"]:
            cells = [number(part["gain"]), number(part["exact"], 3), number(part["nll"])]
            names = [row["task"], c.result.run.name, c.label]
            lines.append([*names, str(part["hop"]), f"{part['n']:,}", *cells])
    head = ["task", "run", "mode", "hops", "samples", "gain", "exact", "NLL"]
    return ["By the number of assignments to follow:", table(head, lines)] if lines else []


def _depths(column: Column, task: str) -> list[Row | None]:
    parts = column.rows[task]["by_depth"] if task in column.rows else []
    return parts if len(parts) == 10 else []


def _depth_key(columns: Sequence[Column], task: str) -> str:
    """Return gain, or nll for a task that has no control."""
    parts = [part for c in columns for part in _depths(c, task) if part]
    return "gain" if any(part["gain"] is not None for part in parts) else "nll"


def _by_depth(columns: Sequence[Column], tasks: Sequence[str]) -> list[str]:
    lines = []
    for task in tasks:
        key = _depth_key(columns, task)
        for c in columns:
            parts = _depths(c, task)
            cells = [_depth_cell(part, key) for part in parts]
            if parts:
                what = f"{task} ({'NLL' if key == 'nll' else key} / exact)"
                lines.append([what, c.result.run.name, c.label, *cells])
    tenths = [f"{10 * i} to {10 * i + 10} %" for i in range(10)]
    why = "By depth, the place of the gold in the length:"
    return [why, table(["task", "run", "mode", *tenths], lines)] if lines else []


def _depth_cell(part: Row | None, key: str) -> str:
    if not part or part[key] is None:
        return ""
    return f"{number(part[key], 3)} / {number(part['exact'], 2)}"


def _task_plot(columns: Sequence[Column], tasks: Sequence[str], length: int) -> Callable[[], bytes]:
    parts = []
    for key, x_label in (("gain", "gain, nats/token"), ("nll", "NLL, nats/token")):
        series = [
            c.series([c.rows[t][key] if t in c.rows else None for t in tasks], []) for c in columns
        ]
        guess = [_guess(columns, t) for t in tasks] if key == "nll" else []
        line = 0.0 if key == "gain" else None
        name = "guess" if key == "nll" else "no gain"
        parts.append(Dots(x_label, series, guess, name, line))
    return partial(dots, f"RULER at {length:,} tokens", tasks, parts)


def _depth_plot(columns: Sequence[Column], tasks: Sequence[str]) -> Callable[[], bytes]:
    parts = []
    for task in tasks:
        key, series = _depth_key(columns, task), []
        for c in columns:
            y = [part[key] if part else None for part in _depths(c, task)]
            series.append(c.series([10 * i + 5 for i in range(len(y))], y))
        y_label = "NLL, nats/token" if key == "nll" else "gain, nats/token"
        frame = Frame(task, "depth, %", y_label, ticks=(0, 50, 100), zero=key == "gain")
        parts.append((series, frame))
    return partial(panels, parts)
