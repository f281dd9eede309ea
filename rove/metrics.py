"""What a run reports: metrics.jsonl always, wandb beside it when asked for."""

import json
import math
import os
import queue
import threading
import warnings
from pathlib import Path
from typing import Any

import torch

from rove import distributed as dist
from rove.config import to_dict, to_yaml
from rove.errors import how_to_install
from rove.files import write_atomic
from rove.tracking import git_commit, start_run

METRICS = "metrics.jsonl"
INIT_S, FINISH_S = 60.0, 60.0  # longest waits for wandb
LEAST_SCALE = 2.0**-20  # of fp16's losses, from 2^16 on: below it, gradients never fit


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl; a last line that was cut off by a kill is left out."""
    path = run / METRICS
    rows = []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            row = dict(json.loads(line))
        except (ValueError, TypeError, RecursionError):
            continue
        if type(row.get("step")) is int:
            rows.append(row)
    return rows


def trim_metrics(run: Path, last_step: int) -> None:
    """Keep the rows up to last_step, each step once: what a resumed run will not write again."""
    rows = {row["step"]: row for row in read_metrics(run) if row["step"] <= last_step}
    if missing := sorted(set(range(1, last_step + 1)) - set(rows)):
        warnings.warn(f"{METRICS} lacks {len(missing)} steps from {missing[0]} on", stacklevel=2)
    text = "".join(json.dumps(rows[step]) + "\n" for step in sorted(rows))
    write_atomic(run / METRICS, lambda file: file.write(text.encode()))


class Wandb:
    """A wandb run that cannot hurt training.

    It lives in a thread of its own behind a queue, so that a slow one costs nothing; its first
    fault is one warning, and then it is silent.
    """

    def __init__(self, log: Any, run: Path, run_id: str | None, config: dict[str, Any]) -> None:
        """Start, or with run_id resume, the run. log: settings wandb, wandb_project, run_name."""
        self.run: Any = None
        self.id = run_id
        self.rows: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.thread = threading.Thread(target=self._work, args=(log, run, config), daemon=True)
        self.begun = threading.Event()
        if log.wandb != "disabled":
            self.run = self  # stands for the run to come
            self.thread.start()
            if not self.begun.wait(INIT_S):
                self._give_up(TimeoutError(f"no answer in {INIT_S} s"))

    def log(self, row: dict[str, Any]) -> None:
        """Hand over one row of metrics; returns at once."""
        if self.run is not None:
            self.rows.put(row)

    def finish(self) -> None:
        """End the wandb run, waiting at most FINISH_S for what is still on its way."""
        if self.run is not None:
            self.rows.put(None)
            self.thread.join(FINISH_S)
            if self.thread.is_alive():
                self._give_up(TimeoutError(f"not done {FINISH_S} s after training"))

    def _work(self, log: Any, run: Path, config: dict[str, Any]) -> None:
        try:
            everything = config | {"git_commit": git_commit()}
            name = log.run_name or run.name
            made = start_run(run, log.wandb, log.wandb_project, name, self.id, everything)
            self.id = str(made.id)
            self.begun.set()
            while (row := self.rows.get()) is not None:
                made.log(row)
            made.finish()
        except BaseException as error:  # wandb raises many kinds, SystemExit among them
            self._give_up(error)
            self.begun.set()

    def _give_up(self, error: BaseException) -> None:
        if self.run is not None:
            missing = isinstance(error, ImportError)
            remedy = f" ({how_to_install('requirements.txt')})" if missing else ""
            what = f"wandb is off from here on: {error!r}{remedy}; metrics go on"
            warnings.warn(what, stacklevel=3)
        self.run = None


class Metrics:
    """Writer of metrics.jsonl, one line a step, and of the same rows to wandb."""

    def __init__(self, run: Path, wandb: Wandb) -> None:
        self.file = (run / METRICS).open("ab", buffering=0)
        self.wandb = wandb
        self.waiting = b""  # lines that a full disk has not taken yet

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Append rows, each with its step; what the disk does not take now is kept for later."""
        lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        self.waiting += lines.encode()
        if fault := self._flush():
            warnings.warn(f"{METRICS}: {fault}; its lines wait in memory", stacklevel=2)
        for row in rows:
            self.wandb.log(row)

    def sync(self) -> str | None:
        """Put every line onto the disk, as a checkpoint must not be ahead; return what failed."""
        if fault := self._flush():
            return f"{METRICS}: {fault}"
        try:
            os.fsync(self.file.fileno())
        except OSError as error:  # quotas and network disks tell it here
            return f"{METRICS}: {error.strerror or error!r}"
        return None

    def _flush(self) -> str | None:
        try:
            while self.waiting:
                self.waiting = self.waiting[self.file.write(self.waiting) :]
        except OSError as error:
            return error.strerror or repr(error)
        return None

    def close(self) -> None:
        """Close the file and the wandb run."""
        self.file.close()
        self.wandb.finish()


def open_metrics(run: Path, last_step: int, config: Any, log: Any, wandb_id: str | None) -> Metrics:
    """Write config.yaml, keep the rows up to last_step, and return the writer of those to come."""
    write_atomic(run / "config.yaml", lambda file: file.write(to_yaml(config).encode()))
    trim_metrics(run, last_step)
    return Metrics(run, Wandb(log, run, wandb_id, to_dict(config)))


def fetch_losses(pending: list[dict[str, Any]], scaler: torch.amp.GradScaler) -> None:
    """Fetch the losses (mean over ranks) and norms of the steps since the last read, in place.

    Ends the run, on all ranks alike, at a loss or gradient that is not finite; the optimizer has
    already passed over that update. In fp16 a gradient may overflow: the scaler then scales less,
    down to LEAST_SCALE.
    """
    own = torch.stack([row["train/loss"] for row in pending]).cpu()
    losses = torch.stack(dist.gather(own))  # (ranks, steps)
    norms = torch.stack([row["grad_norm"] for row in pending]).cpu()
    overflows = scaler.is_enabled() and scaler.get_scale() > LEAST_SCALE
    for row, loss, norm in zip(pending, losses.T, norms, strict=True):
        ranks = [rank for rank, own in enumerate(loss) if not own.isfinite()]
        if ranks or not (norm.isfinite() or overflows):
            what = f"loss not finite on rank {ranks}" if ranks else "gradient not finite"
            raise SystemExit(f"error: step {row['step']}: {what}; nothing of it is saved")
        row["train/loss"] = float(loss.double().mean())
        row["grad_norm"] = float(norm) if norm.isfinite() else None


def check_finite(step: int, val_loss: float) -> None:
    """End the run at a validation loss that is not finite, as at a training loss."""
    if not math.isfinite(val_loss):
        raise SystemExit(f"error: step {step}: validation loss not finite; nothing of it is saved")
