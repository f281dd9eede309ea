"""Haystacks: filler lines, a user's text by sentences, and where the needles go."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from rove.evals.ruler.tasks import Layout
from rove.evals.ruler.words import Encode

# The filler of the passkey task, one line of five sentences.
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
MAX_WORDS = 30  # of a sentence; longer ones are cut, so that text without full stops has places


@dataclass(frozen=True)
class Essay:
    """A text as sentences."""

    path: Path
    sentences: list[str]
    tokens_from: list[int]
    """tokens of the text from each sentence to the end"""

    def last_start(self, n_tokens: int) -> int:
        """Return the last sentence with n_tokens of text behind it; ValueError if none has."""
        starts = [i for i, tokens in enumerate(self.tokens_from) if tokens >= n_tokens]
        if not starts:
            have = self.tokens_from[0] if self.tokens_from else 0
            raise ValueError(
                f"{self.path}: has {have} tokens and samples need {n_tokens}; "
                "give a longer text with --essay FILE, or ask for shorter lengths"
            )
        return starts[-1]


def read_essay(path: Path, encode: Encode) -> Essay:
    """Read a UTF-8 text and split it behind full stops; ValueError when it is not UTF-8."""
    sentences = []
    for sentence in SENTENCE_END.split(read_utf8(path).strip()):
        words = sentence.split()
        cuts = range(0, len(words), MAX_WORDS)
        sentences += [" ".join(words[i : i + MAX_WORDS]) for i in cuts]
    tokens_from, total = [], 0
    for sentence in reversed(sentences):
        total += len(encode(f" {sentence}"))
        tokens_from.append(total)
    return Essay(path, sentences, tokens_from[::-1])


def read_utf8(path: Path) -> str:
    """Return a file's text; ValueError with its name when it is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}; convert it") from None


def essay_start(essay: Essay, rng: Random, n_tokens: int, layout: Layout) -> int:
    """Return the sentence at which a sample's haystack begins: any with enough text behind it.

    In the fixed layout it is the first, as in RULER.
    """
    last = essay.last_start(n_tokens)
    return 0 if layout == "fixed" else rng.randrange(last + 1)


def spread(order: Random, n_places: int, n: int, quantile: float) -> list[int]:
    """Return n distinct places below n_places: the first at the quantile, the others anywhere."""
    assert n <= n_places, f"{n} needles in {n_places} places"
    gold = int(quantile * n_places)
    others = order.sample(range(n_places - 1), n - 1)
    return [gold, *(place + (place >= gold) for place in others)]


def weave(
    pieces: Sequence[str], inserts: Sequence[str], places: Sequence[int], separator: str
) -> tuple[str, list[int]]:
    """Insert inserts[i] before pieces[places[i]], or behind all of them, and join.

    places: distinct, at most len(pieces). Returns the text and where each insert begins in it.
    """
    insert_at = {place: i for i, place in enumerate(places)}
    parts: list[str] = []
    starts, length = [0] * len(inserts), 0
    for place in range(len(pieces) + 1):
        chosen = [inserts[insert_at[place]]] if place in insert_at else []
        if chosen:
            starts[insert_at[place]] = length
        chosen += pieces[place : place + 1]
        parts += chosen
        length += sum(len(part) + len(separator) for part in chosen)
    return separator.join(parts), starts
