"""Score samples: the NLL of the answer's tokens behind the prompt, and beside it the control's.

The sequence is end-of-text, then the prompt without trailing space, then one space and the answer;
the prompt and the answer are encoded as one text. Natural logarithms; sums in float64.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rove.evals.ruler.samples import Sample
from rove.evals.ruler.tasks import find_task
from rove.evals.ruler.words import Encode

# idx, targets (B, T) int64, mask (B, T) bool -> nll float32, is_argmax bool, rank int64, (B, T)
Score = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
Generate = Callable[[Tensor, int], Sequence[int]]  # ids (1, T) int64, how many at most -> new ids
Decode = Callable[[Iterable[int]], str]
CONTROL = re.compile(r"[\x00-\x1f]")


@dataclass(frozen=True)
class Scored:
    """What the model makes of the answer's tokens, each (n,), on the host."""

    nll: Tensor  # float64, nats
    is_argmax: Tensor
    rank: Tensor

    @property
    def mean(self) -> float:
        return float(self.nll.mean())


def answer_tokens(
    prompt: str, answer: str, encode: Encode, eot_id: int
) -> tuple[list[int], int, int]:
    """Return the ids of end-of-text, prompt and answer, where the answer begins, and a count.

    The prompt loses trailing space, the answer gets one space in front. Where the prompt's ids are
    no prefix of the whole's, the answer begins behind their common prefix and the count is 1.
    """
    text = prompt.rstrip()
    before = [int(i) for i in encode(text)]
    whole = [int(i) for i in encode(f"{text} {answer.strip()}")]
    common = _common(before, whole)
    return [eot_id, *whole], 1 + common, int(common < len(before))


def _common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def content_mask(
    ids: list[int], start: int, prompt: str, answer: str, references: list[str], decode: Decode
) -> list[bool]:
    """Return for each of ids[start:] whether it overlaps characters of the references.

    References are looked for in the answer one behind the other; separators and numerals between
    them are not content.
    """
    head = prompt.rstrip()
    text = f"{head} {answer.strip()}"
    is_content, end = [False] * len(text), len(head) + 1
    for reference in references:
        found = text.find(reference.strip(), end)
        if found >= 0:
            end = found + len(reference.strip())
            is_content[found:end] = [True] * (end - found)
    first, base = (start, len(head)) if decode(ids[1:start]) == head else (1, 0)
    left, mask = base + _common(decode(ids[first:start]), text[base:]), []
    for stop in range(start + 1, len(ids) + 1):
        shown = decode(ids[first:stop])
        right = base + _common(shown, text[base:])
        split = base + len(shown) > right  # the token ends within a character, which it overlaps
        mask.append(any(is_content[left : right + split]))
        left = right
    return mask


def score_tokens(
    sequences: Sequence[tuple[list[int], int]],
    score: Score,
    eot_id: int,
    batch_size: int,
    device: torch.device,
) -> list[Scored]:
    """Score ids[start:] of each (ids, start), batch_size at once, filled up on the right."""
    results = []
    for first in range(0, len(sequences), batch_size):
        group = sequences[first : first + batch_size]
        width = max(len(ids) for ids, _ in group)
        rows = torch.full((len(group), width), eot_id, dtype=torch.int64)
        mask = torch.zeros(len(group), width - 1, dtype=torch.bool)
        for i, (ids, start) in enumerate(group):
            rows[i, : len(ids)] = torch.tensor(ids)
            mask[i, start - 1 : len(ids) - 1] = True  # column p predicts the token at p + 1
        inputs, targets = rows[:, :-1].to(device), rows[:, 1:].to(device)
        nll, top, rank = (x.cpu() for x in score(inputs, targets, mask.to(device)))
        for i in range(len(group)):
            own = mask[i]
            results.append(Scored(nll[i][own].double(), top[i][own].bool(), rank[i][own]))
    return results


def score_samples(
    samples: Sequence[Sample],
    score: Score,
    generate: Generate | None,
    encode: Encode,
    decode: Decode,
    eot_id: int,
    batch_size: int,
    device: torch.device,
    rank: int,
    size: int,
    gather: Callable[[list[dict[str, Any]]], list[list[dict[str, Any]]]],
    progress: Callable[[int], object] = lambda n_samples: None,
) -> list[dict[str, Any]]:
    """Return a row for every sample, in order, on every rank; sample i is scored by i mod size.

    NLLs are in nats per token of the answer, nll_total in nats. Neither batch_size nor the ranks
    change a row. gather: a value -> the values of all ranks. ValueError for a loss that is not
    finite.
    """
    own = samples[rank::size]
    rows: list[dict[str, Any]] = []
    for first in range(0, len(own), batch_size):
        group = own[first : first + batch_size]
        asked = [_texts_to_score(sample) for sample in group]
        parts = [[answer_tokens(p, a, encode, eot_id) for p, a in texts] for texts in asked]
        flat = [(ids, start) for part in parts for ids, start, _ in part]
        scored = iter(score_tokens(flat, score, eot_id, batch_size, device))
        for sample, part in zip(group, parts, strict=True):
            row = _row(sample, part[0], [next(scored) for _ in part], decode)
            if generate is not None:
                row["string_match"] = _generated(sample, generate, encode, decode, eot_id, device)
            rows.append(row)
        progress(len(group))
    by_rank = gather(rows)
    return [by_rank[i % size][i // size] for i in range(len(samples))]


def _texts_to_score(sample: Sample) -> list[tuple[str, str]]:
    """Return (prompt, answer): the sample's, those of its other references, the control's last."""
    texts = [(sample.prompt, sample.answer)]
    if find_task(sample.task).kind == "qa":
        others = dict.fromkeys(ref.strip() for ref in sample.references)
        texts += [(sample.prompt, ref) for ref in others if ref != sample.answer.strip()]
    if sample.control is not None:
        texts.append((sample.control, sample.answer))
    return texts


def _row(
    sample: Sample, tokens: tuple[list[int], int, int], scored: list[Scored], decode: Decode
) -> dict[str, Any]:
    ids, start, mismatch = tokens
    main, others = scored[0], scored[1:]
    control = others.pop() if sample.control is not None else None
    for part in scored:
        if not bool(part.nll.isfinite().all()):
            where = f"task {sample.task}, length={sample.length}, sample {sample.index}"
            raise ValueError(f"{where}: the loss is not finite; are the weights?")
    references = sample.references
    content = main.nll[content_mask(ids, start, sample.prompt, sample.answer, references, decode)]
    is_qa = find_task(sample.task).kind == "qa"
    return {
        "index": sample.index,
        "depth": sample.depth,
        "hop": sample.hop,
        "n_tokens": len(main.nll),
        "nll_total": float(main.nll.sum()),
        "nll": main.mean,
        "nll_content": float(content.mean()) if len(content) else None,
        "nll_control": None if control is None else control.mean,
        "nll_min_reference": min(x.mean for x in (main, *others)) if is_qa else None,
        "exact": bool(main.is_argmax.all()),
        "first_rank": int(main.rank[0]),
        "string_match": None,
        "log_possibilities": sample.log_possibilities,
        "prefix_mismatch": mismatch,
    }


def _generated(
    sample: Sample,
    generate: Generate,
    encode: Encode,
    decode: Decode,
    eot_id: int,
    device: torch.device,
) -> float:
    task = find_task(sample.task)
    ids = [eot_id, *(int(i) for i in encode(sample.prompt.rstrip()))]
    new = [int(i) for i in generate(torch.tensor([ids], device=device), task.gen)]
    new = new[: new.index(eot_id)] if eot_id in new else new
    return string_match(task.metric, decode(new), sample.references)


def string_match(metric: str, generation: str, references: Sequence[str]) -> float:
    """Return RULER's match of a generation in percent, letter case aside.

    `all`: share of the references that stand in it; `part`: 100 if any does, else 0.
    """
    assert metric in ("all", "part"), metric
    text = CONTROL.sub("\n", generation.strip()).strip().lower()
    found = [reference.lower() in text for reference in references]
    return 100.0 * (any(found) if metric == "part" else sum(found) / len(found))
