"""Counting: the common words of a list (`cwe`) and the frequent ones of a coded text (`fwe`)."""

import math
import re
from functools import cache, partial
from itertools import count

from rove.evals.ruler.tasks import Draft, Draws, numbered
from rove.evals.ruler.words import all_words, distinct, draw_letters, twins

N_COMMON, N_FREQUENT = 10, 3
CWE_HEAD = "Some words of this numbered list come more often than others. Memorise those.\n"
CWE_TAIL = (
    "\nQuestion: Which 10 words come most often in the list? "
    "Answer: The 10 words that come most often in the list are:"
)
FWE_HEAD = "Count the words of this coded text and pass over the dots: "
FWE_TAIL = (
    "\nQuestion: Which three words come most often in the coded text? "
    "Answer: The three words that come most often in the coded text are:"
)


@cache
def cwe_words() -> tuple[str, ...]:
    """Return the words that lists are made of: all but those of the question itself."""
    asked = set(re.findall(r"\w+", (CWE_HEAD + CWE_TAIL).lower()))
    return tuple(word for word in all_words() if word.lower() not in asked)


def cwe_counts(length: int) -> tuple[int, int, int, int, int]:
    """Return repeats of common and other words, words of the example, and its two repeats."""
    return (30, 3, 40, 10, 3) if length >= 4096 else (6, 1, 20, 3, 1)


def cwe_most(length: int) -> int:
    """Return the largest size: all words but those of the example."""
    return len(cwe_words()) - cwe_counts(length)[2]


def build_cwe(length: int, draws: Draws, size: int) -> Draft:
    """Make a list of `size` distinct words behind a worked example; ten of them are common.

    The answer names the common words in the order of their first appearance. The control has other
    common words at the same places.
    """
    often, seldom, n_example, example_often, example_seldom = cwe_counts(length)
    words = draws.rng.sample(cwe_words(), len(cwe_words()))
    example, words = words[:n_example], words[n_example:]
    common, others, unused = words[:N_COMMON], words[N_COMMON:size], words[size:]
    fresh = twins(partial(draws.rng.choice, unused or [""]), common, draws.count, {""})
    shown = _shuffled(example[:N_COMMON], example[N_COMMON:], example_often, example_seldom, draws)
    answer = numbered(sorted(example[:N_COMMON], key=shown.index))
    head = f"{CWE_HEAD}{numbered(shown)}{CWE_TAIL} {answer}\n\n{CWE_HEAD}"
    entries = _shuffled(common, others, often, seldom, draws)
    prompt = head + numbered(entries) + CWE_TAIL
    control = None
    if fresh is not None:
        control = head + numbered([fresh.get(word, word) for word in entries]) + CWE_TAIL
    references = sorted(common, key=entries.index)
    n_words = len(cwe_words())
    possible = sum(math.log(n_words - i) for i in range(N_COMMON))
    return Draft(prompt, control, references, None, possible)


def fwe_vocabulary(budget: int) -> int:
    """Return how many coded words there are: a fiftieth of the prompt, the noise included."""
    return max(N_FREQUENT + 1, budget // 50)


def fwe_counts(n_words: int, vocabulary: int) -> list[int]:
    """Return how often each rank from 1 appears: Zipf's law with exponent 2."""
    zeta = math.pi**2 / 6
    return [int(n_words / (zeta * rank**2)) for rank in range(1, vocabulary + 1)]


def fwe_least(budget: int) -> int:
    """Return the fewest words at which ranks 2 to 4 differ from each other and from rank 5."""
    for n_words in count(1):
        counts = [*fwe_counts(n_words, fwe_vocabulary(budget)), 0][1 : N_FREQUENT + 2]
        if all(a > b for a, b in zip(counts, counts[1:], strict=False)):
            break
    return n_words


def build_fwe(budget: int, draws: Draws, size: int) -> Draft:
    """Make a coded text of about `size` words; the answer is ranks 2 to 4, by falling frequency.

    Rank 1 stands as dots. The control has other words of the same frequencies at the same places.
    """
    draw = partial(draw_letters, draws.rng, 6)
    n_words = fwe_vocabulary(budget)
    words = ["...", *distinct(draw, n_words - 1)]
    asked = words[1 : N_FREQUENT + 1]
    fresh = twins(draw, asked, draws.count, set(words))
    repeats = zip(words, fwe_counts(size, n_words), strict=True)
    text = [word for word, n in repeats for _ in range(n)]
    draws.order.shuffle(text)
    prompt = FWE_HEAD + " ".join(text) + FWE_TAIL
    control = None
    if fresh is not None:
        control = FWE_HEAD + " ".join(fresh.get(word, word) for word in text) + FWE_TAIL
    possible = sum(math.log(26**6 - i) for i in range(N_FREQUENT))
    return Draft(prompt, control, asked, None, possible)


def _shuffled(
    common: list[str], others: list[str], often: int, seldom: int, draws: Draws
) -> list[str]:
    entries = common * often + others * seldom
    draws.order.shuffle(entries)
    return entries
