"""Text with a rule in it: the ordered window, whose next byte only the order of earlier ones tells.

A byte of a document stands for a pair (x, y) of symbols below 6. The x are drawn at random; the y
of the next byte is F[x of the byte before this one, ..., x of k before this one], F a random
table that has every symbol equally often.
So a model that knows F loses ln 6 nats a byte, one that knows nothing 2 ln 6.
"""

import json
import string
from pathlib import Path

import numpy as np

SYMBOLS = 6
ALPHABET = (string.ascii_letters + string.digits)[: SYMBOLS**2]  # of the pair 6 x + y


def window_text(k: int, seed: int, n: int, rng: np.random.Generator) -> str:
    """Return a document of n bytes; the table F depends on k and seed alone, x on rng.

    The y of its first k + 1 bytes, which have no k before them, are drawn at random.
    """
    balanced = np.arange(SYMBOLS**k) % SYMBOLS
    table = np.random.default_rng([seed, k]).permutation(balanced).reshape((SYMBOLS,) * k)
    x = rng.integers(SYMBOLS, size=n)
    y = rng.integers(SYMBOLS, size=n)
    y[k + 1 :] = table[tuple(x[k - lag : n - 1 - lag] for lag in range(1, k + 1))]
    return "".join(ALPHABET[pair] for pair in SYMBOLS * x + y)


def write_window_task(path: Path, k: int, seed: int, n_documents: int, n: int) -> None:
    """Write n_documents documents of n bytes as JSON lines with a key `text`."""
    rng = np.random.default_rng([seed, k, 1])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(n_documents):
            file.write(json.dumps({"text": window_text(k, seed, n, rng)}) + "\n")
