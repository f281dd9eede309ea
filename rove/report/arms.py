"""Arms and seeds: what several runs of one setting say together.

Runs belong together when their settings are equal but for the seed, the arm (rope or rove), and
what changes no number. A measure is compared at the same step, mode, length and factor.
"""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from rove.config import flatten
from rove.evals.schema import BY_LENGTH
from rove.report.perplexity import shown_rows
from rove.report.read import Result, Run
from rove.report.tables import Section, number, table

# keys (or groups) that tell runs of one setting apart, or change no result by their own account
FREE = (
    *("seed", "out_dir", "log.", "dry_run", "model.pos_mode", "train.resume"),
    *("train.micro_batch_size", "train.log_interval", "train.checkpoint_interval"),
    *("train.keep_checkpoints", "train.on_save_error", "train.dist_timeout_s"),
)
# two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom; beyond, the last is used
T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
ONE_SEED = "One seed per arm: one seed proves nothing about a small difference."
SIGN = (
    "Of each arm the value, or mean ± standard deviation (n - 1) over its (n) seeds, in "
    "nats/token. Differences are paired by seed, RoVE - RoPE: negative = RoVE better. Their 95 % "
    "interval is Student's t over the seeds: very wide with two of them, and none with one."
)
HEAD = (
    *("measure", "mode", "step", "RoPE", "RoVE"),
    *("difference by seed", "mean difference", "95 % interval"),
)
ORIG = ", values orig"


class Measure(NamedTuple):
    """What was measured of a run, in the order of the tables."""

    protocol: str
    """validation or a protocol of perplexity"""
    what: str
    mode: str
    """what stands behind the arm's name: +yarn, other values"""
    factor: float
    dtype: str
    step: int
    length: int

    def words(self) -> list[str]:
        """Return the cells that name it: measure, mode, step."""
        at = "" if self.protocol == "validation" else f" at {self.length:,}, {self.protocol}"
        notes = [self.mode.lstrip(", ") or "as trained"]
        notes += [f"s={self.factor:g}"] * (self.factor != 1)
        notes += [self.dtype] * (self.dtype not in ("", "float32"))
        return [self.what + at, ", ".join(notes), f"{self.step:,}"]


Values = dict[Measure, float]


def measures(run: Run, results: Sequence[Result]) -> Values:
    """Return a run's last validation loss and its NLL at each length, in nats/token."""
    val = run.series("val/loss")
    found: Values = {}
    if val:
        step, _, loss = val[-1]
        found[Measure("validation", "val loss", "", 1.0, "", step, run.block_size)] = loss
    for r in results:
        c = r.content
        if r.run is not run or r.is_retrofit or c.get("protocol") not in BY_LENGTH:
            continue
        orig = ORIG if r.values == "orig" else ""
        mode = r.mode.removeprefix(run.arm) + orig
        protocol = c["protocol"] + (", end-of-text not scored" if c["mask_eot"] else "")
        for length, row in shown_rows(r).items():
            tail = (mode, row["yarn_factor"], c["dtype"], c["step"], length)
            found.setdefault(Measure(protocol, "NLL", *tail), row["nll"])
            if c["protocol"] == "tail" and row["degradation"] is not None:
                found.setdefault(Measure(protocol, "D", *tail), row["degradation"])
    return found


def setting_of(run: Run) -> tuple[tuple[str, str], ...]:
    """Return what the runs of one setting share."""
    config = flatten(run.config)
    return tuple(sorted((k, repr(v)) for k, v in config.items() if not k.startswith(FREE)))


def t_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean by Student's t; None for fewer than two values."""
    n = len(values)
    if n < 2:
        return None
    half = T_95[min(n - 1, len(T_95)) - 1] * stdev(values) / math.sqrt(n)
    return fmean(values) - half, fmean(values) + half


def arms_section(runs: Sequence[Run], results: Sequence[Result]) -> Section:
    """Return the section that sums up seeds and compares the arms."""
    settings = list(dict.fromkeys(setting_of(run) for run in runs))
    groups = [[run for run in runs if setting_of(run) == setting] for setting in settings]
    parts: list[str] = []
    for name, group in zip(_names(settings, groups), groups, strict=True):
        arms: dict[str, dict[int, Values]] = {"rope": {}, "rove": {}}
        first: dict[tuple[str, int], Run] = {}
        parts += [f"**{name}**"] if len(groups) > 1 else []
        for run in group:
            kept = first.setdefault((run.arm, run.seed), run)
            if kept is run:
                arms[run.arm][run.seed] = measures(run, results)
            else:
                parts.append(f"{run.name} repeats seed {run.seed} of {kept.name}: left out.")
        lines = _compared(arms["rope"], arms["rove"])
        if max(map(len, arms.values())) < 2:
            parts.append(ONE_SEED)
            lines = lines[:1]  # the tables above have the rest
        if lines:
            parts += [SIGN] * (SIGN not in parts) + [table(HEAD, lines)]
    return Section("Arms and seeds", "\n\n".join(parts))


def _names(settings: Sequence[tuple[tuple[str, str], ...]], groups: list[list[Run]]) -> list[str]:
    """Return a name for each setting: its shape, and what else sets it apart from the others."""
    as_dicts = [dict(setting) for setting in settings]
    keys = sorted({key for setting in as_dicts for key in setting})
    shape = ("model.n_layer", "model.n_head", "model.n_embd", "model.block_size")
    apart = [k for k in keys if k not in shape and len({s.get(k) for s in as_dicts}) > 1]
    return [
        ", ".join(
            [f"{group[0].shape} at {group[0].block_size:,}"]
            + [f"{key} {setting.get(key, 'unset')}" for key in apart]
        )
        for setting, group in zip(as_dicts, groups, strict=True)
    ]


def _compared(rope: dict[int, Values], rove: dict[int, Values]) -> list[list[str]]:
    """Return a line for each measure that several seeds of an arm have, or both arms of a seed."""
    found = {m for by_seed in (rope, rove) for values in by_seed.values() for m in values}
    lines = []
    for measure in sorted(found, key=_order):
        # which frequencies values take is a question for rove alone
        other = measure._replace(mode=measure.mode.removesuffix(ORIG))
        ropes = {seed: values[other] for seed, values in rope.items() if other in values}
        roves = {seed: values[measure] for seed, values in rove.items() if measure in values}
        paired = {seed: roves[seed] - ropes[seed] for seed in sorted(set(ropes) & set(roves))}
        if paired or max(len(ropes), len(roves)) > 1:
            by_seed = ", ".join(f"{seed}: {value:+.4f}" for seed, value in paired.items())
            mean = f"{fmean(paired.values()):+.4f}" if paired else ""
            ends = t_interval(list(paired.values()))
            interval = "" if ends is None else f"[{ends[0]:+.4f}, {ends[1]:+.4f}]"
            cells = [_mean_and_sd(list(arm.values())) for arm in (ropes, roves)]
            lines.append([*measure.words(), *cells, by_seed, mean, interval])
    return lines


def _order(measure: Measure) -> tuple[int, bool, Measure]:
    protocols = ("validation", *BY_LENGTH)
    return protocols.index(measure.protocol.split(",")[0]), measure.what != "NLL", measure


def _mean_and_sd(values: Sequence[float]) -> str:
    if len(values) < 2:
        return number(values[0] if values else None)
    return f"{number(fmean(values))} ± {number(stdev(values))} ({len(values)})"
