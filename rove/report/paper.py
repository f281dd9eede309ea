"""The paper's tables (arXiv 2606.11275), with our numbers where models are of its size."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from rove.report.core import how
from rove.report.perplexity import is_usual
from rove.report.read import Result, Run
from rove.report.tables import Section, number, table

SCALES = {(12, 12, 768, 1024, 50257): "124M", (24, 16, 1024, 1024, 50257): "354M"}
METHODS = {"rope": "RoPE", "rove": "RoVE", "rope+yarn": "RoPE + YaRN", "rove+yarn": "RoVE + YaRN"}
INSIDE = {  # CORE, perplexity at 512 and at 1024
    ("124M", "rope"): (0.1375, 25.23, 22.37),
    ("124M", "rove"): (0.1416, 25.05, 22.30),
    ("354M", "rope"): (0.1664, 17.68, 15.64),
    ("354M", "rove"): (0.1856, 17.52, 15.52),
}
TARGETS = 10_485_760  # of a full evaluation; fewer are told
OUTSIDE_LENGTHS = (2048, 4096, 8192, 16384)
OUTSIDE = {
    "rope": (293.24, 840.10, 1412.76, 1630.72),
    "rove": (133.68, 311.38, 458.15, 583.84),
    "rope+yarn": (16.05, 48.61, 154.61, 270.98),
    "rove+yarn": (15.78, 18.40, 35.95, 124.82),
}
RULER_COLUMNS = ("CWE", "NIAH", "QA", "VT", "average")
RULER = {
    "rope+yarn": (4.31, 7.61, 6.40, 4.53, 6.62),
    "rove+yarn": (4.39, 3.63, 5.61, 2.11, 4.33),
}
INTRO = (
    "Each cell: paper / ours, ours empty where nothing was measured. Ours are finished runs with "
    "the paper's shape (124M: 12/12/768, 354M: 24/16/1024, context 1024) and GPT-2's vocabulary, "
    "in the mode they were trained for; of several, the mean (of perplexities: exp of mean NLL)."
)
INSIDE_NOTE = (
    "In distribution. Unsaid in the paper: optimizer, learning rates and seeds, the held-out text "
    "and how windows were cut, how CORE prompts beyond 1024 tokens were cut. Ours: CORE v1, its "
    "truncation named; perplexity of protocol packed."
)
OUTSIDE_NOTE = (
    "Out of distribution, perplexity. Unsaid in the paper: the text and windows, YaRN's factor at "
    "each length, which frequencies the values took. Ours: protocol packed, factor length / 1024."
)
RULER_NOTE = (
    "RULER at 4k, NLL of the answer. Unsaid in the paper: NLL per token or per answer, the "
    "haystack, samples, which tasks form a category, YaRN's factor. Ours: nats/token, means over "
    "the tasks that were run; nothing beside the paper's average, whose weighting is unknown."
)


def scale_of(result: Result) -> str | None:
    """Return 124M or 354M for a finished run of that size in its own mode, else None."""
    model = result.run.config["model"]
    keys = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
    scale = SCALES.get(tuple(model.get(key) for key in keys))
    return scale if result.is_final and not result.is_retrofit else None


def paper_section(results: Sequence[Result]) -> Section:
    """Return the paper's three tables with ours beside them."""
    ours = [r for r in results if scale_of(r) is not None]
    parts = [INTRO, INSIDE_NOTE, _inside(ours), OUTSIDE_NOTE, _outside(ours)]
    return Section("Beside the paper", "\n\n".join([*parts, RULER_NOTE, _ruler(ours)]))


def _pick(ours: Sequence[Result], kind: str, scale: str, mode: str, values: str) -> list[Result]:
    wanted = (kind, scale, mode, values)
    return [r for r in ours if (r.content["kind"], scale_of(r), r.mode, r.values) == wanted]


def _cell(paper: float | None, digits: int, ours: str) -> str:
    return f"{number(paper, digits)} / {ours}"


def _mean(values: Iterable[tuple[Result, float]], show: Callable[[float], str]) -> str:
    """Return the mean over runs, of each run its first value; nothing where there is none."""
    by_run: dict[Run, float] = {}
    for result, value in values:
        by_run.setdefault(result.run, value)
    runs = f" ({len(by_run)} runs)" if len(by_run) > 1 else ""
    return show(fmean(by_run.values())) + runs if by_run else ""


def _perplexity(results: Sequence[Result], length: int) -> str:
    """Return exp of the mean NLL at a length with its usual factor, protocol packed."""
    packed = [r for r in results if r.content.get("protocol") == "packed"]
    rows = [(r, row) for r in packed if not r.content["mask_eot"] for row in r.content["results"]]
    rows = [(r, row) for r, row in rows if row["length"] == length and is_usual(r, row)]
    nll = [(r, row["nll"]) for r, row in rows]
    text = _mean(nll, lambda mean: number(math.exp(mean), 2) if mean < 700 else "over e^700")
    notes = [f"{row['tokens']:,} targets" for _, row in rows[:1] if row["tokens"] < TARGETS]
    notes += [str(r.content["dtype"]) for r, _ in rows[:1] if r.content["dtype"] != "float32"]
    return f"{text} ({', '.join(notes)})" if notes else text


def _core(results: Sequence[Result]) -> str:
    """Return CORE v1 for each truncation; a capped CORE is another evaluation."""
    ways: dict[str, list[tuple[Result, float]]] = {}
    for r in results:
        if r.content["core_v1"] is not None and r.content["max_per_task"] is None:
            n_items = sum(task["n"] for task in r.content["tasks"].values())
            way = f"{how(r)}, {n_items:,} items"
            ways.setdefault(way, []).append((r, r.content["core_v1"]))
    return ", ".join(f"{_mean(found, number)} ({way})" for way, found in ways.items())


def _inside(ours: Sequence[Result]) -> str:
    rows = []
    for (scale, mode), (core, *ppl) in INSIDE.items():
        results = _pick(ours, "perplexity", scale, mode, "yarn")
        cells = [_cell(core, 4, _core(_pick(ours, "core", scale, mode, "yarn")))]
        for paper, length in zip(ppl, (512, 1024), strict=True):
            cells.append(_cell(paper, 2, _perplexity(results, length)))
        rows.append([scale, METHODS[mode], *cells])
    return table(["scale", "method", "Core ICL (up)", "PPL @512", "PPL @1024"], rows)


def _outside(ours: Sequence[Result]) -> str:
    rows = []
    for mode, paper, values in _variants(OUTSIDE, ours, "perplexity"):
        results = _pick(ours, "perplexity", "354M", mode, values)
        cells = [
            _cell(figure, 2, _perplexity(results, length))
            for figure, length in zip(paper, OUTSIDE_LENGTHS, strict=True)
        ]
        rows.append(["354M", _method(mode, values), *cells])
    return table(["scale", "method", *map(str, OUTSIDE_LENGTHS)], rows)


def _variants(
    paper: Mapping[str, tuple[float, ...]], ours: Sequence[Result], kind: str
) -> list[tuple[str, tuple[float | None, ...], str]]:
    """Return the paper's rows, and one of ours alone where values at the original rate were run."""
    rows: list[tuple[str, tuple[float | None, ...], str]] = [
        (m, p, "yarn") for m, p in paper.items()
    ]
    if _pick(ours, kind, "354M", "rove+yarn", "orig"):
        rows.append(("rove+yarn", (None,) * len(paper["rove+yarn"]), "orig"))
    return rows


def _method(mode: str, values: str) -> str:
    return METHODS[mode] + (", values orig" if values == "orig" else "")


def _ruler(ours: Sequence[Result]) -> str:
    rows = []
    for mode, paper, values in _variants(RULER, ours, "ruler"):
        results = _pick(ours, "ruler", "354M", mode, values)
        plain = [(r, r.content["categories"].get("4096", {})) for r in results if _is_plain(r)]
        cells = []
        for figure, name in zip(paper, RULER_COLUMNS, strict=True):
            known = [(r, means[name]) for r, means in plain if means.get(name) is not None]
            ours_text = _mean(known, lambda mean: number(mean, 2)) if name != "average" else ""
            cells.append(_cell(figure, 2, ours_text))
        rows.append(["354M", _method(mode, values), *cells])
    return table(["scale", "method", *RULER_COLUMNS], rows)


def _is_plain(result: Result) -> bool:
    """Whether a RULER result took the usual factor at 4096, so that its means are of that."""
    rows = [row for row in result.content["results"] if row["length"] == 4096]
    return bool(rows) and all(is_usual(result, row) for row in rows)
