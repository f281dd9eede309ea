"""From prompts to accuracies: batches, predictions, ranks, and the CORE score.

An option's score is the mean loss of its tokens in nats (a sum would favour short ones); the
lowest wins, the first of equals. A continuation is right if each of its tokens is the likeliest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rove.evals.core.prompts import (
    Encode,
    Item,
    Record,
    Truncation,
    check_truncation,
    make_item,
    shuffled,
)
from rove.evals.core.tasks import LETTER_TASKS, LONG_TASKS, TASKS, Task

# idx, targets (B, T) int64, mask (B, T) bool -> nll float32 (nats), is_argmax bool, rank int64
Score = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
WINDOW = 16  # batches whose items are made, and sorted by length, at once


@dataclass(frozen=True)
class Setup:
    """What all tasks of one evaluation share."""

    score: Score
    encode: Encode
    """ordinary encoding, no special tokens"""
    eot_id: int
    device: torch.device
    max_length: int | None
    """most tokens of a prompt; without effect under extrapolate"""
    truncation: Truncation = "crop"
    max_per_task: int | None = None
    batch_size: int = 1
    """items in one forward pass, each with all its options"""
    rank: int = 0
    size: int = 1
    """item i goes to rank i mod size"""
    gather: Callable[[Any], list[Any]] = lambda value: [value]
    """a value -> the values of all ranks"""
    progress: Callable[[int], object] = lambda n_items: None
    """called with the number of this rank's items that were just done"""

    def __post_init__(self) -> None:
        check_truncation(self.truncation, self.max_length)
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size}: must be at least 1")


def score_items(
    items: Sequence[Item],
    score: Score,
    pad_id: int,
    batch_size: int,
    device: torch.device,
    progress: Callable[[int], object] = lambda n_items: None,
) -> list[int]:
    """Return for each item the predicted option, or, where gold is None, 1 if right and else 0.

    Items of similar length share a forward pass, all rows of an item the same one. An option
    without scored tokens, which is the beginning of another, makes the prediction 0. Raises
    ValueError for a loss that is not finite.
    """
    answers = [0] * len(items)
    scored = [i for i, item in enumerate(items) if all(s < e for s, e in item.spans)]
    progress(len(items) - len(scored))
    scored.sort(key=lambda i: max(map(len, items[i].rows)), reverse=True)
    for first in range(0, len(scored), batch_size):
        group = scored[first : first + batch_size]
        rows = [row for i in group for row in items[i].rows]
        spans = [span for i in group for span in items[i].spans]
        idx, targets, mask = (x.to(device) for x in _batch(rows, spans, pad_id))
        nll, is_argmax, _ = score(idx, targets, mask)
        nll, is_argmax, at = nll.cpu().double(), is_argmax.cpu(), 0
        for i in group:
            stop = at + len(items[i].rows)
            answers[i] = _answer(items[i], nll[at:stop], is_argmax[at:stop])
            at = stop
        progress(len(group))
    return answers


def _batch(
    rows: list[list[int]], spans: list[tuple[int, int]], pad_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return idx, targets and mask, (B, T): right-padded, the token at p scored in column p - 1."""
    ids = torch.full((len(rows), max(map(len, rows))), pad_id)
    mask = torch.zeros(ids.shape[0], ids.shape[1] - 1, dtype=torch.bool)
    for i, (row, (s, e)) in enumerate(zip(rows, spans, strict=True)):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, s - 1 : e - 1] = True
    return ids[:, :-1], ids[:, 1:], mask


def _answer(item: Item, nll: Tensor, is_argmax: Tensor) -> int:
    """Return the prediction for one item from what its rows scored, each (n_rows, T)."""
    losses = [nll[i, s - 1 : e - 1] for i, (s, e) in enumerate(item.spans)]
    for option, loss in enumerate(losses):
        if not bool(torch.isfinite(loss).all()):
            raise ValueError(f"{item.name}: loss of option {option} not finite; are the weights?")
    if item.gold is None:
        s, e = item.spans[0]
        return int(is_argmax[0, s - 1 : e - 1].all())
    # kernels may differ in the last bit between rows: options that are equal take the first's loss
    first = [item.rows.index(row) for row in item.rows]
    means = [float(losses[option].mean()) for option in first]
    return means.index(min(means))


def run_task(task: Task, items: Sequence[Record], setup: Setup, sha256: str) -> dict[str, Any]:
    """Return a task's result, the same on every rank and for any number of them.

    items: as loaded, in file order. sha256: of the data file, recorded. `correct` has a character
    for each item in visiting order; `max_tokens` is the longest prompt before truncation;
    `predictions` counts the predicted options where these are letters, and is None elsewhere.
    """
    order = shuffled(items, setup.max_per_task)
    by_rank = setup.gather(_own_share(task, order, setup))
    assert len(by_rank) == setup.size, "gather must return a value of every rank"
    rows = [by_rank[i % setup.size][i // setup.size] for i in range(len(order))]
    accuracy = sum(row.right for row in rows) / len(rows)
    counts = None
    if task.label in LETTER_TASKS:
        answers = [row.answer for row in rows]
        n_options = max(len(item["choices"]) for item in order)
        counts = [answers.count(option) for option in range(n_options)]
    return {
        "accuracy": accuracy,
        "centered_v1": centered(accuracy, task.baseline_v1),
        "centered_v2": centered(accuracy, task.baseline_v2),
        "n": len(rows),
        "cropped": sum(row.cropped for row in rows),
        "span_capped": sum(row.span_capped for row in rows),
        "correct": "".join("01"[row.right] for row in rows),
        "predictions": counts,
        "max_tokens": max(row.n_tokens for row in rows),
        "sha256": sha256,
    }


class _Row(NamedTuple):
    """What is kept of an item that was scored."""

    answer: int
    right: bool
    cropped: bool
    span_capped: bool
    n_tokens: int


def _own_share(task: Task, order: list[Record], setup: Setup) -> list[_Row]:
    """Make and score the items of this rank, a window at a time: prompts take much memory."""
    s, found = setup, []
    own = range(s.rank, len(order), s.size)
    for first in range(0, len(own), WINDOW * s.batch_size):
        indices = own[first : first + WINDOW * s.batch_size]
        how = s.encode, s.eot_id, s.max_length, s.truncation
        made = [make_item(task, order, index, *how) for index in indices]
        answers = score_items(made, s.score, s.eot_id, s.batch_size, s.device, s.progress)
        for item, answer in zip(made, answers, strict=True):
            right = answer == (1 if item.gold is None else item.gold)
            found.append(_Row(answer, right, item.cropped, item.span_capped, item.n_tokens))
    return found


def centered(accuracy: float, baseline: float) -> float:
    """Return 0 for chance and 1 for perfect, from an accuracy in [0, 1] and a baseline in percent.

    Below chance it is negative.
    """
    chance = 0.01 * baseline
    return (accuracy - chance) / (1 - chance)


def aggregate(tasks: dict[str, dict[str, Any]], missing: Sequence[str]) -> dict[str, Any]:
    """Return the plain means of the centered accuracies in the results of run_task by label.

    missing: labels without data. `core_v1` and `core_v2` are None unless all 22 tasks are there,
    and `core` then says why; `mean_of_present_*` is the mean over what is there, `mean_of_short_*`
    that over the 16 tasks whose prompts never exceed 1,024 tokens, None unless these are there.
    """
    labels = [task.label for task in TASKS]
    assert set(tasks) <= set(labels), "results of CORE's tasks only"
    short = [label for label in labels if label not in LONG_TASKS]
    result: dict[str, Any] = {"core": None}
    absent = [label for label in labels if label not in tasks]
    if absent:
        lost = [label for label in absent if label in missing]
        idle = [label for label in absent if label not in missing]
        parts = [f"{why}: {', '.join(x)}" for why, x in (("missing", lost), ("not run", idle)) if x]
        result["core"] = f"n/a ({'; '.join(parts)})"
    for table in ("v1", "v2"):
        for name, over in (
            (f"core_{table}", labels),
            (f"mean_of_present_{table}", list(tasks)),
            (f"mean_of_short_{table}", short),
        ):
            there = bool(over) and set(over) <= set(tasks)
            values = [tasks[label][f"centered_{table}"] for label in over] if there else []
            result[name] = sum(values) / len(values) if there else None
    return result
