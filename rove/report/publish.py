"""The report sent to wandb: what was measured of a run stands beside that run's training."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rove.checkpoint import latest_path, read_checkpoint
from rove.errors import how_to_install
from rove.report.core import AGGREGATES, core_labels
from rove.report.lm_eval import metrics_of
from rove.report.perplexity import is_usual
from rove.report.read import Result, Run
from rove.report.tables import labels_apart
from rove.tracking import Mode, start_run

Row = dict[str, Any]
COLUMNS = {
    "perplexity": ("length", "nll", "ppl", "bits_per_byte", "yarn_factor", "tokens"),
    "positions": ("from", "to", "nll", "yarn_factor", "tokens"),
    "core": ("task", "accuracy", "centered_v1", "centered_v2", "n"),
    "ruler": ("task", "length", "nll", "gain", "exact", "string_match", "yarn_factor", "n"),
    "lm_eval": ("task", "metric", "value", "stderr"),
}
SCALARS = {"perplexity": ("nll", "ppl", "bits_per_byte"), "ruler": ("nll", "gain", "exact")}


def publish(
    runs: Sequence[Run], results: Sequence[Result], files: Sequence[Path], mode: Mode, project: str
) -> None:
    """Send to each run's own wandb run its results as tables and numbers, and the report.

    The wandb run is the one that the latest checkpoint names, else a new one with the folder's
    name. files: the report's Markdown and PNGs. Raises ValueError when wandb is missing or fails.
    """
    ids = [_wandb_id(run.folder) for run in runs]
    try:
        for run, run_id in zip(runs, ids, strict=True):
            name = run.folder.resolve().name if run_id is None else None
            made = start_run(run.folder, mode, project, name, run_id, run.config)
            try:  # no `with`, which would print a traceback
                _send(made, run, [r for r in results if r.run is run], files)
            finally:
                made.finish()
    except ImportError as error:
        remedy = how_to_install("requirements.txt")
        raise ValueError(f"--wandb {mode}: no wandb ({error}); {remedy}") from error
    except (Exception, SystemExit) as error:  # wandb raises many kinds
        done = "the report's own files are written"
        raise ValueError(f"--wandb {mode}: {error!r:.300}; {done}") from error


def _wandb_id(folder: Path) -> str | None:
    """Return the id of the wandb run that a run's latest checkpoint names; None for none."""
    latest = latest_path(folder)
    if latest is None:
        return None
    found: str | None = read_checkpoint(latest, trusted=True, mmap=True)["wandb_run_id"]
    return found


def _send(made: Any, run: Run, results: Sequence[Result], files: Sequence[Path]) -> None:
    import wandb

    row: Row = {}
    for result in results:
        if result.content["kind"] == "structure":  # no scores, and lists by offset
            continue
        columns, rows = table_of(result)
        row[f"eval/{result.file.stem}"] = wandb.Table(columns=[*columns], data=rows)
    texts = [[p.name, p.read_text(encoding="utf-8")] for p in run.folder.glob("samples*.txt")]
    if texts:
        row["samples"] = wandb.Table(columns=["file", "text"], data=sorted(texts))
    plots = [path for path in files if path.suffix == ".png"]
    row |= {f"report/{path.stem}": wandb.Image(str(path)) for path in plots}
    made.log(row)
    # `wandb sync` puts this summary in place of the training's
    last = {key: value for line in run.rows for key, value in line.items() if value is not None}
    made.summary.update(last | dict(scalars(results)))
    for path in [path for path in files if path not in plots]:
        own = Path(made.dir) / path.name  # a copy: wandb would link to a file that changes
        shutil.copy(path, own)
        made.save(str(own), base_path=made.dir, policy="now")


def table_of(result: Result) -> tuple[list[str], list[list[Any]]]:
    """Return column names and rows of one result; what was not measured is None."""
    content = result.content
    if content["kind"] == "core":
        rows = [{"task": task, **row} for task, row in content["tasks"].items()]
    elif content["kind"] == "lm_eval":
        measured = metrics_of(content).items()
        rows = [
            dict(zip(COLUMNS["lm_eval"], (*key, *value), strict=True)) for key, value in measured
        ]
    else:
        rows = content["results"]
    is_by_position = content.get("protocol") == "positions"
    columns = COLUMNS["positions" if is_by_position else content["kind"]]
    cells = [[result.label, *(row[column] for column in columns)] for row in rows]
    return ["mode", *columns], cells


def scalars(results: Sequence[Result]) -> Iterator[tuple[str, float]]:
    """Yield each number of some results with its name: eval/perplexity/rove+yarn/2048/nll.

    A mode that stands twice has its file behind it, a row with an unusual YaRN factor has it too.
    """
    kinds = [_kind(result) for result in results]
    for kind in dict.fromkeys(kinds):
        group = [r for r, own in zip(results, kinds, strict=True) if own == kind]
        label_of = core_labels if kind in ("core", "lm_eval") else labels_apart
        for result, label in zip(group, label_of(group), strict=True):
            for name, value in _named(result, label):
                if value is not None:
                    yield f"eval/{kind}/{name}", value


def _kind(result: Result) -> str:
    """Return what was measured: core, ruler, perplexity (packed), perplexity_tail_no_eot, ..."""
    protocol = result.content.get("protocol", "packed")
    masked = "_no_eot" if result.content.get("mask_eot") else ""
    return result.content["kind"] + (f"_{protocol}" if protocol != "packed" else "") + masked


def _named(result: Result, label: str) -> Iterator[tuple[str, float | None]]:
    content = result.content
    if content["kind"] == "core":
        keys = [f"{key}_{version}" for key in AGGREGATES for version in ("v1", "v2")]
        yield from ((f"{label}/{key}", content[key]) for key in keys)
    elif content["kind"] == "lm_eval":
        yield from (
            (f"{label}/{a}/{b}", value) for (a, b), (value, _) in metrics_of(content).items()
        )
    elif content["kind"] in SCALARS and content.get("protocol") != "positions":  # that is a curve
        for row in content["results"]:
            own = label if is_usual(result, row) else f"{label}, s={row['yarn_factor']:g}"
            place = "/".join([own, str(row["length"]), *([row["task"]] if "task" in row else [])])
            yield from ((f"{place}/{key}", row[key]) for key in SCALARS[content["kind"]])
