"""What every evaluation of a checkpoint shares: the model in its modes, ranks, messages, costs."""

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from rove import checkpoint as ckpt
from rove import device as dev
from rove import distributed as dist
from rove import runs
from rove.evals import cost
from rove.files import sha256_of
from rove.words import names_in

USED = ("model", "model_config", "tokenizer", "step", "data", "file")  # keys of a checkpoint


class Session:
    """An evaluation being run.

    settings: those of all kinds in eval.py. open_model: (what a checkpoint holds, pos_mode,
    allow_retrofit, yarn_values=) -> the model on the CPU, or a ValueError.
    """

    def __init__(self, settings: Any, open_model: Callable[..., Any]) -> None:
        self.settings, self.open_model = settings, open_model
        self.world, self.run = dist.read_world(), runs.run_of(settings.checkpoint)
        self.device = dev.resolve_device(settings.device, self.world.local_rank)
        saved = ckpt.load_checkpoint(settings.checkpoint, mmap=True)
        self.saved = {key: saved[key] for key in USED}  # the file is unmapped with the weights
        self.weights_sha256 = sha256_of(Path(self.saved["file"]))
        self.trained = self.saved["model_config"]
        self.dtype = dev.resolve_dtype(settings.dtype, self.device, self.trained["n_embd"])
        self.model: Any = None
        dist.connect(self.world, self.device, timeout_s=3600)

    def say(self, line: str) -> None:
        """Print a line on rank 0."""
        dist.say(self.world, line)

    def bar(self, total: int, unit: str, done: int = 0) -> Any:
        """Return a progress bar, shown on rank 0's terminal only."""
        quiet = None if self.world.is_main else True
        return tqdm(total=total, initial=done, unit=unit, disable=quiet, unit_scale=True)

    def variants(self) -> list[tuple[str, str]]:
        """Return the (pos_mode, yarn_values) asked for; ValueError for what does not go together.

        Frequencies of the values differ under rove+yarn alone.
        """
        s, found = self.settings, []
        for mode in names_in("pos_mode", s.pos_mode or self.trained["pos_mode"]):
            for values in names_in("yarn_values", s.yarn_values):
                kept = values if mode == "rove+yarn" else "yarn"
                if (mode, kept) not in found:
                    found.append((mode, kept))
        if s.yarn_factor is not None and not any("+yarn" in mode for mode, _ in found):
            modes = ", ".join(mode for mode, _ in found)
            self.say(f"warning: yarn_factor={s.yarn_factor} has no effect in mode {modes}")
        if len(found) > 1:  # a refusal must come before hours of work
            for mode, values in found:
                self._build(mode, values)
        return found

    def only_variant(self) -> tuple[str, str]:
        """Return the one (pos_mode, yarn_values) asked for; ValueError for several."""
        found = self.variants()
        if len(found) > 1:
            raise ValueError(f"pos_mode={self.settings.pos_mode!r}: one mode at a time here")
        return found[0]

    def _build(self, mode: str, values: str) -> Any:
        retrofit = self.settings.allow_retrofit
        return self.open_model(self.saved, mode, retrofit, yarn_values=values)

    def open(self, mode: str, values: str, is_last: bool = True) -> Any:
        """Make the model of a variant the one that is evaluated; is_last frees the weights read."""
        self.model = None  # before the next takes as much memory
        self.model = self._build(mode, values).to(self.device)
        if is_last:
            del self.saved["model"]
        return self.model

    def factors(self, mode: str, length: int) -> list[float]:
        """Return the YaRN factors for a target length: fixed ones, or max(1, length / block_size).

        1 without `+yarn`.
        """
        if not mode.endswith("+yarn"):
            return [1.0]
        fixed = parse_factors(self.settings.yarn_factor)
        return fixed or [max(1.0, length / self.trained["block_size"])]

    def set_factor(self, factor: float) -> dict[str, float]:
        """Set the model's YaRN factor; return what to record of it."""
        self.model.set_yarn_factor(factor)
        config = self.model.config
        return {"yarn_factor": config.factor, "temperature": config.mscale}

    def nll(self, idx: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor:
        """Return the loss of every target, (B, T) float32 nats; with a mask, 0 outside it."""
        with dev.autocast(self.device, self.dtype):
            if mask is None:
                return self.model.token_nll(idx, targets)
            return self.model.score(idx, targets, mask)[0]

    def score(self, idx: Tensor, targets: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return nll, is_argmax and rank of the targets in mask, each (B, T)."""
        with dev.autocast(self.device, self.dtype):
            return self.model.score(idx, targets, mask)

    def describe_cost(self, flops: float) -> str:
        """Return FLOPs over all ranks, and the time at the rate that is measured here."""

        def forward(idx: Tensor) -> float:
            idx = idx.to(self.device)
            return float(self.nll(idx, idx, None).sum())

        rate = cost.measured_rate(self.model.config, forward)
        return cost.describe(flops, rate * self.world.size)

    def common(self, kind: str) -> dict[str, Any]:
        """Return the keys that every result has, but for `data`."""
        config = self.model.config
        return {
            "kind": kind,
            "checkpoint": self.settings.checkpoint,
            "step": self.saved["step"],
            "seed": self.saved["data"]["seed"],
            "pos_mode": config.pos_mode,
            "yarn_values": config.yarn_values,
            "block_size": config.block_size,
            "dtype": str(self.dtype).removeprefix("torch."),
            "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        }

    def identity(self, kind: str, **more: Any) -> dict[str, Any]:
        """Return what must be equal for parts of a killed evaluation to be used."""
        common = {key: value for key, value in self.common(kind).items() if key != "created"}
        where = {"device": self.device.type, "torch": torch.__version__}
        return common | where | {"weights_sha256": self.weights_sha256} | more

    def describe(self) -> str:
        """Return the checkpoint and mode in words."""
        config = self.model.config
        what = f"{self.settings.checkpoint} at step {self.saved['step']}, {config.pos_mode}"
        orig = ", values at the original frequencies" if config.yarn_values == "orig" else ""
        return f"{what}{orig}, trained at {config.block_size}"


def parse_factors(value: float | str | None) -> list[float]:
    """Read YaRN factors such as "2,4,8"; none for None. ValueError below 1 or for no number."""
    try:
        found = [float(part) for part in str(value).split(",")] if value is not None else []
    except ValueError:
        raise ValueError(f"yarn_factor={value!r}: must be numbers such as 4 or 2,4,8") from None
    if not all(1 <= factor < float("inf") for factor in found):
        raise ValueError(f"yarn_factor={value}: must be at least 1")
    return list(dict.fromkeys(found))
