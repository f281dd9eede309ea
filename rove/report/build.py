"""The sections in their order, and the files that they become."""

import re
from collections.abc import Sequence
from pathlib import Path

from rove.files import write_atomic
from rove.report.arms import arms_section
from rove.report.core import core_sections
from rove.report.lm_eval import lm_eval_sections
from rove.report.paper import paper_section
from rove.report.perplexity import by_length_sections, position_sections
from rove.report.plots import SOFTWARE
from rove.report.read import Result, Run
from rove.report.ruler import ruler_sections
from rove.report.tables import Section
from rove.report.training import runs_section, training_section

REPORT = "report.md"


def build(runs: Sequence[Run], results: Sequence[Result]) -> list[Section]:
    """Return the report's sections; ValueError where results are not on the same targets."""
    training = training_section(runs)
    return [
        runs_section(runs),
        *([] if training is None else [training]),
        *by_length_sections(results),
        *position_sections(results),
        *core_sections(results),
        *ruler_sections(results),
        *lm_eval_sections(results),
        arms_section(runs, results),
        paper_section(results),
    ]


def summary(sections: Sequence[Section]) -> str:
    """Return what to print: the first table of perplexity, else the runs."""
    first = next((s for s in sections if s.title.startswith("Perplexity")), sections[0])
    return "\n\n".join(first.text.split("\n\n")[:2])


def write(sections: Sequence[Section], out: Path) -> Path:
    """Write report.md and its plots into a folder, each file atomically; return report.md's path.

    Plots that an earlier report left there and this one does not show are removed.
    """
    out.mkdir(parents=True, exist_ok=True)
    plots = {name: draw() for section in sections for name, draw in section.plots.items()}
    assert len(plots) == sum(len(section.plots) for section in sections), "names differ"
    for name, png in plots.items():
        _write(out / name, png)
    text = "\n".join(["# Report\n", *(section.markdown() for section in sections)])
    _write(out / REPORT, text.encode())
    for path in sorted(out.glob("*.png")):
        if path.name not in plots and _is_ours(path):
            path.unlink()
    return out / REPORT


def _write(path: Path, content: bytes) -> None:
    write_atomic(path, lambda file: file.write(content))


def _is_ours(path: Path) -> bool:
    """Whether a PNG was drawn by a report: its metadata say so, near its beginning."""
    with path.open("rb") as file:
        return re.search(rb"Software\0" + SOFTWARE.encode(), file.read(500)) is not None
