"""Questions with the documents that answer them: SQuAD 2.0 (qa_1) and HotpotQA (qa_2)."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rove.evals.ruler.haystacks import read_utf8, spread
from rove.evals.ruler.tasks import Draft, Draws, Sources, Task

HEAD = "Answer the question from the documents below. Give the answer alone.\n\n"
TAIL = "\n\nQuestion: {question}\nAnswer:"
LEAST_DOCUMENT = 8  # tokens that a document takes at the very least


@dataclass(frozen=True)
class Question:
    """A question that its documents answer."""

    text: str
    references: list[str]
    """distinct answers of all annotators, in file order"""
    gold: list[int]
    """documents that hold the answer"""
    near: list[int]
    """other documents of the same article (SQuAD), or those that came with it (HotpotQA)"""
    starts_at: int | None
    """character at which the first reference begins in the first gold document, where known"""


@dataclass(frozen=True)
class Library:
    """What a data set holds."""

    path: Path
    documents: list[str]
    questions: list[Question]


def read_library(task: Task, sources: Sources) -> Library:
    """Read the data set of a task; ValueError with the file when it has another schema."""
    path = sources.squad if task.source == "squad" else sources.hotpot
    assert path is not None, "the caller checks needs()"
    read, text = _read_squad if task.source == "squad" else _read_hotpot, read_utf8(path)
    try:
        library = read(path, json.loads(text))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = "SQuAD 2.0" if task.source == "squad" else "HotpotQA with distractors"
        raise ValueError(f"{path}: not {what}: {type(error).__name__} {error}") from None
    if not library.questions:
        raise ValueError(f"{path}: no question with an answer")
    return library


def _number(documents: dict[str, int], text: str) -> int:
    """Return the number of a document, a new one for a new text."""
    if not isinstance(text, str):
        raise TypeError(f"a document is {text!r:.50}, no text")
    return documents.setdefault(text, len(documents))


def _read_squad(path: Path, content: Any) -> Library:
    documents: dict[str, int] = {}
    questions = []
    for article in content["data"]:
        own = [_number(documents, paragraph["context"]) for paragraph in article["paragraphs"]]
        for number, paragraph in zip(own, article["paragraphs"], strict=True):
            near = [other for other in dict.fromkeys(own) if other != number]
            for asked in paragraph["qas"]:
                answers = [a for a in asked["answers"] if a["text"].strip()]
                if not asked.get("is_impossible") and answers:
                    texts = list(dict.fromkeys(a["text"].strip() for a in answers))
                    question, start = asked["question"].strip(), int(answers[0]["answer_start"])
                    questions.append(Question(question, texts, [number], near, start))
    return Library(path, list(documents), questions)


def _read_hotpot(path: Path, content: Any) -> Library:
    documents: dict[str, int] = {}
    questions: list[Question] = []
    for item in content:
        titles = {title for title, _ in item["supporting_facts"]}
        answer = item["answer"].strip()
        gold: list[int] = []
        near: list[int] = []
        for title, sentences in item["context"]:
            text = f"{title}\n{''.join(sentences)}"
            number = _number(documents, text)
            if title not in titles:
                near.append(number)
            elif answer in text:
                gold.insert(0, number)  # the first gold document is the one with the answer
            else:
                gold.append(number)
        if answer and gold:
            questions.append(Question(item["question"].strip(), [answer], gold, near, None))
    return Library(path, list(documents), questions)


def build(library: Library, question: Question, budget: int, draws: Draws, size: int) -> Draft:
    """Make a prompt of `size` documents: the gold ones, near ones, then any others of the file.

    The first gold document stands at the quantile; the gold is the answer's first place in it, or
    its beginning. The control has another answer of the file in all places of this one; it is None
    where the answer stands nowhere, in the question too, or in pieces that a twin cannot replace.
    """
    rng = draws.rng
    near = rng.sample(question.near, len(question.near))
    known = {*question.gold, *near}
    n_others = min(len(library.documents), budget // LEAST_DOCUMENT + len(known))
    others = rng.sample(range(len(library.documents)), n_others)
    chosen = [*question.gold, *near, *(number for number in others if number not in known)][:size]
    fresh = _other_answer(library, question, draws)
    places = spread(draws.order, len(chosen), len(question.gold), draws.quantile)
    rest = sorted(set(range(len(chosen))) - set(places))
    draws.order.shuffle(rest)
    by_place = dict(zip([*places, *rest], chosen, strict=True))
    texts = [library.documents[by_place[place]] for place in range(len(chosen))]
    parts = [f"Document {i}:\n{text}" for i, text in enumerate(texts, 1)]
    tail = TAIL.format(question=question.text)
    before = HEAD + "".join(f"{part}\n\n" for part in parts[: places[0]])
    gold_at = len(before) + len(f"Document {places[0] + 1}:\n") + _answer_start(library, question)
    prompt = HEAD + "\n\n".join(parts) + tail
    control = fresh and HEAD + _replaced("\n\n".join(parts), question.references[0], fresh) + tail
    if control and any(_stands_in(control, reference) for reference in question.references):
        control = None
    return Draft(prompt, control, question.references, gold_at, None)


def _answer_start(library: Library, question: Question) -> int:
    if question.starts_at is not None:
        return question.starts_at
    return max(0, library.documents[question.gold[0]].find(question.references[0]))


def _stands_in(text: str, words: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text, re.IGNORECASE) is not None


def _replaced(text: str, old: str, new: str) -> str:
    return re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", lambda match: new, text)


def _other_answer(library: Library, question: Question, draws: Draws) -> str | None:
    """Draw another question's answer of as many tokens; None where the gold has not this one."""
    answer = question.references[0]
    text = library.documents[question.gold[0]]
    if _replaced(text, answer, "") == text:
        return None
    wanted = draws.count(f" {answer}")
    for other in draws.rng.sample(library.questions, min(len(library.questions), 300)):
        twin = other.references[0]
        if twin != answer and draws.count(f" {twin}") == wanted:
            return twin
    return None
