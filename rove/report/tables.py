"""Markdown: sections, tables, and numbers as they stand in a cell (empty: not measured)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rove.report.read import Result


@dataclass(frozen=True)
class Section:
    """A part of the report."""

    title: str
    text: str
    plots: dict[str, Callable[[], bytes]] = field(default_factory=dict)
    """what draws a PNG, by its file name; each is shown below the text"""

    def markdown(self) -> str:
        """Return heading, text and images."""
        images = [f"![{self.title}]({name})" for name in self.plots]
        return "\n\n".join([f"## {self.title}", self.text.strip(), *images]) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; a bar within a cell is escaped."""
    lines = [_line(head), "|" + "---|" * len(head)]
    for row in rows:
        assert len(row) == len(head), (head, row)
        lines.append(_line(row))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", r"\|") for cell in cells) + " |"


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with a fixed number of digits, or nothing."""
    if value is None:
        return ""
    text = f"{value:.3e}" if abs(value) >= 1e7 else f"{value:.{digits}f}"
    return text if float(text) else text.lstrip("-")


def with_interval(value: float | None, interval: list[float] | None, digits: int = 4) -> str:
    """Return a number and behind it its interval in brackets, where there is one."""
    if value is None or interval is None:
        return number(value, digits)
    low, high = (number(end, digits) for end in interval)
    return f"{number(value, digits)} [{low}, {high}]"


def labels_apart(results: Sequence[Result]) -> list[str]:
    """Return a label for each result, with the file where two of a run would read the same."""
    labels = [(r.run.name, r.label) for r in results]
    return [
        f"{r.label} ({r.file.stem})" if labels.count(label) > 1 else r.label
        for r, label in zip(results, labels, strict=True)
    ]


def check_same(results: Sequence[Result], targets: Sequence[Any], what: str) -> None:
    """Raise ValueError unless all results were measured on the same targets."""
    for result, own in zip(results, targets, strict=True):
        if own != targets[0]:
            two = f"{results[0].file} and {result.file}"
            raise ValueError(f"{two}: different targets ({what}); evaluate them alike")
