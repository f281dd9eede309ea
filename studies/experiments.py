"""What the study runs: arms, settings, seeds, and where each run's text comes from."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Flags = dict[str, Any]
ARMS: dict[str, Flags] = {
    "rope": {"model.pos_mode": "rope"},
    "rove": {"model.pos_mode": "rove"},
    "null": {"model.pos_mode": "rove", "start.reversed": True},  # RoVE with its sign flipped
}
STDLIB = "stdlib-byte"  # the demo's text: the standard library as bytes, split by directory


@dataclass(frozen=True)
class Trial:
    """One training run and what is measured of it."""

    experiment: str
    variant: str
    arm: str
    seed: int
    data: str
    """folder of shards below the study's data folder"""
    flags: Flags
    """of train.py, beside data, folder and seed; `start.` ones are of start.py"""
    has_grid: bool = False
    """measure a grid of YaRN's factors too"""

    @property
    def name(self) -> str:
        """The folder of its run: E1/k3-h1/rove-2, E2/rope-1."""
        parts = (self.experiment, self.variant, f"{self.arm}-{self.seed}")
        return "/".join(part for part in parts if part)


@dataclass(frozen=True)
class Experiment:
    """A set of trials that are compared with each other."""

    name: str
    what: str
    n_seeds: int
    flags: Flags
    variants: dict[str, Flags] = field(default_factory=lambda: {"": {}})
    arms: dict[str, Flags] = field(default_factory=lambda: ARMS)
    data: str = STDLIB
    has_grid: bool = False
    """measure RoPE and RoVE over a grid of YaRN's factors too"""

    def trials(self, n_seeds: int | None = None) -> Iterator[Trial]:
        """Yield the trials, all arms and variants of a seed before the next seed."""
        for seed in range(1, (n_seeds or self.n_seeds) + 1):
            for variant, own in self.variants.items():
                for arm, arm_flags in self.arms.items():
                    # each seed of the ordered window has a table and a text of its own
                    own_text = f"window-{variant.split('-')[0]}-{seed}"
                    data = own_text if self.data == "window" else self.data
                    flags = self.flags | own | arm_flags
                    has_grid = self.has_grid and arm != "null"
                    yield Trial(self.name, variant, arm, seed, data, flags, has_grid)


def training(steps: int, batch: int, block_size: int, lr: float, warmup: int) -> Flags:
    """Return flags of a training of `steps` updates with `batch` windows each."""
    return {
        "model.block_size": block_size, "optim.lr": lr, "optim.warmup_steps": warmup,
        "train.max_steps": steps, "train.tokens_per_step": batch * block_size,
        "train.micro_batch_size": batch, "train.eval_interval": steps,
        "train.checkpoint_interval": max(steps, 400), "train.eval_tokens": 131072,
        "train.keep_checkpoints": 1, "train.compile": "false", "train.dtype": "float32",
        "train.device": "cpu",
    }  # fmt: skip


def sizes(n_layer: int, n_head: int, n_embd: int) -> Flags:
    """Return flags of a model's size."""
    return {"model.n_layer": n_layer, "model.n_head": n_head, "model.n_embd": n_embd}


WINDOW = sizes(1, 1, 64) | training(800, 32, 64, 3e-3, 80) | {"start.std_by_width": True}
SMALL = sizes(4, 4, 128) | training(1200, 32, 128, 1e-3, 100)
LARGER = sizes(6, 8, 256) | training(1500, 16, 256, 1e-3, 100)
LARGER |= {"train.dtype": "bfloat16", "train.compile": "true"}  # half the time of plain float32
ORDERED = {f"k{k}-h{heads}": {"model.n_head": heads} for k in (1, 3) for heads in (1, 4)}

E1 = Experiment(
    "E1", "ordered window: one layer, width 64, context 64", 8, WINDOW, ORDERED, data="window"
)
E2 = Experiment("E2", "bytes: 0.8M parameters, context 128, 1,200 steps", 8, SMALL, has_grid=True)
E3 = Experiment("E3", "bytes: 4.7M parameters, context 256, 1,500 steps", 8, LARGER)
E4 = Experiment("E4", "E2 for 4,800 steps", 4, SMALL | {"train.max_steps": 4800})
E7 = Experiment(
    "E7", "E2 with the paper's turns over the context: theta 230, beta_fast 8", 4,
    SMALL | {"model.rope_theta": 230, "model.yarn_beta_fast": 8},
)  # fmt: skip
E8 = Experiment(
    "E8", "E2 with half and twice the learning rate, and with biases", 2, SMALL,
    {"lr-half": {"optim.lr": 5e-4}, "lr-double": {"optim.lr": 2e-3},
     "bias": {"model.bias": "true"}},
)  # fmt: skip
EXPERIMENTS = {e.name: e for e in (E1, E2, E3, E4, E7, E8)}
