"""Needles in a haystack: lines that tie a value to a key, and a question for some of them."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from rove.evals.ruler.haystacks import FILLER, Essay, essay_start, spread, weave
from rove.evals.ruler.tasks import Draft, Draws, Layout, Task, in_order
from rove.evals.ruler.words import distinct, draw_number, draw_uuid, draw_words, twins

ONE = (
    "The text below hides a special magic {kind}. Memorise it.\n",
    "\nWhat is the special magic {kind} for {query} in the text? "
    "The special magic {kind} for {query} mentioned in the text is",
)
MANY = (
    "The text below hides special magic {kind}s. Memorise them.\n",
    "\nWhat are all the special magic {kind}s for {query} in the text? "
    "The special magic {kind}s for {query} mentioned in the text are",
)
NEEDLE = "One of the special magic {kind}s for {key} is: {value}."


def value_kind(task: Task) -> tuple[str, Callable[[Random], str], float]:
    """Return the noun for a value, how to draw one, and the log of how many there are."""
    if task.values == "numbers":
        return "number", draw_number, math.log(9_000_000)
    return "uuid", draw_uuid, 122 * math.log(2)


def least_size(task: Task) -> int:
    """Return the fewest haystack lines or sentences that leave each needle a place of its own."""
    return max(1, task.n_keys * task.n_values - 1)


def build(
    task: Task, essay: Essay | None, budget: int, layout: Layout, draws: Draws, size: int
) -> Draft:
    """Make a prompt whose haystack has `size` lines or sentences.

    The first needle asked for stands at the quantile, the others anywhere. The control has other
    values at the same places, for the needles asked for.
    """
    kind, draw_value, log_values = value_kind(task)
    rng = draws.rng
    draw_key = partial(draw_words if task.keys == "words" else draw_uuid, rng)
    draw = partial(draw_value, rng)
    keys = distinct(draw_key, task.n_keys)
    owners = [key for key in keys for _ in range(task.n_values)]
    values = distinct(draw, len(owners))
    n_asked = task.n_queries * task.n_values
    fresh = twins(draw, values[:n_asked], draws.count, set(values))
    start = essay_start(essay, rng, budget, layout) if essay else 0
    pieces = _pieces(task, essay, start, set(keys), draws, size)
    places = spread(draws.order, size + 1, len(owners), draws.quantile)
    separator = " " if task.haystack == "essay" else "\n"
    head, tail = ONE if n_asked == 1 else MANY
    head = head.format(kind=kind)
    tail = tail.format(kind=kind, query=_listed(keys[: task.n_queries]))

    def prompt_with(values: Sequence[str]) -> tuple[str, int]:
        pairs = zip(owners, values, strict=True)
        needles = [NEEDLE.format(kind=kind, key=key, value=value) for key, value in pairs]
        text, starts = weave(pieces, needles, places, separator)
        return head + text + tail, len(head) + starts[0] + needles[0].index(f": {values[0]}") + 2

    prompt, gold_at = prompt_with(values)
    control = None if fresh is None else prompt_with([fresh.get(v, v) for v in values])[0]
    asked = in_order(task, values[:n_asked], prompt)
    return Draft(prompt, control, asked, gold_at, n_asked * log_values)


def _pieces(
    task: Task, essay: Essay | None, start: int, keys: set[str], draws: Draws, size: int
) -> list[str]:
    if task.haystack == "noise":
        return [FILLER] * size
    if essay is not None:
        return essay.sentences[start : start + size]
    kind, draw_value, _ = value_kind(task)
    draw_key = draw_words if task.keys == "words" else draw_uuid
    lines: list[str] = []
    taken = set(keys)
    while len(lines) < size:  # key and value in turn, so that more lines begin with the same ones
        key = draw_key(draws.rng)
        value = draw_value(draws.rng)
        if key not in taken:
            taken.add(key)
            lines.append(NEEDLE.format(kind=kind, key=key, value=value))
    return lines


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + ", and " + names[-1]
