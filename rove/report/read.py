"""Read run folders: settings, losses by step, and what eval.py measured."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rove.evals.schema import MODES, check_result, conform
from rove.metrics import read_metrics
from rove.runs import read_run_config

SHAPE = ("n_layer", "n_head", "n_embd", "block_size")


@dataclass(frozen=True, eq=False)
class Run:
    """A run folder as train.py left it."""

    folder: Path
    short: str
    """name in plots"""
    number: int
    """among the runs of its arm, from 0: its colour"""
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    """metrics.jsonl, a row for each step, ascending"""

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def arm(self) -> str:
        """rope or rove: what the weights were trained with."""
        return str(self.config["model"]["pos_mode"]).removesuffix("+yarn")

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def max_steps(self) -> int:
        return int(self.config["train"]["max_steps"])

    @property
    def step(self) -> int:
        """Updates done, as far as metrics.jsonl tells."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def block_size(self) -> int:
        return int(self.config["model"]["block_size"])

    @property
    def shape(self) -> str:
        """n_layer/n_head/n_embd."""
        return "/".join(str(self.config["model"][key]) for key in SHAPE[:3])

    def series(self, key: str) -> list[tuple[int, float, float]]:
        """Return (step, tokens, value) of the steps that have a number under this key."""
        rows: list[tuple[Any, Any, Any]]
        rows = [(row["step"], row.get("tokens"), row.get(key)) for row in self.rows]
        return [(s, t, v) for s, t, v in rows if is_number(t) and is_number(v)]


@dataclass(frozen=True, eq=False)
class Result:
    """One file of a run's eval folder, checked."""

    run: Run
    file: Path
    content: dict[str, Any]

    @property
    def mode(self) -> str:
        return str(self.content["pos_mode"])

    @property
    def values(self) -> str:
        """Frequencies of the values: yarn or orig, which differ in the mode rove+yarn alone."""
        return str(self.content["yarn_values"]) if self.mode == "rove+yarn" else "yarn"

    @property
    def is_final(self) -> bool:
        """Whether the checkpoint is the last of a finished run."""
        return int(self.content["step"]) == self.run.max_steps

    @property
    def is_retrofit(self) -> bool:
        """Whether the value path is not the one that the weights were trained with."""
        return self.mode.removesuffix("+yarn") != self.run.arm

    @property
    def label(self) -> str:
        """The position mode, and what is out of the ordinary."""
        notes = {
            "values orig": self.values == "orig",
            "retrofit": self.is_retrofit,
            str(self.content["dtype"]): self.content["dtype"] != "float32",
            f"step {self.content['step']:,}": not self.is_final,
        }
        return ", ".join([self.mode, *(note for note, holds in notes.items() if holds)])

    def usual_factor(self, length: int) -> float:
        """Return the YaRN factor that a length takes unless another was asked for."""
        by_length = max(1.0, length / self.content["block_size"])
        return by_length if self.mode.endswith("+yarn") else 1.0


def is_number(value: Any) -> bool:
    """Whether a value from a JSON file is a number, not null or a truth value."""
    return type(value) in (int, float) and math.isfinite(value)


def read_runs(names: list[str]) -> tuple[list[Run], list[Result]]:
    """Return the runs in these folders, each once, and the results in their eval folders.

    Raises ValueError for a folder that is no run, and for a file that is no result.
    """
    folders = list({Path(name).resolve(): Path(name) for name in names}.values())
    ends = [folder.resolve().name for folder in folders]
    runs: list[Run] = []
    for folder, end in zip(folders, ends, strict=True):
        short = end if ends.count(end) == 1 else str(folder)
        steps = {row["step"]: row for row in read_metrics(folder)}
        rows = [steps[step] for step in sorted(steps)]
        run = Run(folder, short, 0, _read_config(folder), rows)
        number = sum(other.arm == run.arm for other in runs)
        runs.append(Run(folder, short, number, run.config, rows))
    results = [result for run in runs for result in _read_results(run)]
    return runs, results


def _read_config(folder: Path) -> dict[str, Any]:
    """Return config.yaml; ValueError unless it says what the report needs."""
    config = read_run_config(folder)
    if not config:
        raise ValueError(f"{folder}: no run folder, as it has no config.yaml that can be read")
    try:
        config = conform(config, {"seed": "count", "model": "object", "train": "object"})
        conform(config["model"], {key: "count" for key in SHAPE} | {"pos_mode": "text"}, "model.")
        conform(config["train"], {"max_steps": "count"}, "train.")
    except ValueError as error:
        raise ValueError(f"{folder / 'config.yaml'}: {error}; train.py writes it whole") from None
    return config


def _read_results(run: Run) -> list[Result]:
    results: list[Result] = []
    for path in sorted(run.folder.glob("eval/*.json")):
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            if not (isinstance(value, dict) and value.get("kind") == "compare"):
                results.append(Result(run, path, check_result(value)))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not a result of eval.py ({error}); remove it") from None
    return sorted(results, key=lambda r: (MODES.index(r.mode), r.values == "orig", r.file))
