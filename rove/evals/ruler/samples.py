"""Make samples: a sample depends on (task, length, seed, index) alone, but for its depth.

The depth is stratified: the gold of sample j stands at quantile (j + 0.5) / n of its places, the j
permuted by (task, length, seed); so it depends on n too. Layout "fixed" is RULER's own habit: all
samples of a task share one depth and one order of what is shuffled, and essays begin at their
first sentence. The haystack is as large as the length allows, by true token counts.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from rove.evals.ruler import tracing
from rove.evals.ruler.recipes import Recipe, find_size, recipes
from rove.evals.ruler.tasks import Draws, Layout, Sources, Task, canonical, find_task, needs
from rove.evals.ruler.words import Encode

VERSION = "1"  # of the generators: samples of two versions may differ


@dataclass(frozen=True)
class Sample:
    """A prompt, its answer, and what is known of them."""

    index: int
    task: str
    length: int
    """tokens of the prompt and those kept free for the answer, at most"""
    prompt: str
    answer: str
    """canonical"""
    references: list[str]
    depth: int | None
    """tokens of the prompt before the gold; None where it is all over the prompt, or unknown"""
    seed: int | None
    version: str
    """of the generator"""
    control: str | None = None
    """the prompt with other values, of as many tokens, in the places of the gold ones"""
    log_possibilities: float | None = None
    """natural log of how many answers have the right format; None where that is open"""
    hop: int | None = None
    """vt_hops: assignments between the variable asked for and its value"""
    n_answer_tokens: int | None = None
    """of a space and the answer behind the prompt without trailing space"""


def make_samples(
    task: str,
    length: int,
    n: int,
    seed: int,
    encode: Encode,
    sources: Sources,
    layout: Layout = "stratified",
    progress: Callable[[int], object] = lambda n_samples: None,
) -> list[Sample]:
    """Make n samples whose prompts, and controls, have at most length - gen tokens.

    encode: text -> ids, none special. Of vt_hops, each N_VARIABLES samples share a context.
    ValueError for an unknown task, a missing, wrong or too small source, and a length that cannot
    hold the smallest sample.
    """
    found = find_task(task)
    missing = needs(task, sources)
    if missing:
        raise ValueError(missing)
    if n < 1:
        raise ValueError(f"num_samples={n}: must be at least 1")
    per_context = tracing.N_VARIABLES if found.kind == "vt_hops" else 1
    n_contexts = -(-n // per_context)
    ranks = list(range(n_contexts))
    stream(task, length, seed, "depth").shuffle(ranks)
    recipe_of = recipes(found, length, n, encode, sources, layout)
    count = partial(count_tokens, encode)
    samples = []
    for index in range(n):
        context = index // per_context
        quantile = (ranks[context] + 0.5) / n_contexts
        draws = partial(start_draws, (task, length, seed), context, quantile, layout, count)
        samples.append(make_sample(found, length, seed, index, recipe_of(index), draws))
        progress(1)
    return samples


def make_sample(
    task: Task, length: int, seed: int, index: int, recipe: Recipe, draws: Callable[[], Draws]
) -> Sample:
    """Make one sample; `draws` returns the same fresh chances whenever it is called."""
    size = find_size(task, length, recipe, draws)
    chances = draws()
    draft, count = recipe.final(chances, size), chances.count
    n_tokens, control = count(draft.prompt), draft.control
    assert n_tokens <= length - task.gen, f"{n_tokens} tokens are too many"
    if control is not None and count(control) != n_tokens:
        control = None
    text, answer = draft.prompt.rstrip(), canonical(task, draft.references)
    before = None if draft.gold_at is None else draft.prompt[: draft.gold_at].rstrip(" ")
    return Sample(
        index=index,
        task=task.name,
        length=length,
        prompt=draft.prompt,
        answer=answer,
        references=draft.references,
        depth=None if before is None else count(before),
        seed=seed,
        version=VERSION,
        control=control,
        log_possibilities=draft.log_possibilities,
        hop=draft.hop,
        n_answer_tokens=count(f"{text} {answer}") - count(text),
    )


def count_tokens(encode: Encode, text: str) -> int:
    """Return how many tokens a text has."""
    return len(encode(text))


def stream(*name: object) -> Random:
    """Return the random numbers that belong to a name, the same in every process."""
    digest = hashlib.sha256("\x1f".join(map(str, name)).encode()).digest()
    return Random(int.from_bytes(digest, "big"))


def start_draws(
    name: tuple[object, ...],
    context: int,
    quantile: float,
    layout: Layout,
    count: Callable[[str], int],
) -> Draws:
    """Return a sample's chances from their beginning."""
    rng = stream(*name, context)
    if layout == "stratified":
        return Draws(rng, rng, quantile, count)
    order = stream(*name, "layout")
    return Draws(rng, order, order.random(), count)
