"""Set runs beside each other and beside the paper: tables and plots in one Markdown file.

    python report.py out/demo-rope out/demo-rove --out out/demo

Reads config.yaml, metrics.jsonl and eval/*.json of each run folder, writes report.md and its PNGs
into --out and prints the table of perplexity by context length. Only what was measured is shown.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from rove.config import load, user_errors
from rove.report.build import build, summary, write
from rove.report.read import read_runs
from rove.runs import split_names


@dataclass(frozen=True)
class Settings:
    out: str = "out/report"
    """folder of report.md and its plots"""


def main(argv: list[str]) -> None:
    """Print and write the report of the runs that stand on the command line."""
    names, flags = split_names(argv)
    description = "Set runs beside each other: report.py RUN ... [--out DIR]"
    settings = load(Settings, flags, prog="report.py", description=description)
    with user_errors():
        if not names:
            raise ValueError("no run folders given: report.py RUN ... [--out DIR]")
        out = Path(settings.out)
        if out.exists() and not out.is_dir():
            raise ValueError(f"--out {out}: is a file; name a folder")
        sections = build(*read_runs(names))
        path = write(sections, out)
    print(summary(sections))
    n_plots = sum(len(section.plots) for section in sections)
    print(f"\nwrote {path} and {n_plots} plots")


if __name__ == "__main__":
    main(sys.argv[1:])
