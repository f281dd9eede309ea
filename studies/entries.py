"""What is kept of a run: its arm, seed, settings and data by their hashes, losses, measurements."""

import hashlib
import json
from pathlib import Path
from typing import Any

import yaml

from rove.files import write_atomic
from rove.metrics import read_metrics
from studies.experiments import Trial

GRID = "grid"  # how the names of a grid's results begin
FREE = ("out_dir", "seed", "data", "dry_run", "log")  # settings that tell runs of an arm apart


def make_entry(trial: Trial, run: Path) -> dict[str, Any]:
    """Return the entry of a trial whose run is trained and measured."""
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    settings = {key: value for key, value in config.items() if key not in FREE}
    settings["train"] = {k: v for k, v in settings["train"].items() if k != "init_from"}
    rows = read_metrics(run)
    every = max(1, len(rows) // 20)
    curve = [[row["step"], round(row["train/loss"], 4)] for row in rows[every - 1 :: every]]
    return {
        "experiment": trial.experiment,
        "variant": trial.variant,
        "arm": trial.arm,
        "seed": trial.seed,
        "config_sha256": _hash(settings),
        "data_sha256": data_hash(run),
        "train_loss": curve,
        "val_loss": rows[-1]["val/loss"],
        **measurements(run),
    }


def measurements(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Return what was measured of a run: `cells`, and apart from them `grid`, over YaRN's factors.

    Losses by block of text, which intervals need, are kept of the cells alone.
    """
    found: dict[str, list[dict[str, Any]]] = {"cells": [], "grid": []}
    for path in sorted(run.glob("eval/*.json")):
        if path.stem.startswith(GRID):
            found["grid"] += [
                {k: v for k, v in c.items() if k != "block_nll"} for c in _cells(path)
            ]
        else:
            found["cells"] += _cells(path)
    return found


def data_hash(run: Path) -> str:
    """Return a hash of the shards that a run was trained and validated on."""
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    manifest = json.loads((Path(config["data"]["dir"]) / "manifest.json").read_text("utf-8"))
    return _hash([shard["sha256"] for shard in manifest["shards"]])


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _cells(path: Path) -> list[dict[str, Any]]:
    """Return the measurements of a result file: mode, values, length, factor, 5 decimals."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["kind"] == "window":
        return [
            {key: round(x, 5) if isinstance(x, float) else x for key, x in cell.items()}
            for cell in content["cells"]
        ]
    common = {"mode": content["pos_mode"], "yarn_values": content["yarn_values"]}
    cells = []
    for row in content["results"]:
        cell = common | {key: row[key] for key in ("length", "yarn_factor", "tokens")}
        cell["nll"] = round(row["nll"], 5)
        cell["block_nll"] = [round(x, 5) for x in row["block_nll"]]
        cells.append(cell)
    return cells


def collect(experiment: str, out: Path) -> int:
    """Write OUT/EXPERIMENT.json of its entries and those of finished runs; return how many."""
    path = out / f"{experiment}.json"
    runs = sorted((out / "runs" / experiment).rglob("entry.json"))
    found = read_entries(path) + [json.loads(run.read_text(encoding="utf-8")) for run in runs]
    by_run = {key_of(e): e for e in found}
    entries = [by_run[key] for key in sorted(by_run)]
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
    text = f'{{"experiment": "{experiment}", "entries": [\n{lines}\n]}}\n'
    write_atomic(path, lambda file: file.write(text.encode()))
    return len(entries)


def key_of(entry: dict[str, Any]) -> tuple[str, int, str]:
    """Return what tells the runs of an experiment apart."""
    return entry["variant"], entry["seed"], entry["arm"]


def read_entries(path: Path) -> list[dict[str, Any]]:
    """Return the entries of OUT/EXPERIMENT.json; none where there is no such file.

    ValueError for a file that holds something else.
    """
    if not path.exists():
        return []
    try:
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["entries"]
        for entry in found:
            key_of(entry)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: no results of studies/run.py ({error!r:.80})") from error
    return found
