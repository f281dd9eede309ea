"""Perplexity by context length, on the same targets for every length.

Protocols. `packed`: the first M targets of the stream are tiled with windows of L tokens, every
position counts, and M is the same for all L; a target then has 0 to L - 1 tokens of context. (The
stream holds unrelated documents one after another, each behind its end-of-text.) `positions`: one
pass at the largest length, the mean by position in the window. Sums are kept in float64 and
divided once; perplexities and window means are never averaged.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Score = Callable[[Tensor, Tensor], Tensor]  # idx, targets (B, T) int64 -> nll (B, T), nats
Floats = np.ndarray[Any, np.dtype[np.float64]]
FIRST_EDGES = (0, 64, 128, 256, 512, 1024)  # then doubling


@dataclass(frozen=True)
class Targets:
    """The tokens that an evaluation scores: n_blocks blocks of block_size targets."""

    ids: np.ndarray[Any, np.dtype[np.int64]]
    """(n_blocks * block_size + 1,) the stream; target i is ids[i + 1]"""
    block_size: int
    """tokens of a block, the largest length"""

    @property
    def n_blocks(self) -> int:
        return (len(self.ids) - 1) // self.block_size

    def block_windows(self, block: int, length: int) -> Tensor:
        """Return a block as windows: (block_size / length, length + 1) int64."""
        starts = np.arange(0, self.block_size, length) + block * self.block_size
        return torch.from_numpy(np.stack([self.ids[i : i + length + 1] for i in starts]))


def parse_lengths(text: str) -> list[int]:
    """Read lengths such as "64,128": ascending, each a divisor of the largest; else ValueError."""
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"lengths={text!r}: must be numbers such as 64,128,256") from None
    for length in lengths:
        if length < 1 or lengths[-1] % length:
            raise ValueError(f"lengths={text!r}: {length} must divide the largest, {lengths[-1]}")
    return lengths


def default_lengths(context: int) -> list[int]:
    """Return half the training context to 16 times it, doubling."""
    return [context * 2**k // 2 for k in range(context == 1, 6)]


def count_blocks(n_tokens: int, block_size: int, max_tokens: int) -> int:
    """Return how many whole blocks are scored; ValueError when the text has not even one."""
    blocks = min(n_tokens - 1, max_tokens) // block_size
    if blocks < 1:
        raise ValueError(
            f"the split has {n_tokens} tokens and max_tokens is {max_tokens}: the largest length "
            f"needs {block_size} + 1; ask for shorter lengths or more text"
        )
    return blocks


def block_nll(
    targets: Targets,
    length: int,
    score: Score,
    blocks: list[int],
    batch_size: int,
    add_up: Callable[[Tensor, Tensor], Floats],
    device: torch.device,
    progress: Callable[[int], object] = lambda n_blocks: None,
) -> Floats:
    """Score `blocks` in windows of `length`; return what add_up makes of them, by block.

    batch_size blocks go through the model at once, whatever the length, so that every length has
    equally large batches. add_up: (ids, nll), each (windows, length), of one block -> a vector.
    """
    rows = []
    for first in range(0, len(blocks), batch_size):
        group = blocks[first : first + batch_size]
        windows = torch.cat([targets.block_windows(block, length) for block in group])
        wanted = windows[:, 1:]
        nll = score(windows[:, :-1].to(device), wanted.to(device)).cpu().double()
        per_block = targets.block_size // length
        parts = zip(wanted.split(per_block), nll.split(per_block), strict=True)
        rows += [add_up(ids, part) for ids, part in parts]
        progress(len(group))
    return np.array(rows)


def text_sums(token_bytes: np.ndarray[Any, np.dtype[np.int64]] | None) -> Callable[..., Floats]:
    """Return the add_up of `packed`: a block's NLL and its NLL without end-of-text, (2,) nats."""

    def add_up(ids: Tensor, nll: Tensor) -> Floats:
        if token_bytes is None:
            return np.array([float(nll.sum()), math.nan])
        is_text = torch.from_numpy(token_bytes > 0)[ids]
        return np.array([float(nll.sum()), float(nll[is_text].sum())])

    return add_up


def position_sums(ids: Tensor, nll: Tensor) -> Floats:
    """Return the add_up of `positions`: the NLL at each position of the window, (length,) nats."""
    return nll.sum(dim=0).numpy()


def packed_result(
    targets: Targets, length: int, sums: Floats, token_bytes: np.ndarray[Any, Any] | None
) -> dict[str, Any]:
    """Return the result row of one length from text_sums of all blocks, (n_blocks, 2)."""
    tokens = targets.n_blocks * targets.block_size
    nll = float(sums[:, 0].sum()) / tokens
    if not math.isfinite(nll):
        raise ValueError(f"length {length}: the loss is not finite; are the weights?")
    bits_per_byte = None
    if token_bytes is not None:
        n_bytes = int(token_bytes[targets.ids[1 : tokens + 1]].sum())
        bits_per_byte = float(sums[:, 1].sum()) / (math.log(2) * n_bytes) if n_bytes else None
    return {
        "length": length,
        "nll": nll,
        "ppl": math.exp(nll) if nll < 700 else None,
        "bits_per_byte": bits_per_byte,
        "tokens": tokens,
        "block_nll": [float(x) / targets.block_size for x in sums[:, 0]],
    }


def position_results(length: int, sums: Floats) -> list[dict[str, Any]]:
    """Return the mean NLL by position bin from position_sums of all blocks, (n_blocks, length)."""
    edges = [edge for edge in FIRST_EDGES if edge < length]
    while edges[-1] >= FIRST_EDGES[-1] and 2 * edges[-1] < length:
        edges.append(2 * edges[-1])
    results = []
    for start, stop in zip(edges, [*edges[1:], length], strict=True):
        tokens = (stop - start) * len(sums)
        nll = float(sums[:, start:stop].sum()) / tokens
        results.append({"from": start, "to": stop, "nll": nll, "tokens": tokens})
    return results
