"""What a model knows of the ordered window's rule: NLL and accuracy of y by length and setting.

    python studies/window.py --checkpoint RUN --data DIR --out FILE

Scored is the y of the next byte, the x summed out, on the same targets for every length, tiled as
in perplexity's protocol `packed`; the first few of each training context are left out.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from model import GPT  # noqa: E402
from rove.checkpoint import load_checkpoint  # noqa: E402
from rove.config import load  # noqa: E402
from rove.errors import user_errors  # noqa: E402
from rove.files import write_json  # noqa: E402
from rove.shards import open_split  # noqa: E402
from studies.tasks import ALPHABET, SYMBOLS  # noqa: E402

SKIPPED = 4  # targets at the beginning of a training context: their k bytes are not all in sight
TIMES = (1, 2, 4, 8)  # lengths, in training contexts
BETAS = ((32.0, 1.0), (2.0, 0.25))  # YaRN's fast and slow


@dataclass(frozen=True)
class Settings:
    checkpoint: str
    """run folder or checkpoint file"""
    data: str
    """folder of token shards, of which `val` is read"""
    out: str
    """result file"""
    max_tokens: int = 131072
    """targets at most"""


def cells_of(block_size: int, mode: str) -> list[dict[str, Any]]:
    """Return the settings to measure in: as trained, and with YaRN beyond the training context."""
    cells: list[dict[str, Any]] = [{"mode": mode, "length": block_size * n} for n in TIMES]
    for fast, slow in BETAS:
        for values in ("yarn", "orig") if mode == "rove" else ("yarn",):
            yarn = {"yarn_beta_fast": fast, "yarn_beta_slow": slow, "yarn_values": values}
            cells += [{"mode": f"{mode}+yarn", "length": block_size * n} | yarn for n in TIMES[1:]]
    return cells


@torch.no_grad()
def score(model: GPT, rows: np.ndarray[Any, Any], length: int) -> tuple[float, float]:
    """Return mean NLL (nats) and accuracy of y of rows (n, U + 1) of ids, in windows of length."""
    ids = torch.tensor([ord(byte) for byte in ALPHABET])  # of the byte tokenizer
    pair_of = torch.full((model.config.vocab_size or 0,), -1)
    pair_of[ids] = torch.arange(SYMBOLS**2)
    U, nll, right, n = rows.shape[1] - 1, 0.0, 0, 0
    in_sight = torch.arange(U) % model.config.block_size >= SKIPPED
    for row in torch.from_numpy(rows):
        idx, targets = (part.view(U // length, length) for part in (row[:-1], row[1:]))
        logits = model(idx)[0][..., ids]
        of_y = logits.view(-1, SYMBOLS, SYMBOLS).logsumexp(1)  # (tokens, y), x summed out
        y = (pair_of[targets] % SYMBOLS).flatten()
        known = (pair_of[targets] >= 0) & in_sight.view(targets.shape)  # not end-of-text
        known = known.flatten()
        losses = -of_y.log_softmax(-1).gather(1, y[:, None])[:, 0]
        nll += float(losses[known].double().sum())
        right, n = right + int((of_y.argmax(-1) == y)[known].sum()), n + int(known.sum())
    return nll / n, right / n


def main(argv: list[str]) -> None:
    """Measure a run in all settings and write them."""
    s = load(Settings, argv, prog="studies/window.py", description="Measure the ordered window.")
    with user_errors():
        checkpoint, val = load_checkpoint(s.checkpoint), open_split(s.data, "val")
        trained = checkpoint["model_config"]
        block_size, U = trained["block_size"], trained["block_size"] * TIMES[-1]
        n_units = s.max_tokens // U
        if val.n_tokens < n_units * U + 1:
            raise ValueError(f"{s.data}: {val.n_tokens} tokens of val, {s.max_tokens} are needed")
        rows = np.stack([val.read(i * U, i * U + U + 1) for i in range(n_units)])
        cells = []
        for cell in cells_of(block_size, str(trained["pos_mode"])):
            yarn = {key: value for key, value in cell.items() if key.startswith("yarn_")}
            factor = cell["length"] / block_size if yarn else 1.0
            model = GPT.from_checkpoint(checkpoint, cell["mode"], yarn_factor=factor, **yarn)
            nll, accuracy = score(model, rows, cell["length"])
            cells.append(cell | {"yarn_factor": factor, "nll": nll, "accuracy": accuracy})
        Path(s.out).parent.mkdir(parents=True, exist_ok=True)
        write_json(Path(s.out), {"kind": "window", "tokens": n_units * U, "cells": cells})


if __name__ == "__main__":
    main(sys.argv[1:])
