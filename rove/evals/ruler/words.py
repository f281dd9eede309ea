"""Words, numbers, names and identifiers that the generators draw, and twins of equal length."""

import string
import uuid
from collections.abc import Callable, Collection, Sequence
from functools import cache
from importlib.resources import files
from random import Random
from typing import Any

from rove.errors import import_package

Encode = Callable[[str], Sequence[int] | Any]  # text -> ids, without special ones; has a length
TRIES = 20_000  # of draws for a value with a given property


@cache
def word_list(name: str) -> tuple[str, ...]:
    """Return the wonderwords list `noun`, `adjective` or `verb`: sorted, distinct, no spaces.

    ValueError when the package is not installed or does not load.
    """
    package = import_package("wonderwords.assets")
    text = (files(package) / f"{name}list.txt").read_text(encoding="utf-8")
    entries = {line.strip() for line in text.splitlines()}
    return tuple(sorted(entry for entry in entries if entry and " " not in entry))


@cache
def all_words() -> tuple[str, ...]:
    """Return the three lists as one: sorted, distinct."""
    return tuple(sorted({w for name in ("noun", "adjective", "verb") for w in word_list(name)}))


def draw_words(rng: Random) -> str:
    """Draw a key such as `rapid-otter`: an adjective and a noun."""
    return f"{rng.choice(word_list('adjective'))}-{rng.choice(word_list('noun'))}"


def draw_number(rng: Random) -> str:
    """Draw a number of seven digits, each with equal chance."""
    return str(rng.randrange(1_000_000, 10_000_000))


def draw_uuid(rng: Random) -> str:
    """Draw an identifier of version 4: 122 random bits."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def draw_letters(rng: Random, n_letters: int, upper: bool = False) -> str:
    """Draw a coded word or the name of a variable."""
    alphabet = string.ascii_uppercase if upper else string.ascii_lowercase
    return "".join(rng.choice(alphabet) for _ in range(n_letters))


def distinct(draw: Callable[[], str], n: int, taken: Collection[str] = ()) -> list[str]:
    """Draw n values that differ from each other and from those taken."""
    found: dict[str, None] = {}
    for _ in range(TRIES + 2 * n):
        if len(found) == n:
            break
        value = draw()
        if value not in taken:
            found[value] = None
    assert len(found) == n, "the values to draw from have run out"
    return list(found)


def twins(
    draw: Callable[[], str], values: Sequence[str], count: Callable[[str], int], taken: set[str]
) -> dict[str, str] | None:
    """Return a fresh value for each of `values`, of as many tokens behind a space; None if not.

    count: text -> tokens. No twin is among `values` and `taken` or stands for two values.
    """
    used, fresh = taken | set(values), {}
    for value in values:
        wanted = count(f" {value}")
        for _ in range(TRIES):
            twin = draw()
            if twin not in used and count(f" {twin}") == wanted:
                break
        else:
            return None
        used.add(twin)
        fresh[value] = twin
    return fresh
