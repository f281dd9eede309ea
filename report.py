"""Set runs beside each other and beside the paper: tables and plots in one Markdown file.

    python report.py out/demo-rope out/demo-rove --out out/demo

Reads config.yaml, metrics.jsonl and eval/*.json of each run folder, writes report.md and its PNGs
into --out and prints the table of perplexity by context length. Only what was measured is shown.
With --wandb offline or online all of it also goes to wandb, to the runs that training has there.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from rove.config import load
from rove.errors import user_errors
from rove.files import check_folder
from rove.report.build import build, summary, write
from rove.report.plots import why_no_plots
from rove.report.publish import publish
from rove.report.read import read_runs
from rove.runs import split_names
from rove.tracking import Mode


@dataclass(frozen=True)
class Settings:
    out: str = "out/report"
    """folder of report.md and its plots"""
    wandb: Mode = "disabled"
    """send results, plots and report to the runs' wandb runs too; offline: for wandb sync"""
    wandb_project: str = "rove"
    """wandb project, the one of the training"""


def main(argv: list[str]) -> None:
    """Print and write the report of the runs that stand on the command line."""
    names, flags = split_names(argv)
    description = "Set runs beside each other: report.py RUN ... [--out DIR]"
    settings = load(Settings, flags, prog="report.py", description=description)
    with user_errors():
        if not all(names) or not names:
            raise ValueError("no run folders given: report.py RUN ... [--out DIR]")
        out = Path(settings.out)
        check_folder("--out", out)
        runs, results = read_runs(names)
        sections = build(runs, results)
        if why := why_no_plots():
            print(f"notice: no plots: {why}")
            sections = [replace(section, plots={}) for section in sections]
        path = write(sections, out)
        print(summary(sections))
        plots = [out / name for section in sections for name in section.plots]
        print(f"\nwrote {path} and {len(plots)} plots", flush=True)
        if settings.wandb != "disabled":
            publish(runs, results, [path, *plots], settings.wandb, settings.wandb_project)
            print(f"sent to wandb ({settings.wandb}): {len(runs)} runs")


if __name__ == "__main__":
    main(sys.argv[1:])
