"""Which generator makes a task's samples, and how large its haystack may be."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rove.evals.ruler import counting, niah, qa, tracing
from rove.evals.ruler.haystacks import read_essay
from rove.evals.ruler.tasks import Build, Draws, Layout, Sources, Task
from rove.evals.ruler.words import Encode

UNBOUNDED = 1 << 24
MAX_PROBES = 24  # of the search for a size; four or five are usual


@dataclass(frozen=True)
class Recipe:
    """How to build one sample, and the sizes that its haystack may have."""

    build: Build
    final: Build
    """the same, for the prompt that is kept; never longer than build's"""
    least: int
    most: int
    filled_from: Path | None = None
    """the file that must fill the prompt, where one does"""


def recipes(
    task: Task, length: int, n: int, encode: Encode, sources: Sources, layout: Layout
) -> Callable[[int], Recipe]:
    """Return what gives the recipe of each index below n; read the task's source once."""
    budget = length - task.gen
    most = UNBOUNDED
    build: Build
    if task.kind == "qa":
        return _qa_recipes(task, budget, n, sources)
    if task.kind == "vt_hops":
        return _hops_recipe
    if task.kind == "niah":
        essay = None
        if task.source == "essay" and sources.essay is not None:
            essay = read_essay(sources.essay, encode)
        build, least = partial(niah.build, task, essay, budget, layout), niah.least_size(task)
    elif task.kind == "vt":
        build, least = partial(tracing.build_vt, budget), tracing.N_NAMES - 1
    elif task.kind == "cwe":
        build, least = partial(counting.build_cwe, length), counting.N_COMMON + 1
        most = counting.cwe_most(length)
    else:
        build, least = partial(counting.build_fwe, budget), counting.fwe_least(budget)
    return lambda index: Recipe(build, build, least, most)


def find_size(task: Task, length: int, recipe: Recipe, draws: Callable[[], Draws]) -> int:
    """Return the largest size whose prompt has at most length - gen tokens, or one near it.

    The token count of a prompt is all but linear in the size, so few prompts are tried. ValueError
    when not even the smallest fits, or when the source runs out.
    """
    budget = length - task.gen

    def tokens_at(size: int) -> int:
        chances = draws()
        return chances.count(recipe.build(chances, size).prompt)

    low, high = recipe.least, recipe.most + 1  # fits; does not fit
    low_tokens = tokens_at(low)
    if low_tokens > budget:
        raise ValueError(
            f"task {task.name}, length={length}: the smallest sample takes {low_tokens} tokens and "
            f"{task.gen} more are kept for the answer; lengths from about {low_tokens + task.gen} "
            "work"
        )
    guess = low + 8
    for _ in range(MAX_PROBES):
        if high - low <= 1:
            break
        guess = max(low + 1, min(guess, high - 1))
        tokens = tokens_at(guess)
        slope = max((tokens - low_tokens) / (guess - low), 0.1)
        if tokens <= budget:
            low, low_tokens = guess, tokens
        else:
            high = guess
        guess = low + int((budget - low_tokens) / slope)
    if recipe.filled_from is not None and low == recipe.most:
        raise ValueError(
            f"{recipe.filled_from}: all its {low} documents give {low_tokens} of the {budget} "
            f"tokens that length={length} takes; give a larger file, or ask for shorter lengths"
        )
    return low


def _hops_recipe(index: int) -> Recipe:
    """Fit with the longest question, so that all questions of a context share its haystack."""
    final = partial(tracing.build_hops, index % tracing.N_VARIABLES)
    return Recipe(partial(tracing.build_hops, None), final, tracing.N_VARIABLES - 1, UNBOUNDED)


def _qa_recipes(task: Task, budget: int, n: int, sources: Sources) -> Callable[[int], Recipe]:
    library = qa.read_library(task, sources)
    have = len(library.questions)
    if n > have:
        raise ValueError(f"{library.path}: num_samples={n}, but it has {have} answerable questions")

    def recipe(index: int) -> Recipe:
        question = library.questions[index]
        build = partial(qa.build, library, question, budget)
        most = len(library.documents)
        return Recipe(build, build, len(question.gold), most, library.path)

    return recipe
