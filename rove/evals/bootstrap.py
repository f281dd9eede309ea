"""Intervals by resampling (percentile bootstrap) pieces of text, items or samples as a whole."""

from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]
DRAWS, SEED, AT_ONCE = 1000, 0, 50  # DRAWS is a multiple of AT_ONCE
LEAST = 20  # pieces; fewer give no interval


def draw_means(values: Any, stream: int = 0) -> Floats:
    """Return the means of DRAWS resamplings of values (n,), or (n_seeds, n): (DRAWS,).

    Of a matrix, rows (training seeds) and columns (pieces) are both resampled. Calls draw the same
    seeds; the pieces that they draw depend on `stream`.
    """
    x = np.atleast_2d(np.asarray(values, dtype=np.float64))
    n_seeds, n = x.shape
    of_seeds, of_pieces = np.random.default_rng(SEED), np.random.default_rng([SEED, 1, stream])
    means = []
    for _ in range(0, DRAWS, AT_ONCE):
        seeds = of_seeds.multinomial(n_seeds, np.full(n_seeds, 1 / n_seeds), AT_ONCE) / n_seeds
        pieces = of_pieces.multinomial(n, np.full(n, 1 / n), AT_ONCE) / n
        means.append(((pieces @ x.T) * seeds).sum(axis=1))
    return np.concatenate(means)


def interval(draws: Floats) -> list[float]:
    """Return the 2.5 and 97.5 percentiles."""
    return [float(x) for x in np.percentile(draws, [2.5, 97.5])]


def mean_interval(values: Any, least: int = LEAST) -> list[float] | None:
    """Return the 95 % interval of the mean of values (n,) or (n_seeds, n); None if n < least."""
    if np.shape(values)[-1] < least:
        return None
    return interval(draw_means(values))
