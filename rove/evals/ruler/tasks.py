"""The tasks of RULER (arXiv 2404.06654) and `vt_hops`, which is ours: what makes each of them.

`gen` tokens are kept free for the answer: a prompt has at most length - gen tokens, end-of-text in
front of it not counted. Scores come by category; vt_hops stands apart from RULER's VT.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Literal

Layout = Literal["stratified", "fixed"]
Kind = Literal["niah", "vt", "vt_hops", "cwe", "fwe", "qa"]


@dataclass(frozen=True)
class Task:
    """What is asked, and in what haystack."""

    name: str
    category: str
    kind: Kind
    gen: int
    """tokens kept free for the answer"""
    metric: Literal["all", "part"] = "all"
    """string match: share of the references found, or whether any is"""
    haystack: Literal["noise", "essay", "needle"] | None = None
    keys: Literal["words", "uuids"] = "words"
    values: Literal["numbers", "uuids"] = "numbers"
    n_keys: int = 1
    n_values: int = 1
    """of each key"""
    n_queries: int = 1
    source: Literal["essay", "squad", "hotpot"] | None = None
    """the user's file that it needs"""

    @property
    def variant(self) -> str | None:
        """What to call the samples made here, where their text is not RULER's own."""
        return "essay:custom" if self.source == "essay" else None


_NIAH = Task("", "NIAH", "niah", gen=128, haystack="noise")
_ESSAY = replace(_NIAH, haystack="essay", source="essay")
_QA = Task("", "QA", "qa", gen=32, metric="part")
TASKS = {
    task.name: task
    for task in (
        replace(_NIAH, name="niah_single_1"),
        replace(_ESSAY, name="niah_single_2"),
        replace(_ESSAY, name="niah_single_3", values="uuids"),
        replace(_ESSAY, name="niah_multikey_1", n_keys=4),
        replace(_NIAH, name="niah_multikey_2", haystack="needle"),
        replace(_NIAH, name="niah_multikey_3", haystack="needle", keys="uuids", values="uuids"),
        replace(_ESSAY, name="niah_multivalue", n_values=4),
        replace(_ESSAY, name="niah_multiquery", n_keys=4, n_queries=4),
        Task("vt", "VT", "vt", gen=30),
        Task("cwe", "CWE", "cwe", gen=120),
        Task("fwe", "FWE", "fwe", gen=50),
        replace(_QA, name="qa_1", source="squad"),
        replace(_QA, name="qa_2", source="hotpot"),
        Task("vt_hops", "vt_hops", "vt_hops", gen=30),
    )
}


@dataclass(frozen=True)
class Sources:
    """The user's files that some tasks need."""

    essay: Path | None = None
    """UTF-8 text for the essay haystacks"""
    squad: Path | None = None
    """SQuAD 2.0 JSON"""
    hotpot: Path | None = None
    """HotpotQA JSON with distractors"""


@dataclass(frozen=True)
class Draws:
    """Where a generator takes its chances from; every attempt at a sample starts with fresh ones"""

    rng: Random
    order: Random
    """for places and shuffles: rng itself, or one that is alike for all samples"""
    quantile: float
    """in [0, 1): where among its possible places the gold stands"""
    count: Callable[[str], int]
    """text -> tokens"""


@dataclass(frozen=True)
class Draft:
    """A prompt with its answer, before anything is counted."""

    prompt: str
    control: str | None
    references: list[str]
    gold_at: int | None
    """character of the prompt at which the gold begins; None when it is all over the prompt"""
    log_possibilities: float | None
    hop: int | None = None


Build = Callable[[Draws, int], Draft]  # draws, size of the haystack


def find_task(name: str) -> Task:
    """Return the task of this name; ValueError for another."""
    if name not in TASKS:
        raise ValueError(f"task {name!r} is unknown; there is: {', '.join(TASKS)}")
    return TASKS[name]


def needs(task: str, sources: Sources) -> str | None:
    """Return what a task misses and the flag that gives it; None when all is there."""
    what = {"essay": "a UTF-8 text", "squad": "SQuAD 2.0 JSON", "hotpot": "HotpotQA JSON"}
    source = find_task(task).source
    if source is None or getattr(sources, source) is not None:
        return None
    return f"task {task} needs {what[source]}: give --{source} FILE"


def canonical(task: Task, references: Sequence[str]) -> str:
    """Return the one answer that is scored: references joined as the task asks for them."""
    if task.kind in ("qa", "vt_hops"):
        return references[0]
    if task.kind == "cwe":
        return numbered(references)
    return (" " if task.kind == "vt" else ", ").join(references)


def numbered(words: Sequence[str]) -> str:
    """Return "1. word 2. word ..."."""
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def in_order(task: Task, references: Sequence[str], prompt: str) -> list[str]:
    """Return references in the order in which an answer gives them.

    By first appearance, where the order could not be known otherwise: several values of one key,
    and common words (in the last numbered list of the prompt). References not found come last.
    """
    if task.kind != "cwe" and task.n_values == 1:
        return list(references)
    lists = list(re.finditer(r"\b1\. ", prompt)) if task.kind == "cwe" else []
    start = lists[-1].start() if lists else 0
    return sorted(references, key=partial(_first, prompt, start))


def _first(prompt: str, start: int, word: str) -> int:
    found = re.compile(rf"(?<![\w-]){re.escape(word)}(?![\w-])").search(prompt, start)
    return found.start() if found else len(prompt)
