"""The 22 tasks of CORE, and whether a bundle's own tables agree with them."""

import csv
import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

Kind = Literal["multiple_choice", "schema", "language_modeling"]
MC: Kind = "multiple_choice"
SC: Kind = "schema"
LM: Kind = "language_modeling"
SPACE, ANSWER = " ", "\nAnswer: "

LANGUAGE, WORLD = "language_understanding", "world_knowledge"
SENSE, SYMBOLS = "commonsense_reasoning", "symbolic_problem_solving"
READING = "reading_comprehension"


@dataclass(frozen=True)
class Task:
    """One task: its data and how it is asked."""

    label: str
    file: str
    """jsonl file, relative to eval_data/"""
    kind: Kind
    n_shots: int
    delimiter: str
    """between a question and its answer"""
    baseline_v1: float
    """accuracy of chance in percent, DCLM's first table (nanochat's bundle has it)"""
    baseline_v2: float
    """the same, DCLM's corrected table"""


def _task(
    label: str, folder: str, kind: Kind, n_shots: int, delimiter: str, v1: float, v2: float,
    stem: str | None = None,
) -> Task:  # fmt: skip
    return Task(label, f"{folder}/{stem or label}.jsonl", kind, n_shots, delimiter, v1, v2)


TASKS = (
    _task("hellaswag_zeroshot", LANGUAGE, MC, 0, SPACE, 25, 25, "hellaswag"),
    _task("jeopardy", WORLD, LM, 10, ANSWER, 0, 0, "jeopardy_all"),
    _task("bigbench_qa_wikidata", WORLD, LM, 10, SPACE, 0, 0),
    _task("arc_easy", WORLD, MC, 10, ANSWER, 25, 25),
    _task("arc_challenge", WORLD, MC, 10, ANSWER, 25, 25),
    _task("copa", SENSE, MC, 0, SPACE, 50, 50),
    _task("commonsense_qa", SENSE, MC, 10, SPACE, 20, 40.3),
    _task("piqa", SENSE, MC, 10, ANSWER, 50, 50),
    _task("openbook_qa", SENSE, MC, 0, SPACE, 25, 25),
    _task("lambada_openai", LANGUAGE, LM, 0, SPACE, 0, 0),
    _task("hellaswag", LANGUAGE, MC, 10, SPACE, 25, 25),
    _task("winograd", LANGUAGE, SC, 0, SPACE, 50, 50, "winograd_wsc"),
    _task("winogrande", LANGUAGE, SC, 0, SPACE, 50, 50),
    _task("bigbench_dyck_languages", SYMBOLS, LM, 10, SPACE, 0, 0),
    _task("agi_eval_lsat_ar", SYMBOLS, MC, 3, SPACE, 20, 25),
    _task("bigbench_cs_algorithms", SYMBOLS, LM, 10, SPACE, 0, 0),
    _task("bigbench_operators", SYMBOLS, LM, 10, SPACE, 0, 0),
    _task("bigbench_repeat_copy_logic", SYMBOLS, LM, 10, SPACE, 0, 0),
    _task("squad", READING, LM, 10, SPACE, 0, 0),
    _task("coqa", READING, LM, 0, SPACE, 0, 0),
    _task("boolq", READING, MC, 10, ANSWER, 62, 62),
    _task("bigbench_language_identification", LANGUAGE, MC, 10, SPACE, 9.1, 25),
)
BY_LABEL = {task.label: task for task in TASKS}
# The tasks with prompts of more than 1,024 GPT-2 tokens; the other 16 never measure extrapolation.
LONG_TASKS = frozenset(
    ("hellaswag", "agi_eval_lsat_ar", "squad", "coqa", "boolq", "bigbench_language_identification")
)
# Where the answer is a letter or yes/no: a model may simply prefer one, which v1 rewards.
LETTER_TASKS = frozenset(
    ("commonsense_qa", "agi_eval_lsat_ar", "bigbench_language_identification", "boolq")
)


def closest_label(label: str) -> str:
    """Return the label of the table that looks most like this one."""
    return difflib.get_close_matches(label, BY_LABEL, n=1, cutoff=0.0)[0]


def check_yaml(path: Path) -> None:
    """Raise ValueError where a bundle's core.yaml asks a task in another way than the table."""
    try:
        content = yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not plain YAML: {error}") from None
    entries = content.get("icl_tasks") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ValueError(f"{path}: has no list icl_tasks; take core.yaml as the bundle ships it")
    for entry in entries:
        label = entry.get("label") if isinstance(entry, dict) else entry
        task = BY_LABEL.get(str(label)) if isinstance(entry, dict) else None
        if task is None and isinstance(entry, dict):
            near = closest_label(str(label))
            raise ValueError(f"{path}: task {label!r}: label is not one of CORE's; is it {near!r}?")
        if task is None:
            raise ValueError(f"{path}: icl_tasks: {label!r} has no keys such as label, dataset_uri")
        expected: dict[str, Any] = {
            "dataset_uri": task.file,
            "num_fewshot": [task.n_shots],
            "icl_task_type": task.kind,
            "continuation_delimiter": task.delimiter,
        }
        found = {"continuation_delimiter": SPACE, **entry}
        for key, value in expected.items():
            if found.get(key) != value:
                raise ValueError(
                    f"{path}: task {label}: {key} is {found.get(key)!r}, CORE has {value!r}; "
                    "take core.yaml as the bundle ships it, or remove it"
                )


def check_baselines(path: Path) -> None:
    """Raise ValueError where eval_meta_data.csv has a random baseline that is neither v1 nor v2."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a CSV file in UTF-8: {error}") from None
    names = [str(name) for name in (rows[0] if rows else {})]
    column = next((name for name in names if name.startswith("Random baseline")), None)
    if column is None or "Eval Task" not in names:
        raise ValueError(f"{path}: has no columns 'Eval Task' and 'Random baseline'")
    for row in rows:
        task = BY_LABEL.get((row["Eval Task"] or "").strip())
        if task is None:  # DCLM's table lists more tasks than CORE's
            continue
        try:
            found = float(row[column])
        except (TypeError, ValueError):
            found = float("nan")
        if found not in (task.baseline_v1, task.baseline_v2):
            raise ValueError(
                f"{path}: task {task.label}: {column} is {row[column]!r}, CORE has "
                f"{task.baseline_v1:g} (v1) or {task.baseline_v2:g} (v2), in percent"
            )
