"""PNGs of curves and dots. Colour and marker tell rope from rove, the line YaRN from none.

Blue and green shades are rope, red and yellow ones rove (Okabe and Ito's palette, which most eyes
can tell apart); a run keeps its shade in all plots. matplotlib is imported when something is drawn.
"""

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rove.errors import import_package
from rove.report.read import Result, Run

COLOURS = {
    "rope": ("#0072B2", "#56B4E9", "#009E73", "#000000"),
    "rove": ("#D55E00", "#E69F00", "#CC79A7", "#F0E442"),
}
MARKERS = {"rope": "o^", "rove": "sD"}  # the second where the shades begin again
SOFTWARE = "rove report.py"  # in each PNG's metadata: which files an earlier report has left
STYLE: Any = {
    **{"font.size": 9.0, "axes.titlesize": 10.0, "axes.spines.top": False},
    **{"axes.spines.right": False, "axes.grid": True, "grid.color": "#E5E5E5"},
    **{"grid.linewidth": 0.6, "axes.axisbelow": True, "lines.linewidth": 1.4},
    **{"lines.markersize": 4.5, "legend.frameon": False, "legend.fontsize": 8.0},
}


@dataclass(frozen=True)
class Series:
    """One line or one set of dots; None in y is a gap."""

    label: str
    look: dict[str, Any]
    x: Sequence[Any]
    y: Sequence[float | None]
    band: Sequence[list[float] | None] = ()
    """interval of each y"""


@dataclass(frozen=True)
class Frame:
    """What stands around the data."""

    title: str
    x_label: str
    y_label: str
    log: str = ""
    """axes that are logarithmic: "", "x" or "xy\""""
    marks: Sequence[int] = ()
    """training lengths, drawn as vertical lines"""
    ticks: Sequence[int] = ()
    """on x; where it is linear, without any it has its own"""
    zero: bool = False
    """draw a horizontal line at 0"""


@dataclass(frozen=True)
class Dots:
    """One panel of a dot plot, a row for each label."""

    x_label: str
    series: list[Series]
    """x: values, y: unused"""
    reference: Sequence[float | None] = field(default_factory=tuple)
    """a grey tick in each row"""
    reference_label: str = ""
    line: float | None = None
    """a vertical line through all rows"""


def look_of(mode: str, values: str = "yarn", number: int = 0) -> dict[str, Any]:
    """Return how a position mode is drawn, in the shade of run `number` of its arm."""
    arm, _, yarn = mode.partition("+")
    shades, markers = COLOURS[arm], MARKERS[arm]
    line = "-" if not yarn else ":" if values == "orig" else "--"
    shade = shades[number % len(shades)]
    marker = markers[number // len(shades) % len(markers)]
    hollow = {"markerfacecolor": "white"} if yarn else {}
    return {"color": shade, "linestyle": line, "marker": marker, **hollow}


def look_of_result(result: Result) -> dict[str, Any]:
    """Return how a result is drawn."""
    return look_of(result.mode, result.values, result.run.number)


def look_of_run(run: Run) -> dict[str, Any]:
    """Return how a run's training is drawn."""
    return look_of(run.arm, number=run.number)


def why_no_plots() -> str | None:
    """Return why nothing can be drawn, and the way out; None where matplotlib loads."""
    try:
        import_package("matplotlib.figure")
    except ValueError as error:
        return str(error)
    return None


@contextmanager
def _figure(width: float, height: float, n_rows: int = 1, n_columns: int = 1) -> Iterator[Any]:
    """Yield a matplotlib Figure and its axes, a list; sizes in inches."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(n_rows, n_columns, squeeze=False)
        yield figure, list(axes.flat)


def _png(figure: Any, axes: list[Any]) -> bytes:
    """Return the figure as a PNG, with the labels of all axes in one legend at its right."""
    entries = {}
    for ax in axes:
        handles, labels = ax.get_legend_handles_labels()
        entries.update({k: v for k, v in zip(labels, handles, strict=True) if k not in entries})
    if entries:
        handles, labels = list(entries.values()), list(entries)
        figure.legend(handles, labels, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    file = io.BytesIO()
    metadata = {"Software": SOFTWARE}
    figure.savefig(file, format="png", dpi=150, metadata=metadata, bbox_inches="tight")
    return file.getvalue()


def _floats(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _draw_curves(ax: Any, series: Sequence[Series], frame: Frame) -> None:
    for s in series:
        ax.plot(s.x, _floats(s.y), label=s.label, **s.look)
        if any(s.band):
            low, high = zip(*(band or (math.nan, math.nan) for band in s.band), strict=True)
            ax.fill_between(s.x, low, high, color=s.look["color"], alpha=0.15, linewidth=0)
    for length in frame.marks:
        label = f"trained at {length:,}"
        ax.axvline(length, color="#666666", linewidth=0.9, linestyle=(0, (1, 2)), label=label)
    if frame.zero:
        ax.axhline(0, color="#666666", linewidth=0.8)
    ax.set(title=frame.title, xlabel=frame.x_label, ylabel=frame.y_label)
    _scale(ax, series, frame)


def _scale(ax: Any, series: Sequence[Series], frame: Frame) -> None:
    """Make axes logarithmic, with plain numbers at their ticks."""
    from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    if "x" in frame.log:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_minor_locator(NullLocator())
    else:
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    if frame.ticks:
        ax.set_xticks(frame.ticks, labels=[f"{tick:,}" for tick in frame.ticks])
        ax.tick_params(axis="x", labelrotation=30 if len(frame.ticks) > 8 else 0)
    if "y" in frame.log:
        known = [y for s in series for y in s.y if y is not None and y > 0]
        ratio = max(known) / min(known) if known else 1.0
        ax.set_yscale("log")
        between = (1, 1.5, 2, 3, 4, 6, 8) if ratio < 30 else (1, 2, 5)
        ax.yaxis.set_major_locator(LogLocator(subs=between) if ratio > 3 else MaxNLocator(6))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def curves(series: Sequence[Series], frame: Frame) -> bytes:
    """Return a plot of lines over x."""
    with _figure(6.4, 3.8) as (figure, axes):
        _draw_curves(axes[0], series, frame)
        return _png(figure, axes)


def panels(parts: Sequence[tuple[Sequence[Series], Frame]]) -> bytes:
    """Return plots of lines side by side, at most three in a row."""
    n_columns = min(3, len(parts))
    n_rows = -(-len(parts) // n_columns)
    width = 4.2 if n_columns == 1 else 2.9 * n_columns
    with _figure(width, 2.3 * n_rows + 0.3, n_rows, n_columns) as (figure, axes):
        for ax, (series, frame) in zip(axes, parts, strict=False):
            _draw_curves(ax, series, frame)
        for ax in axes[len(parts) :]:
            ax.remove()
        return _png(figure, axes[: len(parts)])


def dots(title: str, labels: Sequence[str], parts: Sequence[Dots]) -> bytes:
    """Return panels of dots, side by side over the same rows, the first label on top."""
    n = len(labels)
    with _figure(2.6 + 2.9 * len(parts), 0.9 + 0.26 * n, 1, len(parts)) as (figure, axes):
        for ax, part in zip(axes, parts, strict=True):
            spread = 0.5 / max(len(part.series), 1)
            for i, s in enumerate(part.series):
                shift = (i - (len(part.series) - 1) / 2) * spread
                look = s.look | {"linestyle": "none"}
                ax.plot(_floats(s.x), [row + shift for row in range(n)], label=s.label, **look)
            if any(value is not None for value in part.reference):
                at, label = _floats(part.reference), part.reference_label
                look = {"color": "#666666", "linestyle": "none", "marker": "|", "markersize": 11}
                ax.plot(at, range(n), label=label, **look)
            if part.line is not None:
                ax.axvline(part.line, color="#666666", linewidth=0.9, label=part.reference_label)
            ax.set(xlabel=part.x_label, ylim=(n - 0.5, -0.5))
            ax.locator_params(axis="x", nbins=5)
            ax.set_yticks(range(n), labels=labels if ax is axes[0] else [""] * n)
        figure.suptitle(title, fontsize=STYLE["axes.titlesize"])
        return _png(figure, axes)
