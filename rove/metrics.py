"""What a run reports: metrics.jsonl always, wandb beside it when asked for."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch

from rove import distributed as dist
from rove.files import write_atomic

METRICS = "metrics.jsonl"


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl; a last line that was cut off by a kill is left out."""
    path = run / METRICS
    rows = []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            rows.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            continue
    return rows


def trim_metrics(run: Path, last_step: int) -> None:
    """Keep the rows up to last_step, each step once: what a resumed run will not write again."""
    rows = {row["step"]: row for row in read_metrics(run) if row["step"] <= last_step}
    text = "".join(json.dumps(rows[step]) + "\n" for step in sorted(rows))
    write_atomic(run / METRICS, lambda file: file.write(text.encode()))


class Wandb:
    """A wandb run that cannot hurt training: its first fault is one warning, and then silence."""

    def __init__(self, log: Any, run: Path, run_id: str | None, config: dict[str, Any]) -> None:
        """Start, or with run_id resume, the run. log: settings wandb, wandb_project, run_name."""
        self.run: Any = None
        self.id = run_id
        if log.wandb == "disabled":
            return
        try:
            import wandb

            self.run = wandb.init(
                mode=log.wandb,
                dir=str(run),
                project=log.wandb_project,
                name=log.run_name or run.name,
                id=run_id,
                resume="allow",
                config=config,
            )
            self.id = self.run.id
        except Exception as error:  # wandb raises many kinds; training goes on without it
            self._give_up(error)

    def log(self, row: dict[str, Any]) -> None:
        """Send one row of metrics."""
        if self.run is not None:
            try:
                self.run.log(row, step=row["step"])
            except Exception as error:
                self._give_up(error)

    def finish(self) -> None:
        """End the wandb run."""
        if self.run is not None:
            try:
                self.run.finish()
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.run = None
        warnings.warn(f"wandb is off from here on: {error!r}; metrics.jsonl goes on", stacklevel=3)


class Metrics:
    """Writer of metrics.jsonl, one line a step, and of the same rows to wandb."""

    def __init__(self, run: Path, wandb: Wandb) -> None:
        self.file = (run / METRICS).open("a", encoding="utf-8")
        self.wandb = wandb

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Append rows, each with its step; they are in the file when this returns."""
        self.file.write("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
        self.file.flush()
        for row in rows:
            self.wandb.log(row)

    def close(self) -> None:
        """Close the file and the wandb run."""
        self.file.close()
        self.wandb.finish()


def fetch_losses(pending: list[dict[str, Any]], is_fp16: bool) -> None:
    """Fetch the losses (mean over ranks) and norms of the steps since the last read, in place.

    Ends the run, on all ranks alike, at a loss or gradient that is not finite; the optimizer has
    already passed over that update. In fp16 a gradient may overflow: the scaler then scales less.
    """
    losses = dist.gather(torch.stack([row["train/loss"] for row in pending])).cpu()  # (ranks, n)
    norms = torch.stack([row["grad_norm"] for row in pending]).cpu()
    for row, loss, norm in zip(pending, losses.T, norms, strict=True):
        ranks = [rank for rank, own in enumerate(loss) if not own.isfinite()]
        if ranks or not (norm.isfinite() or is_fp16):
            what = f"loss not finite on rank {ranks}" if ranks else "gradient not finite"
            raise SystemExit(f"error: step {row['step']}: {what}; the last checkpoint is good")
        row["train/loss"] = float(loss.double().mean())
        row["grad_norm"] = float(norm) if norm.isfinite() else None
