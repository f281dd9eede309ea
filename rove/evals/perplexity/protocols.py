"""Perplexity by context length, on the same targets for every length.

The text of a protocol is a number of units, each of the largest length U and one token more; units
are what is resampled for intervals, and what ranks share. Within a unit, windows of L tokens:

- `packed`: the units follow one another in the stream and are tiled with windows; every target
  counts and has 0 to L - 1 tokens of context before its input. Documents stand in the stream one
  behind another, each behind its end-of-text, as in training.
- `tail`: units as in packed; one window at the end of each, of which the last min(256, shortest L)
  targets count: each has between L - 256 and L tokens of context. D(L) = NLL(L) - NLL(block_size).
- `sliding`: the beginnings of documents of at least U + 1 tokens; windows advance by a stride of
  min(256, shortest L), the first counts whole, each later one by its last stride.
- `positions`: one window of U tokens a unit, the mean by position in the window.

Sums are kept in float64 and divided once; perplexities and window means are never averaged, but
for `nll_window_mean`, which some literature reports.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rove.evals.bootstrap import mean_interval
from rove.shards import TokenData

Protocol = Literal["packed", "tail", "sliding", "positions"]
# idx, targets (B, T) int64, mask (B, T) bool or None for all -> nll (B, T) float32, nats
Nll = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Floats = np.ndarray[Any, np.dtype[np.float64]]
Ids = np.ndarray[Any, np.dtype[np.int64]]
STRIDE, LEAST_ANCHORS, SCANNED = 256, 64, 1 << 20
FIRST_EDGES = (0, 64, 128, 256, 512, 1024)  # of position bins, then doubling


def parse_numbers(key: str, text: str) -> list[int]:
    """Read numbers such as "64,128" in ascending order; ValueError for anything else, and for 0."""
    try:
        numbers = sorted({int(part) for part in text.split(",")})
        if numbers[0] >= 1:
            return numbers
    except ValueError:
        pass
    raise ValueError(f"{key}={text!r}: must be numbers such as 64,128,256")


def parse_lengths(text: str) -> list[int]:
    """Read lengths such as "64,128": ascending, each a divisor of the largest; else ValueError."""
    lengths = parse_numbers("lengths", text)
    for length in lengths:
        if lengths[-1] % length:
            raise ValueError(f"lengths={text!r}: {length} must divide the largest, {lengths[-1]}")
    return lengths


def default_lengths(context: int) -> list[int]:
    """Return half the training context to 16 times it, doubling."""
    return [context * 2**k // 2 for k in range(context == 1, 6)]


@dataclass(frozen=True)
class Text:
    """What a protocol scores."""

    protocol: Protocol
    rows: Ids
    """(n_units, U + 1); target i of a unit is its entry i + 1"""
    n_scored: int
    """targets of a unit that count, its last ones"""
    stride: int
    eot_id: int

    @property
    def largest(self) -> int:
        return self.rows.shape[1] - 1

    @property
    def targets(self) -> Ids:
        """The targets that count: (n_units, n_scored)."""
        return self.rows[:, -self.n_scored :]

    def windows(self, length: int) -> list[tuple[int, int]]:
        """Return (first input, how many targets count, the last ones) of each window of a unit."""
        U, L, stride = self.largest, length, self.stride
        if self.protocol == "tail":
            return [(U - L, self.n_scored)]
        if self.protocol == "sliding":
            return [(0, L), *((stop - L, stride) for stop in range(L + stride, U + 1, stride))]
        return [(start, L) for start in range(0, U, L)]


def open_text(protocol: Protocol, val: TokenData, lengths: Sequence[int], max_tokens: int) -> Text:
    """Return the text of a protocol: at most max_tokens targets, in whole units.

    Raises ValueError when the split has not even one unit.
    """
    U, short = lengths[-1], min(STRIDE, lengths[0])
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}: must be at least 1")
    n_scored = short if protocol == "tail" else U
    most = max_tokens // n_scored
    if protocol == "sliding":
        if odd := [L for L in lengths if (U - L) % short]:
            raise ValueError(f"lengths: {odd[0]} does not reach {U} in strides of {short}")
        starts = long_documents(val, U, most)
    else:
        starts = [i * U for i in range(min((val.n_tokens - 1) // U, most))]
    if not starts:
        of_one = " of one document" if protocol == "sliding" else ""
        longest = longest_length(protocol, val, max_tokens)
        fit = ",".join(str(n) for n in (longest // 2, longest) if n)
        remedy = f"give more text, or shorter ones: --lengths {fit}" if fit else "give more of both"
        raise ValueError(
            f"the split has {val.n_tokens} tokens and max_tokens is {max_tokens}: the largest "
            f"length needs {U} + 1{of_one}; {remedy}"
        )
    rows = np.stack([val.read(start, start + U + 1) for start in starts])
    return Text(protocol, rows, n_scored, short, val.tokenizer["eot_id"])


def longest_length(protocol: Protocol, val: TokenData, max_tokens: int) -> int:
    """Return the largest power of two that can be a length; 0 when none can."""
    length = 1 << min(val.n_tokens - 1, max_tokens).bit_length() >> 1
    while protocol == "sliding" and length and not long_documents(val, length, 1):
        length //= 2
    return length


def long_documents(val: TokenData, largest: int, most: int) -> list[int]:
    """Return where the first documents of more than `largest` tokens begin, end-of-text counted."""
    eot_id, found, begin = val.tokenizer["eot_id"], [], -1
    for first in range(0, val.n_tokens, SCANNED):
        part = val.read(first, min(first + SCANNED, val.n_tokens))
        for place in (np.flatnonzero(part == eot_id) + first).tolist():
            if 0 <= begin < place - largest:
                found.append(begin)
            begin = place
        if len(found) >= most:
            return found[:most]
    return [*found, begin][:most] if 0 <= begin < val.n_tokens - largest else found


def measure(
    text: Text,
    length: int,
    nll: Nll,
    units: Sequence[int],
    batch_size: int,
    device: torch.device,
    progress: Callable[[int], object] = lambda n_tokens: None,
) -> Floats:
    """Score `units` in windows of `length`; return their sums by unit, in nats.

    The sums: (units, 3), all targets, all but end-of-text, mean of the window means; for
    `positions` (units, 2, length), by position all targets and all but end-of-text. A batch has
    batch_size times the tokens of the largest length, whatever the length, so that all lengths
    have equally large batches.
    """
    windows = text.windows(length)
    jobs = [(number, *window) for number in range(len(units)) for window in windows]
    size = batch_size * text.largest // length
    by_position = text.protocol == "positions"
    sums = np.zeros((len(units), 2, length) if by_position else (len(units), 3))
    for first in range(0, len(jobs), size):
        group = jobs[first : first + size]
        ids = np.stack([text.rows[units[u], a : a + length + 1] for u, a, _ in group])
        idx, wanted = (torch.from_numpy(x).to(device) for x in (ids[:, :-1], ids[:, 1:]))
        mask = torch.stack([torch.arange(length) >= length - n for _, _, n in group])
        loss = nll(idx, wanted, None if bool(mask.all()) else mask.to(device)).cpu().double()
        for (unit, _, n), row, target in zip(group, loss.numpy(), ids[:, 1:], strict=True):
            kept = np.where(target == text.eot_id, 0.0, row)
            if by_position:
                sums[unit] += row, kept
            else:
                all_of_it = row[-n:].sum()
                sums[unit] += all_of_it, kept[-n:].sum(), all_of_it / n / len(windows)
        progress(len(group) * length)
    return sums


def length_result(
    text: Text, length: int, sums: Floats, token_bytes: Ids | None, mask_eot: bool
) -> dict[str, Any]:
    """Return the result row of one length from the sums of all units.

    block_nll has the mean NLL of each unit, `interval` its 95 % bootstrap interval (None where
    there are few). mask_eot leaves targets that are end-of-text out; bits per byte always do.
    """
    is_text = text.targets != text.eot_id
    counts = is_text.sum(axis=1) if mask_eot else np.full(len(is_text), text.n_scored)
    total, tokens = float(sums[:, int(mask_eot)].sum()), int(counts.sum())
    if not math.isfinite(total):
        raise ValueError(f"length {length}: the loss is not finite; are the weights?")
    if tokens == 0:
        raise ValueError("mask_eot: every target is end-of-text, none is left")
    n_bytes = 0 if token_bytes is None else int(token_bytes[text.targets[is_text]].sum())
    block_nll = sums[:, int(mask_eot)] / np.maximum(counts, 1)
    row = {
        "length": length,
        "nll": total / tokens,
        "ppl": math.exp(total / tokens) if total / tokens < 700 else None,
        "bits_per_byte": float(sums[:, 1].sum()) / (math.log(2) * n_bytes) if n_bytes else None,
        "tokens": tokens,
        "interval": mean_interval(block_nll),
        "block_nll": block_nll.tolist(),
    }
    if text.protocol == "sliding":
        row["nll_window_mean"] = float(sums[:, 2].mean())
    return row


def add_degradation(rows: list[dict[str, Any]], context: int, own_factor: bool) -> None:
    """Add D(L) = NLL(L) - NLL(context) and its paired interval to result rows, in place.

    None where `context` was not measured. own_factor: every row has a YaRN factor of its length,
    the row of `context` too; otherwise rows of one factor belong together.
    """
    for row in rows:
        factor = row["yarn_factor"]
        base = [r for r in rows if r["length"] == context]
        base = [r for r in base if own_factor or r["yarn_factor"] == factor]
        row["degradation"] = row["nll"] - base[0]["nll"] if base else None
        paired = np.subtract(row["block_nll"], base[0]["block_nll"]) if base else None
        row["degradation_interval"] = None if paired is None else mean_interval(paired)


def position_results(text: Text, sums: Floats, mask_eot: bool) -> list[dict[str, Any]]:
    """Return the mean NLL by position bin from the sums of all units; None for an empty bin."""
    length = text.largest
    edges = [edge for edge in FIRST_EDGES if edge < length]
    while edges[-1] >= FIRST_EDGES[-1] and 2 * edges[-1] < length:
        edges.append(2 * edges[-1])
    is_text = text.targets != text.eot_id
    results = []
    for start, stop in zip(edges, [*edges[1:], length], strict=True):
        kept = is_text[:, start:stop]
        tokens = int(kept.sum()) if mask_eot else kept.size
        total = float(sums[:, int(mask_eot), start:stop].sum())
        if not math.isfinite(total):
            raise ValueError(f"positions from {start}: the loss is not finite; are the weights?")
        nll = total / tokens if tokens else None
        results.append({"from": start, "to": stop, "nll": nll, "tokens": tokens})
    return results
