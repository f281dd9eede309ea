"""Prompts of CORE as nanochat renders them, their tokens, and which of these are scored.

Examples and question are separated by a blank line; nothing stands before or after. Every prompt
is encoded as one string, with end-of-text before it. Spans [s, e) count token positions: the token
at p is predicted by the logits at p - 1. A span always reaches to the end of its row.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rove.evals.core.tasks import LM, MC, Task

Record = dict[str, Any]
Encode = Callable[[str], Any]  # text -> ids without special tokens, a list or an array
Span = tuple[int, int]
Truncation = Literal["crop", "drop_shots", "extrapolate"]
SHUFFLE_SEED, SHOT_SEED = 1337, 1234


@dataclass(frozen=True)
class Item:
    """One question, ready to be scored."""

    name: str
    """task and index, for messages"""
    rows: list[list[int]]
    """token ids: a row for each option; for language modeling one row, the continuation included"""
    spans: list[Span]
    """by row: the positions that are scored"""
    gold: int | None
    """index of the right option; None: right if every scored token is the likeliest"""
    n_tokens: int
    """length of the longest row before truncation"""
    cropped: bool
    """whether tokens or shots were left out"""
    span_capped: bool
    """whether a span was longer than max_length - 1 and lost its beginning"""


def shuffled(items: Sequence[Record], max_per_task: int | None = None) -> list[Record]:
    """Return the items in visiting order, the first max_per_task of them if that is set.

    Shots are drawn from what is returned, so a capped run is another evaluation, no sample of the
    full one.
    """
    if max_per_task is not None and max_per_task < 1:
        raise ValueError(f"max_per_task={max_per_task}: must be at least 1")
    order = list(items)
    random.Random(SHUFFLE_SEED).shuffle(order)
    return order[:max_per_task]


def draw_shots(n_items: int, index: int, n_shots: int) -> list[int]:
    """Return the indices of the examples shown with item `index`, never its own."""
    if n_items <= n_shots:
        raise ValueError(
            f"{n_items} items are too few for {n_shots} shots and a question; "
            f"the file, or max_per_task, must allow at least {n_shots + 1}"
        )
    # sample() chooses by position, so drawing from a range equals drawing from all indices but one
    drawn = random.Random(SHOT_SEED + index).sample(range(n_items - 1), n_shots)
    return [other + (other >= index) for other in drawn]


def render(
    task: Task, items: Sequence[Record], index: int, n_shots: int | None = None
) -> list[str]:
    """Return the prompts of an item: one for each option; for language modeling A and B.

    A ends before the continuation and is stripped, B holds it. n_shots: how many of the task's
    shots are kept, the last ones; None for all. items: in visiting order.
    """
    shots = draw_shots(len(items), index, task.n_shots)
    kept = shots if n_shots is None else shots[len(shots) - n_shots :]
    start = "".join(f"{_solved(task, items[shot])}\n\n" for shot in kept)
    item, d = items[index], task.delimiter
    if task.kind == LM:
        asked = f"{start}{item['context'].strip()}{d}"
        # stripping A moves the space that ends the delimiter into the first answer token of B
        return [asked.strip(), asked + item["continuation"]]
    if task.kind == MC:
        return [f"{start}{item['query']}{d}{choice}" for choice in item["choices"]]
    return [f"{start}{option}{d}{item['continuation']}" for option in item["context_options"]]


def _solved(task: Task, item: Record) -> str:
    """Return an example with its right answer; only contexts of language modeling are stripped."""
    if task.kind == LM:
        return f"{item['context'].strip()}{task.delimiter}{item['continuation']}"
    if task.kind == MC:
        return f"{item['query']}{task.delimiter}{item['choices'][item['gold']]}"
    return f"{item['context_options'][item['gold']]}{task.delimiter}{item['continuation']}"


def check_truncation(truncation: str, max_length: int | None) -> None:
    """Raise ValueError unless the two settings make sense together."""
    if truncation not in ("crop", "drop_shots", "extrapolate"):
        raise ValueError(f"truncation={truncation!r}: must be crop, drop_shots or extrapolate")
    if truncation != "extrapolate" and (max_length is None or max_length < 2):
        needs = "must be at least 2 tokens; --truncation extrapolate has no maximum"
        raise ValueError(f"max_length={max_length}: {needs}")


def make_item(
    task: Task,
    items: Sequence[Record],
    index: int,
    encode: Encode,
    eot_id: int,
    max_length: int | None,
    truncation: Truncation = "crop",
) -> Item:
    """Return the token rows and spans of an item, each row of at most max_length tokens.

    items: in visiting order. truncation: `crop` keeps the last max_length tokens, end-of-text at
    the front is lost; `drop_shots` first leaves out whole shots from the front, the same for all
    options; `extrapolate` has no maximum. A span that does not fit keeps its last max_length - 1
    tokens.
    """
    check_truncation(truncation, max_length)
    name = f"{task.label}, item {index}"

    def asked(n_shots: int) -> tuple[list[list[int]], list[Span]]:
        texts = render(task, items, index, n_shots)
        tokens = [[eot_id, *np.asarray(encode(text)).tolist()] for text in texts]
        return _spans(task, tokens, name)

    rows, spans = asked(task.n_shots)
    n_tokens = max(map(len, rows))
    limit = n_tokens if truncation == "extrapolate" or max_length is None else max_length
    if truncation == "drop_shots":
        for n_shots in reversed(range(task.n_shots)):
            if max(map(len, rows)) <= limit:
                break
            rows, spans = asked(n_shots)
    gold = None if task.kind == LM else items[index]["gold"]
    return _fit(name, rows, spans, gold, n_tokens, limit)


def _fit(
    name: str, rows: list[list[int]], spans: list[Span], gold: int | None, n_tokens: int, limit: int
) -> Item:
    """Return the item with the last `limit` tokens of each row; n_tokens: as it was at first."""
    cuts = [max(0, len(row) - limit) for row in rows]
    starts = [s - cut for (s, _), cut in zip(spans, cuts, strict=True)]
    rows = [row[-limit:] for row in rows]
    return Item(
        name=name,
        rows=rows,
        # nothing predicts a row's first token
        spans=[(max(s, 1), len(row)) for s, row in zip(starts, rows, strict=True)],
        gold=gold,
        n_tokens=n_tokens,
        cropped=n_tokens > limit,
        span_capped=any(s < 1 and cut > 0 for s, cut in zip(starts, cuts, strict=True)),
    )


def _spans(task: Task, tokens: list[list[int]], name: str) -> tuple[list[list[int]], list[Span]]:
    """Return rows and spans of encoded prompts: what the options do, or do not, have in common."""
    if task.kind == LM:
        asked, whole = tokens
        if len(asked) >= len(whole) or whole[: len(asked)] != asked:
            raise ValueError(
                f"{name}: the context's tokens do not begin the prompt's, so that the answer's "
                "cannot be told apart; its context or continuation is empty or odd"
            )
        return [whole], [(len(asked), len(whole))]
    if task.kind == MC:
        shared = _common_prefix(tokens)
        return tokens, [(shared, len(row)) for row in tokens]
    shared = _common_prefix([row[::-1] for row in tokens])
    return tokens, [(len(row) - shared, len(row)) for row in tokens]


def _common_prefix(rows: list[list[int]]) -> int:
    for position, ids in enumerate(zip(*rows, strict=False)):
        if len(set(ids)) > 1:
            return position
    return min(map(len, rows))
