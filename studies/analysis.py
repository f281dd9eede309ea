"""Effects with intervals from paired runs: seeds and blocks of text are resampled jointly.

An effect is a mean over a matrix (n_seeds, n_blocks) of paired differences: the arms of a seed
start from the same weights, see the same batches and are measured on the same text.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rove.evals.bootstrap import draw_means

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Effect:
    """A mean difference, its 95 % interval, and p for "there is none", two-sided."""

    mean: float
    low: float
    high: float
    p: float
    n_seeds: int
    by_seed: list[float]


def effect(differences: Any) -> Effect:
    """Return the effect of differences (n_seeds, n_blocks) or (n_seeds,), two seeds at least.

    Its standard error is that of a joint bootstrap over seeds and blocks, made larger by
    sqrt(n / (n - 1)) as few seeds show too little of their spread; the interval and p are Student's
    with n_seeds - 1 degrees of freedom. Seeds alone, without blocks, give the usual t test.
    """
    x = np.asarray(differences, dtype=np.float64)
    x = x[:, None] if x.ndim == 1 else x
    n = len(x)
    if n < 2:
        raise ValueError(f"{n} seeds: an effect needs two at least")
    seeds = x.mean(axis=1)
    error = seeds.std(ddof=1) / math.sqrt(n)
    if x.shape[1] > 1:
        error = max(error, float(draw_means(x).std(ddof=1)) * math.sqrt(n / (n - 1)))
    mean, half = float(x.mean()), t_quantile(n - 1) * error
    p = 1.0 if mean == 0 else 0.0 if error == 0 else two_sided_p(mean / error, n - 1)
    return Effect(mean, mean - half, mean + half, p, n, [float(value) for value in seeds])


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Return p values corrected for the number of tests by Holm's method, in the given order."""
    ordered, corrected, largest = sorted(p, key=lambda name: p[name]), {}, 0.0
    for rank, name in enumerate(ordered):
        largest = max(largest, min(1.0, (len(p) - rank) * p[name]))
        corrected[name] = largest
    return {name: corrected[name] for name in p}


def both(effects: Sequence[Effect]) -> float:
    """Return p for "at least one of these is not there": the largest, if all have one sign."""
    signs = {math.copysign(1, e.mean) for e in effects}
    return max(e.p for e in effects) if len(signs) == 1 else 1.0


def two_sided_p(t: float, df: int) -> float:
    """Return the probability of a larger |t| of Student's (Abramowitz and Stegun, 26.7.3 and 4)."""
    angle, is_odd = math.atan(abs(t) / math.sqrt(df)), df % 2
    sine, cosine = math.sin(angle), math.cos(angle)
    total, term = 0.0, cosine if is_odd else 1.0
    for j in range(is_odd, df - 1, 2):
        total += term
        term *= cosine**2 * (j + 1) / (j + 2)
    inside = 2 / math.pi * (angle + sine * total) if is_odd else sine * total
    return max(0.0, 1 - inside)


def t_quantile(df: int) -> float:
    """Return the t of a two-sided 95 % interval."""
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, df) > 0.05 else (low, middle)
    return high
