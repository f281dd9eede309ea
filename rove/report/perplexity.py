"""Perplexity against context, a section for each protocol, and loss by position."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rove.evals.schema import BY_LENGTH
from rove.report.plots import Frame, Series, curves, look_of_result
from rove.report.read import Result
from rove.report.tables import Section, check_same, labels_apart, number, table, with_interval

Row = dict[str, Any]
WHAT = {
    "packed": "The stream is tiled with windows of L tokens and every position counts: a target "
    "sees 0 to L - 1 tokens of context, so the shorter the windows, the more targets see little.",
    "tail": "Only the last w targets before fixed places are scored, w at most 256 and at most the "
    "shortest L: each has L - w to L tokens of context.",
    "sliding": "Windows of L tokens move along long documents: but for a document's first window, "
    "only the targets that are new in a window are scored.",
}
DEGRADATION = (
    "Degradation D(L) = NLL(L) - NLL(training length), nats/token: what a longer context costs "
    "(positive) or gives (negative), whatever the level."
)
INTERVALS = "In brackets and as bands: 95 % intervals, as the result files have them."


def by_length_sections(results: Sequence[Result]) -> list[Section]:
    """Return a section for each protocol that was measured; ValueError for different targets."""
    sections = []
    for protocol in BY_LENGTH:
        for is_masked in (False, True):
            key = ("perplexity", protocol, is_masked)
            found = [r for r in results if key == _key(r)]
            if found:
                sections.append(_by_length(found, protocol, is_masked))
    return sections


def _key(result: Result) -> tuple[Any, ...]:
    return tuple(result.content.get(key) for key in ("kind", "protocol", "mask_eot"))


def shown_rows(result: Result) -> dict[int, Row]:
    """Return by length the row that the main tables show.

    It is the one with the usual factor, max(1, length / block_size) under YaRN, else the only one.
    """
    rows: dict[int, Row] = {}
    for length in {row["length"] for row in result.content["results"]}:
        here = [row for row in result.content["results"] if row["length"] == length]
        usual = [row for row in here if is_usual(result, row)]
        if usual or len(here) == 1:
            rows[length] = (usual or here)[0]
    return rows


def is_usual(result: Result, row: Row) -> bool:
    """Whether a row has the YaRN factor that its length takes by itself."""
    return math.isclose(row["yarn_factor"], result.usual_factor(row["length"]))


def _by_length(results: list[Result], protocol: str, is_masked: bool) -> Section:
    _check_targets(results)
    of = [shown_rows(r) for r in results]
    rows = [row for by_length in of for row in by_length.values()]
    lengths = sorted({row["length"] for r in results for row in r.content["results"]})
    wide = partial(_wide, results, of, lengths)
    targets = results[0].content["results"][0]["tokens"]
    masked = ", end-of-text not scored" if is_masked else ""
    where = f"{targets:,} targets, the same in every cell, protocol {protocol}{masked}"
    parts = [f"Perplexity by context length ({where}):", wide(ppl_text)]
    parts.append(WHAT[protocol] + " Numbers of different protocols are not comparable.")
    has_band = any(row["interval"] for row in rows)
    if has_band or any(row["ppl"] is None for row in rows):
        parts.append(f"NLL, nats/token. {INTERVALS if has_band else ''}")
        parts.append(wide(lambda row: with_interval(row["nll"], row["interval"])))
    end = f"{protocol}{'_no_eot' if is_masked else ''}.png"
    frame = partial(Frame, x_label="context, tokens", marks=_contexts(results), ticks=lengths)
    about = frame(f"Perplexity, protocol {protocol}{masked}", y_label="perplexity", log="xy")
    plots = {f"perplexity_{end}": _plot(results, of, ("ppl", "interval"), about)}
    if protocol == "tail" and any(row["degradation"] is not None for row in rows):
        key, interval = "degradation", "degradation_interval"
        parts += [DEGRADATION, wide(lambda row: with_interval(row[key], row[interval]))]
        about = frame(f"Degradation{masked}", y_label="D(L), nats/token", log="x", zero=True)
        plots[f"{key}_{end}"] = _plot(results, of, (key, interval), about)
    if any(row["bits_per_byte"] is not None for row in rows):
        parts.append("Bits per byte of text, end-of-text left out:")
        parts.append(wide(lambda row: number(row["bits_per_byte"])))
    text = _join([*parts, *_grid(results, lengths)])
    return Section(f"Perplexity by context length: {protocol}{masked}", text, plots)


def _contexts(results: Sequence[Result]) -> list[int]:
    return sorted({r.content["block_size"] for r in results})


def _join(parts: list[str]) -> str:
    return "\n\n".join(part.strip() for part in parts)


def _check_targets(results: list[Result]) -> None:
    """Raise ValueError unless every row of every result counts the same targets."""
    for r in results:
        counts = {row["tokens"] for row in r.content["results"]}
        if len(counts) > 1:
            lengths = f"lengths have {', '.join(map(str, sorted(counts)))} targets"
            raise ValueError(f"{r.file}: {lengths}, not the same ones; evaluate it anew")
    targets = [(r.content["data"], r.content["results"][0]["tokens"]) for r in results]
    check_same(results, targets, "data or tokens")


def ppl_text(row: Row) -> str:
    """Return a row's perplexity, which may be too large to have been written down."""
    return "over e^700" if row["ppl"] is None else number(row["ppl"], 2)


def _wide(
    results: Sequence[Result],
    rows: Sequence[dict[int, Row]],
    lengths: Sequence[int],
    text: Callable[[Row], str],
) -> str:
    """Return a table with a column for each length; an unusual factor stands in its cell."""
    contexts = _contexts(results)
    marks = [f"{length}{' (trained)' if length in contexts else ''}" for length in lengths]
    lines = []
    for r, label, of in zip(results, labels_apart(results), rows, strict=True):
        cells = []
        for length in lengths:
            cell = text(of[length]) if length in of else ""
            if cell and not is_usual(r, of[length]):
                cell += f" (s={of[length]['yarn_factor']:g})"
            cells.append(cell)
        lines.append([r.run.name, label, *cells])
    return table(["run", "mode", *marks], lines)


def _grid(results: Sequence[Result], lengths: Sequence[int]) -> list[str]:
    """Return a table of perplexity by YaRN factor, for results with several at a length."""
    lines = []
    for r, label in zip(results, labels_apart(results), strict=True):
        rows = r.content["results"]
        if len({row["length"] for row in rows}) == len(rows):
            continue
        for factor in sorted({row["yarn_factor"] for row in rows}):
            of = {row["length"]: ppl_text(row) for row in rows if row["yarn_factor"] == factor}
            cells = [of.get(length, "") for length in lengths]
            lines.append([r.run.name, label, f"{factor:g}", *cells])
    head = ["run", "mode", "factor", *map(str, lengths)]
    return ["Perplexity by YaRN factor s:", table(head, lines)] if lines else []


def _plot(
    results: Sequence[Result], of: Sequence[dict[int, Row]], keys: tuple[str, str], frame: Frame
) -> Callable[[], bytes]:
    """Return what draws a plot by length. keys: of the values, and of their intervals in nats."""
    series = []
    for r, label, by_length in zip(results, labels_apart(results), of, strict=True):
        rows = [by_length[length] for length in sorted(by_length)]
        x, y = [row["length"] for row in rows], [row[keys[0]] for row in rows]
        bands = [row[keys[1]] for row in rows]
        if keys[0] == "ppl":
            bands = [band and [_exp(end) for end in band] for band in bands]
        series.append(Series(f"{r.run.short} {label}", look_of_result(r), x, y, bands))
    return partial(curves, series, frame)


def _exp(nll: float) -> float:
    return math.exp(nll) if nll < 700 else math.nan


def position_sections(results: Sequence[Result]) -> list[Section]:
    """Return a section for each length of windows seen by position."""
    found = [r for r in results if r.content.get("protocol") == "positions"]
    keys = sorted({_window(r) for r in found})
    return [_positions([r for r in found if _window(r) == key], *key) for key in keys]


def _window(result: Result) -> tuple[int, bool]:
    return max(row["to"] for row in result.content["results"]), result.content["mask_eot"]


def _positions(results: list[Result], length: int, is_masked: bool) -> Section:
    def bins(r: Result) -> list[tuple[int, int, int]]:
        return sorted({(row["from"], row["to"], row["tokens"]) for row in r.content["results"]})

    check_same(results, [(r.content["data"], bins(r)) for r in results], "data, bins or tokens")
    edges = [(start, stop) for start, stop, _ in bins(results[0])]
    lines, series = [], []
    for r, label in zip(results, labels_apart(results), strict=True):
        for factor in sorted({row["yarn_factor"] for row in r.content["results"]}):
            rows = [row for row in r.content["results"] if row["yarn_factor"] == factor]
            of = {(row["from"], row["to"]): row["nll"] for row in rows}
            name = label + (f", s={factor:g}" if "+yarn" in r.mode else "")
            lines.append([r.run.name, name, *(number(of.get(edge)) for edge in edges)])
            x = [x for a, b in edges for x in (max(a, b / 2), b)]
            y = [of.get(edge) for edge in edges for _ in range(2)]
            look = look_of_result(r) | {"markevery": 2}
            series.append(Series(f"{r.run.short} {name}", look, x, y))
    masked = ", end-of-text not scored" if is_masked else ""
    total = sum(tokens for _, _, tokens in bins(results[0]))
    text = (
        f"NLL in nats/token by position in windows of {length:,} tokens ({total:,} targets, "
        f"protocol positions{masked}). In the plot the first bin begins at half its end.\n\n"
    )
    text += table(["run", "mode", *(f"[{a}, {b})" for a, b in edges)], lines)
    marks = [context for context in _contexts(results) if context < length]
    ticks = [edges[0][1] // 2, *(b for _, b in edges)]
    frame = Frame("Loss by position", "position, tokens", "NLL, nats/token", "x", marks, ticks)
    name = f"positions_{length}{'_no_eot' if is_masked else ''}.png"
    title = f"Loss by position in windows of {length:,}{masked}"
    return Section(title, text, {name: partial(curves, series, frame)})
