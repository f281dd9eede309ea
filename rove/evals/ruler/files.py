"""Samples as jsonl: ours, and those that NVIDIA/RULER's scripts write, whose wording is official.

An official line has `input`, `outputs`, `length`, and where present `answer_prefix` (it ends the
prompt) and `token_position_answer`. The task is the name of the file's folder, the length that of
a folder above whose name is a number, as in `4096/data/vt/validation.jsonl`.
"""

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from rove.evals.ruler.samples import Sample
from rove.evals.ruler.tasks import TASKS, canonical, find_task, in_order
from rove.files import write_atomic

OFFICIAL = "NVIDIA/RULER"  # the version of such samples
TEXT, NUMBER, OPTIONAL = (str,), (int,), (int, type(None))
KINDS: dict[str, tuple[type, ...]] = {
    "index": NUMBER,
    "task": TEXT,
    "length": NUMBER,
    "prompt": TEXT,
    "answer": TEXT,
    "references": (list,),
    "depth": OPTIONAL,
    "seed": OPTIONAL,
    "version": TEXT,
    "control": (str, type(None)),
    "log_possibilities": (float, int, type(None)),
    "hop": OPTIONAL,
    "n_answer_tokens": OPTIONAL,
}


def write_samples(path: Path, samples: list[Sample]) -> None:
    """Write samples as jsonl, whole or not at all."""
    text = "".join(json.dumps(asdict(sample)) + "\n" for sample in samples)
    write_atomic(path, lambda file: file.write(text.encode("ascii")))


def read_samples(path: Path, task: str | None = None, length: int | None = None) -> list[Sample]:
    """Read samples of ours or official ones, which the first line tells.

    task, length: of an official file; None takes them from its folders, the length else from the
    largest length in it. ValueError with file and line for what is missing or of another type.
    """
    lines = path.read_bytes().split(b"\n")
    rows = [(f"{path}:{i}", line) for i, line in enumerate(lines, 1) if line.strip()]
    objects = [(where, _object(where, line)) for where, line in rows]
    if not objects:
        raise ValueError(f"{path}: holds no samples")
    if "input" in objects[0][1]:
        return _official(path, objects, task, length)
    samples = [_own(where, row) for where, row in objects]
    other = next((s.task for s in samples if task is not None and s.task != task), None)
    if other is not None:
        raise ValueError(f"{path}: holds samples of {other}, not of task={task}")
    return samples


def _object(where: str, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: must be an object with fields, got {str(row)[:50]}")
    return row


def _value(where: str, row: dict[str, Any], key: str, kinds: tuple[type, ...]) -> Any:
    if key not in row:
        raise ValueError(f"{where}: {key} is missing")
    value = row[key]
    if not isinstance(value, kinds) or isinstance(value, bool):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{where}: {key}={str(value)[:50]!r}: must be {names}")
    return value


def _texts(where: str, row: dict[str, Any], key: str) -> list[str]:
    """Return a list of strings, none empty, at least one."""
    values = _value(where, row, key, (list,))
    if not values or not all(isinstance(v, str) and v.strip() for v in values):
        raise ValueError(f"{where}: {key}={str(values)[:50]}: must be a list of answers, not empty")
    return values


def _own(where: str, row: dict[str, Any]) -> Sample:
    unknown = sorted(set(row) - set(KINDS))
    if unknown:
        raise ValueError(f"{where}: {unknown[0]}: no field of a sample")
    known = {f.name: _value(where, row, f.name, KINDS[f.name]) for f in fields(Sample)}
    _texts(where, row, "references")
    for key, bad, expected in (
        ("task", known["task"] not in TASKS, f"one of {', '.join(TASKS)}"),
        ("length", known["length"] < 1, "at least 1"),
        ("prompt", not known["prompt"].strip(), "a text"),
        ("answer", not known["answer"].strip(), "a text"),
    ):
        if bad:
            raise ValueError(f"{where}: {key}={known[key]!r}: must be {expected}")
    return Sample(**known)


def _official(
    path: Path, objects: list[tuple[str, dict[str, Any]]], task: str | None, length: int | None
) -> list[Sample]:
    name = path.resolve().parent.name if task is None else task
    if name not in TASKS:
        raise ValueError(f"{path}: task {name!r} is unknown; put the file into a folder of the "
                         f"task's name, or give the task: {', '.join(TASKS)}")  # fmt: skip
    found, samples = find_task(name), []
    lengths = []
    for index, (where, row) in enumerate(objects):  # niah's own index is a character offset
        prompt = _value(where, row, "input", TEXT)
        if "answer_prefix" in row:
            prompt += _value(where, row, "answer_prefix", TEXT)
        if not prompt.strip():
            raise ValueError(f"{where}: input={prompt!r}: must be a text")
        references = in_order(found, _texts(where, row, "outputs"), prompt)
        lengths.append(_value(where, row, "length", NUMBER))
        depth = row.get("token_position_answer")
        answer = canonical(found, references)
        depth = depth if isinstance(depth, int) and 0 <= depth < lengths[-1] else None
        samples.append(Sample(index, name, 0, prompt, answer, references, depth, None, OFFICIAL))
    longest = max(lengths)
    if length is not None and length < longest:
        raise ValueError(f"{path}: length={length}, but it has a sample of length {longest}")
    numbers = [int(part) for part in reversed(path.resolve().parts) if part.isdecimal()]
    near = (number for number in numbers if longest <= number <= 2 * longest)  # no date, no id
    shared = length or next(near, longest)
    return [replace(sample, length=shared) for sample in samples]
