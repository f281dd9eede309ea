"""CORE's prompts on the real data: golden vectors, for whoever has the bundle.

ROVE_CORE_BUNDLE=FOLDER pytest tests/test_core_golden.py        FOLDER holds eval_data/
"""

import hashlib
import os
from pathlib import Path

import pytest

from rove.evals.core import prompts
from rove.evals.core.bundle import BY_LABEL, find_tasks, load_items, task_path
from rove.tokenizer import GPT2_EOT_ID, load_tokenizer

BUNDLE = os.environ.get("ROVE_CORE_BUNDLE")
pytestmark = pytest.mark.skipif(not BUNDLE, reason="ROVE_CORE_BUNDLE names no folder")
# first 12 hex digits of the sha256 of item 0's prompts, joined by the byte 0x1E, and its spans
GOLDEN = {
    "copa": ("1ee498221ac7", [(12, 18)] * 2),
    "piqa": ("74ee093a6d7c", [(535, 608)] * 2),
    "lambada_openai": ("7319ae622b68", [(76, 77)]),
    "winograd": ("ea178de40841", [(26, 28)] * 2),
    "agi_eval_lsat_ar": ("ff895633c4bb", [(869, 870)] * 4),
    "bigbench_operators": ("4191428f277f", [(405, 407)]),
    "bigbench_repeat_copy_logic": ("0f9711dd8b04", [(464, 476)]),
    "boolq": ("259411d69ccf", [(1693, 1694)] * 2),
}
COUNTS = {
    "copa": 100,
    "piqa": 1838,
    "lambada_openai": 5153,
    "winograd": 273,
    "agi_eval_lsat_ar": 230,
    "bigbench_operators": 210,
    "bigbench_repeat_copy_logic": 32,
    "boolq": 3270,
}


def order_of(label):
    path = task_path(Path(BUNDLE), BY_LABEL[label])
    if not path.is_file():
        pytest.skip(f"the bundle has no {label}")
    return prompts.shuffled(load_items(path, BY_LABEL[label]))


def item(label, order, index):
    encode = load_tokenizer("gpt2").encode
    task = BY_LABEL[label]
    return prompts.make_item(task, order, index, encode, GPT2_EOT_ID, None, "extrapolate")


@pytest.mark.parametrize("label", GOLDEN)
def test_item_0_is_the_golden_one(label):
    order = order_of(label)
    texts = prompts.render(BY_LABEL[label], order, 0)
    digest = hashlib.sha256(b"\x1e".join(text.encode() for text in texts)).hexdigest()
    assert (digest[:12], item(label, order, 0).spans) == GOLDEN[label]
    assert len(order) == COUNTS[label]


@pytest.mark.parametrize("label, count", [("piqa", 1517), ("copa", 74), ("winograd", 36)])
def test_spans_leave_out_or_reach_into_what_options_share(label, count):
    """Counts of items whose span is not just the text after the delimiter, without the shots."""
    order, task = order_of(label), BY_LABEL[label]
    encode = load_tokenizer("gpt2").encode
    found = 0
    for index, record in enumerate(order):
        texts = prompts.render(task, order, index, 0)
        rows = [[GPT2_EOT_ID, *encode(text).tolist()] for text in texts]
        _, spans = prompts._spans(task, rows, label)
        if task.kind == "multiple_choice":  # BOS and the query, up to the delimiter's last space
            asked = 1 + len(encode((record["query"] + task.delimiter).rstrip(" ")))
            found += spans[0][0] > asked
        else:
            ending = len(encode(" " + record["continuation"]))
            found += spans[0][1] - spans[0][0] > ending
    assert found == count


def test_four_piqa_items_have_an_empty_span():
    order = order_of("piqa")
    task, encode = BY_LABEL["piqa"], load_tokenizer("gpt2").encode
    golds = []
    for index, record in enumerate(order):
        texts = prompts.render(task, order, index, 0)
        _, spans = prompts._spans(task, [encode(text).tolist() for text in texts], "piqa")
        golds += [record["gold"]] if any(s == e for s, e in spans) else []
    assert sorted(golds) == [0, 0, 1, 1]


def test_the_task_table_is_the_bundles():
    path = Path(BUNDLE, "core_tasks.csv")
    if path.is_file():
        for line in path.read_text().splitlines()[1:]:
            label, file, kind, shots, delimiter, v1, v2 = line.split(",")[:7]
            task = BY_LABEL[label]
            d = {"SPACE": " ", 'NEWLINE+"Answer: "': "\nAnswer: "}[delimiter]
            assert file.split()[0] == task.file and d == task.delimiter
            assert (kind, int(shots)) == (task.kind, task.n_shots)
            assert (float(v1), float(v2)) == (task.baseline_v1, task.baseline_v2)
    found, missing = find_tasks(Path(BUNDLE))
    assert found and len(found) + len(missing) == len(BY_LABEL)
