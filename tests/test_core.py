"""CORE: what the bundle may hold, prompts and spans to the token, scores, ranks, the aggregate."""

import hashlib
import json
import math
import random
import stat
import threading
import zipfile
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from model import GPT, GPTConfig
from rove.evals.core import bundle, prompts, scoring
from rove.evals.core.bundle import Task, find_tasks, load_items
from rove.evals.core.tasks import BY_LABEL, LETTER_TASKS, LONG_TASKS, TASKS
from rove.tokenizer import load_tokenizer

CPU = torch.device("cpu")
V, EOT = 257, 256
GPT2_EOT = 50256
BYTES = load_tokenizer("byte").encode
QA = Task("toy_qa", "toy/qa.jsonl", "multiple_choice", 3, "\nAnswer: ", 25, 30)
WHO = Task("toy_who", "toy/who.jsonl", "schema", 1, " ", 50, 50)
FILL = Task("toy_fill", "toy/fill.jsonl", "language_modeling", 2, " ", 0, 0)


@cache
def gpt2_tokenizer():
    return load_tokenizer("gpt2")


def gpt2(text):
    return gpt2_tokenizer().encode(text).tolist()


def questions(n=23, seed=0):
    """Items of several lengths, with choices that share beginnings and one pair of equals."""
    rng = random.Random(seed)
    words = ["red", "green", "rest", "greed", "blue", "bluer", "a", "bee"]
    items = []
    for number in range(n):
        choices = rng.sample(words, 3 + number % 2)
        choices[-1] = choices[0] if number % 7 == 0 else choices[-1]
        query = f"Question: {'which ' * rng.randint(1, 6)}{number}?"
        items.append({"query": query, "choices": choices, "gold": rng.randrange(len(choices))})
    return items


def pronouns(n=11):
    return [
        {
            "context_options": [f"Ana saw Eva {i} as Ana", f"Ana saw Eva {i} as {'Eva' * i}x"],
            "continuation": f"was {'very ' * (i % 3)}tired.",
            "gold": i % 2,
        }
        for i in range(n)
    ]


def blanks(n=17):
    return [{"context": f" It is {i} o'clock, ", "continuation": "abc"[i % 3]} for i in range(n)]


SETS = [(QA, questions()), (WHO, pronouns()), (FILL, blanks())]


def bigram(scale=3.0, seed=0, size=V):
    """A model of logits that depend on the last token alone, with GPT.score's signature."""
    table = scale * torch.randn(size, size, generator=torch.Generator().manual_seed(seed))

    def score(idx, targets, mask):
        logits = table[idx]
        wanted = logits.gather(2, targets[..., None])
        nll = logits.logsumexp(2) - wanted[..., 0]
        rank = (logits > wanted).sum(2)
        top = logits.argmax(2) == targets
        return nll.masked_fill(~mask, 0.0), top & mask, rank.masked_fill(~mask, -1)

    return score, table


def setup_of(score, **changes):
    plain = {"max_length": None, "truncation": "extrapolate", "eot_id": EOT, "device": CPU}
    return scoring.Setup(**{"score": score, "encode": BYTES, **plain, **changes})


def run(task, items, score, **changes):
    return scoring.run_task(task, items, setup_of(score, **changes), sha256="00")


def make(task, items, index, max_length=None, truncation="extrapolate", encode=BYTES, eot=EOT):
    return prompts.make_item(task, items, index, encode, eot, max_length, truncation)


def item(rows, spans, gold=0):
    return prompts.Item("toy, item 7", rows, spans, gold, max(map(len, rows)), False, False)


# ---------------------------------------------------------------- an evaluator by another route


def slow_prompts(task, items, index):
    """Texts, written out from the definition with the indices all listed."""
    others = [j for j in range(len(items)) if j != index]
    shots = [items[j] for j in random.Random(1234 + index).sample(others, task.n_shots)]
    parts, last = [], items[index]
    for shot in shots:
        if task.kind == "multiple_choice":
            parts.append(shot["query"] + task.delimiter + shot["choices"][shot["gold"]])
        elif task.kind == "schema":
            option = shot["context_options"][shot["gold"]]
            parts.append(option + task.delimiter + shot["continuation"])
        else:
            parts.append(shot["context"].strip() + task.delimiter + shot["continuation"])
    if task.kind == "multiple_choice":
        ends = [last["query"] + task.delimiter + choice for choice in last["choices"]]
    elif task.kind == "schema":
        ends = [o + task.delimiter + last["continuation"] for o in last["context_options"]]
    else:
        asked = last["context"].strip() + task.delimiter
        return [
            "\n\n".join([*parts, asked]).strip(),
            "\n\n".join([*parts, asked]) + last["continuation"],
        ]
    return ["\n\n".join([*parts, end]) for end in ends]


def slow_right(task, items, index, table):
    """Whether the bigram model is right, one token at a time in float64."""
    rows = [[EOT, *text.encode()] for text in slow_prompts(task, items, index)]
    logp = table.double().log_softmax(1)
    if task.kind == "language_modeling":
        start, row = len(rows[0]), rows[1]
        return all(int(table[row[p - 1]].argmax()) == row[p] for p in range(start, len(row)))
    losses = []
    for row in rows:
        n = 0
        if task.kind == "multiple_choice":
            while all(len(r) > n and r[n] == row[n] for r in rows):
                n += 1
            scored = range(n, len(row))
        else:
            while all(len(r) > n and r[-1 - n] == row[-1 - n] for r in rows):
                n += 1
            scored = range(len(row) - n, len(row))
        if not scored:
            return items[index]["gold"] == 0
        losses.append(sum(-float(logp[row[p - 1], row[p]]) for p in scored) / len(scored))
    best = min(range(len(rows)), key=lambda option: (round(losses[option], 9), option))
    return best == items[index]["gold"]


@pytest.mark.parametrize("task, items", SETS, ids=lambda x: getattr(x, "label", ""))
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_accuracy_is_that_of_a_slow_evaluator_for_any_batch_and_ranks(task, items, scale):
    score, table = bigram(scale)
    if task is FILL:  # chance never gets an exact match
        table[ord(","), ord(" ")] += 20
        for answer in "abc":
            table[ord(" "), ord(answer)] += 9
    order = list(items)
    random.Random(1337).shuffle(order)
    want = "".join("01"[slow_right(task, order, i, table)] for i in range(len(order)))
    assert len(set(want)) == 2, "the model is sometimes right"
    whole = run(task, items, score)
    assert whole["correct"] == want and whole["n"] == len(items)
    assert whole["accuracy"] == want.count("1") / len(want)
    for batch_size in (2, 5, 100):
        assert run(task, items, score, batch_size=batch_size) == whole
    for size in (2, 3, 40):
        check_ranks(task, items, score, size, whole)


def check_ranks(task, items, score, size, whole):
    """Every rank gets the whole result from the others' shares."""
    shares = []
    for rank in range(size):
        changes = {"rank": rank, "size": size, "batch_size": 1 + rank}
        with pytest.raises(StopIteration):  # only to see the share
            run(task, items, score, gather=partial(stop_with, shares), **changes)
    for rank in (0, size - 1):
        assert run(task, items, score, rank=rank, size=size, gather=lambda _: shares) == whole
    json.dumps(shares), json.dumps(whole)


@pytest.mark.parametrize("task, items", SETS, ids=lambda x: getattr(x, "label", ""))
def test_a_model_scores_alike_in_any_batch_and_draws_no_random_numbers(task, items):
    torch.manual_seed(0)
    config = GPTConfig(block_size=64, vocab_size=V, n_layer=2, n_head=2, n_embd=32, pos_mode="rove")
    model = GPT(config).eval()
    with torch.no_grad():
        model.transformer.wte.weight.mul_(20)  # an opinion on every token
    before = random.getstate(), torch.get_rng_state()
    setup = {"max_length": 40, "truncation": "crop"}
    one, many = (run(task, items, model.score, batch_size=b, **setup) for b in (1, 7))
    assert one == many and one["cropped"] > 0
    assert before[0] == random.getstate() and torch.equal(before[1], torch.get_rng_state())


def stop_with(shares, value):
    shares.append(value)
    raise StopIteration


def test_texts_are_those_of_the_definition_and_shots_exclude_the_item():
    for task, items in SETS:
        for index in range(len(items)):
            assert prompts.render(task, items, index) == slow_prompts(task, items, index)
    for n, k, index in ((11, 10, 0), (11, 10, 10), (20_000, 10, 7), (50, 3, 49)):
        others = [j for j in range(n) if j != index]
        drawn = prompts.draw_shots(n, index, k)
        assert drawn == random.Random(1234 + index).sample(others, k) and index not in drawn


# ---------------------------------------------------------------- pitfalls of prompts


def test_the_space_before_an_answer_joins_its_first_token():
    task = Task("jeopardy", "x", "language_modeling", 0, "\nAnswer: ", 0, 0)
    items = [{"context": "GEOGRAPHY: It is on the Seine ", "continuation": "Paris"}]
    made = make(task, items, 0, encode=gpt2, eot=GPT2_EOT)
    s, e = made.spans[0]
    assert made.rows[0][s:e] == gpt2(" Paris") and len(gpt2(" Paris")) == 1
    assert made.rows[0][:s] == [GPT2_EOT, *gpt2("GEOGRAPHY: It is on the Seine\nAnswer:")]
    assert gpt2(" ")[0] not in made.rows[0]


def test_prompts_are_encoded_whole():
    task = Task("piqa", "x", "multiple_choice", 0, "", 50, 50)
    items = [{"query": "a straw", "choices": ["berry", "man"], "gold": 0}]
    made = make(task, items, 0, encode=gpt2, eot=GPT2_EOT)
    for row, text in zip(made.rows, ("a strawberry", "a strawman"), strict=True):
        assert row == [GPT2_EOT, *gpt2(text)]
    assert made.rows[0] != [GPT2_EOT, *gpt2("a straw"), *gpt2("berry")]


def test_only_contexts_of_language_modeling_are_stripped():
    piqa = [{"query": "Question: x\n", "choices": [" a", "b "], "gold": 1}] * 2
    task = Task("piqa", "x", "multiple_choice", 1, "\nAnswer: ", 50, 50)
    shot = "Question: x\n\nAnswer: b \n\n"
    asked = "Question: x\n\nAnswer: "
    assert prompts.render(task, piqa, 0) == [shot + asked + " a", shot + asked + "b "]
    which = [{"query": "Language? Answer: ", "choices": ["A", "B"], "gold": 0}]
    task = Task("bigbench_language_identification", "x", "multiple_choice", 0, " ", 9.1, 25)
    assert prompts.render(task, which, 0) == ["Language? Answer:  A", "Language? Answer:  B"]
    task = Task("coqa", "x", "language_modeling", 1, " ", 0, 0)
    coqa = [{"context": "\n Q: who? Answer: ", "continuation": "Ann "}] * 2
    start = "Q: who? Answer: Ann \n\nQ: who? Answer:"
    assert prompts.render(task, coqa, 1) == [start, start + " Ann "]


def test_end_of_text_begins_a_prompt_and_quoted_it_stays_text():
    task = Task("copa", "x", "multiple_choice", 0, " ", 50, 50)
    items = [{"query": "Print <|endoftext|>", "choices": ["now", "later"], "gold": 0}]
    for encode, eot in ((gpt2, GPT2_EOT), (BYTES, EOT)):
        made = make(task, items, 0, encode=encode, eot=eot)
        assert all(row[0] == eot and row.count(eot) == 1 for row in made.rows)


def test_shots_are_drawn_from_the_capped_items():
    items = questions(40)
    full, capped = prompts.shuffled(items), prompts.shuffled(items, 8)
    assert capped == full[:8] and sorted(map(str, full)) == sorted(map(str, items))
    first = prompts.render(QA, capped, 0)[0]
    assert first != prompts.render(QA, full, 0)[0]
    asked = {item["query"] for item in capped}
    assert all(part.split("\nAnswer:")[0] in asked for part in first.split("\n\n"))
    with pytest.raises(ValueError, match="3 items are too few for 3 shots.*at least 4"):
        prompts.render(QA, prompts.shuffled(items, 3), 0)
    with pytest.raises(ValueError, match="max_per_task=0"):
        prompts.shuffled(items, 0)


def test_spans_leave_out_a_common_beginning_and_keep_a_common_end():
    task = Task("copa", "x", "multiple_choice", 0, " ", 50, 50)
    items = [{"query": "So", "choices": ["the cat", "the dog ran"], "gold": 0}]
    made = make(task, items, 0)
    assert made.spans == [(8, 11), (8, 15)] and made.rows[0][:8] == made.rows[1][:8]
    task = Task("winograd", "x", "schema", 0, " ", 50, 50)
    items = [{"context_options": ["as one man", "as woman"], "continuation": "slept.", "gold": 1}]
    made = make(task, items, 0)
    texts = [bytes(row[s:e]) for row, (s, e) in zip(made.rows, made.spans, strict=True)]
    assert texts == [b"man slept."] * 2, "the common end reaches into the contexts"


def test_an_answer_that_cannot_be_told_apart_is_refused():
    for encode in (lambda text: [len(text)], lambda text: [len(text)] * len(text)):
        with pytest.raises(ValueError, match="toy_fill, item 0: the context's tokens"):
            make(FILL, blanks(), 0, encode=encode)


# ---------------------------------------------------------------- truncation


def test_crop_keeps_the_last_tokens_and_loses_end_of_text():
    items = questions()
    for index in range(5):
        whole, cut = make(QA, items, index), make(QA, items, index, 40, "crop")
        assert cut.cropped and not whole.cropped and cut.n_tokens == whole.n_tokens
        for option, row in enumerate(whole.rows):
            assert cut.rows[option] == row[-40:] and EOT not in cut.rows[option]
            s, e = whole.spans[option]
            s2, e2 = cut.spans[option]
            assert row[s:e] == cut.rows[option][s2:e2] and e2 == 40
        assert not cut.span_capped
    longest = max(map(len, whole.rows))
    assert make(QA, items, 4, longest, "crop") == whole, "an exact fit is not cropped"


def test_dropped_shots_keep_end_of_text_and_whole_examples():
    items = questions()
    index = 4
    full = prompts.render(QA, items, index)
    fewer = prompts.render(QA, items, index, 2)
    assert all(text.endswith(end) for text, end in zip(full, fewer, strict=True))
    limit = 1 + max(len(text) for text in fewer)
    made = make(QA, items, index, limit, "drop_shots")
    assert made.rows == [[EOT, *text.encode()] for text in fewer] and made.cropped
    assert made.n_tokens > limit == max(map(len, made.rows)), "all options lose the same shots"
    short = make(QA, items, index, limit - 1, "drop_shots")
    assert short.rows == [[EOT, *t.encode()] for t in prompts.render(QA, items, index, 1)]
    none = make(QA, items, index, 10, "drop_shots")
    assert none.rows == [row[-10:] for row in none.rows] and EOT not in none.rows[0]
    assert none.rows[0] == [*full[0].encode()][-10:]
    assert make(QA, items, index, 10_000, "drop_shots") == make(QA, items, index)


def test_a_span_longer_than_the_context_scores_what_is_left_and_is_counted():
    task = Task("squad", "x", "language_modeling", 0, " ", 0, 0)
    items = [
        {"context": "say it", "continuation": "abcdefghij"},
        {"context": "b", "continuation": "c"},
    ]
    made = make(task, items, 0, 8, "crop")
    assert made.spans == [(1, 8)] and bytes(made.rows[0]) == b"cdefghij" and made.span_capped
    assert not make(task, items, 0, 12, "crop").span_capped, "span 11, and one token before it"
    result = run(task, items, bigram()[0], max_length=8, truncation="crop")
    assert (result["cropped"], result["span_capped"], result["max_tokens"]) == (1, 1, 18)


def test_extrapolation_has_no_maximum():
    assert make(QA, questions(), 0, 5, "extrapolate") == make(QA, questions(), 0)


@pytest.mark.parametrize("truncation", ["crop", "drop_shots"])
@pytest.mark.parametrize("max_length", [None, 1, 0, -5])
def test_truncation_without_a_sensible_maximum_is_refused(truncation, max_length):
    with pytest.raises(ValueError, match=f"max_length={max_length}"):
        make(QA, questions(), 0, max_length, truncation)
    with pytest.raises(ValueError, match="truncation='wrap'"):
        setup_of(None, truncation="wrap")
    with pytest.raises(ValueError, match="batch_size=0"):
        setup_of(None, batch_size=0)


# ---------------------------------------------------------------- pitfalls of scores


def fixed(losses):
    """A scorer whose loss is that of the target's id, whatever stands before."""

    def score(idx, targets, mask):
        nll = torch.tensor(losses)[targets].masked_fill(~mask, 0.0)
        return nll, torch.ones_like(mask), torch.zeros_like(targets)

    return score


def answers(items, score, batch_size=1):
    return scoring.score_items(items, score, 0, batch_size, CPU)


def test_the_logits_before_a_token_score_it():
    seen = {}

    def spy(idx, targets, mask):
        seen.update(idx=idx, targets=targets, mask=mask)
        return mask.float(), mask, targets

    answers([item([[9, 1, 2, 3], [9, 1, 4]], [(2, 4), (2, 3)])], spy)
    assert seen["idx"].tolist() == [[9, 1, 2], [9, 1, 4]]
    assert seen["targets"].tolist() == [[1, 2, 3], [1, 4, 0]], "padded on the right"
    assert seen["mask"].tolist() == [[False, True, True], [False, True, False]]
    assert seen["idx"].dtype == torch.int64 and seen["mask"].dtype == torch.bool


def test_an_option_scores_its_mean_not_its_sum():
    long_is_better = item([[0, 1], [0, 2, 2, 2]], [(1, 2), (1, 4)])
    assert answers([long_is_better], fixed([0.0, 2.0, 1.0])) == [1]


def test_ties_go_to_the_first_and_equal_options_tie_though_kernels_round():
    same = item([[0, 1], [0, 2], [0, 2]], [(1, 2)] * 3)
    assert answers([same], fixed([0.0, 1.0, 1.0])) == [0]
    assert answers([same], fixed([0.0, 1.5, 1.0])) == [1]

    def rounding(idx, targets, mask):  # the last row comes out a bit lower
        nll, top, rank = fixed([0.0, 1.5, 1.0])(idx, targets, mask)
        return nll - 1e-6 * torch.arange(len(idx))[:, None], top, rank

    assert answers([same], rounding) == [1]


def test_an_empty_span_predicts_option_0_and_no_nan_comes_of_it():
    task = Task("piqa", "x", "multiple_choice", 0, " ", 50, 50)
    items = [
        {"query": "Fix it", "choices": ["with glue and tape", "with glue"], "gold": g}
        for g in (0, 1)
    ]
    made = make(task, items, 0)
    assert made.spans[1][0] == made.spans[1][1] == len(made.rows[1])
    result = run(task, items, bigram()[0])
    assert result["accuracy"] == 0.5 and math.isfinite(result["centered_v1"])
    equal = [{"context_options": ["as I", "as I"], "continuation": "slept", "gold": 1}] * 2
    three = item([[0, 1], [0], [0, 2]], [(1, 2), (1, 1), (1, 2)])
    assert answers([three], fixed([0.0, 1.0, 0.5])) == [0], "not 2, which has the least loss"
    assert run(WHO, equal, bigram()[0])["correct"] == "00", "equal contexts: all is scored, a tie"


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("gold", [0, None])
def test_a_loss_that_is_not_finite_is_an_error_that_names_the_item(value, gold):
    broken = item([[0, 1]], [(1, 2)], gold)
    with pytest.raises(ValueError, match="toy, item 7: loss of option 0 not finite"):
        answers([broken], fixed([0.0, value]))


def test_a_continuation_is_right_only_if_every_token_is_the_likeliest():
    def score(idx, targets, mask):
        return mask.float(), targets != 5, targets

    cases = [[1, 2, 3], [5, 2, 3], [1, 2, 5], [1, 5, 3]]
    made = [item([[0, *ids]], [(2, 4)], gold=None) for ids in cases]
    assert answers(made, score, 3) == [1, 1, 0, 0], "5 before the span is not scored"


def test_items_of_similar_length_share_a_batch_and_an_item_is_never_split():
    shapes = []

    def score(idx, targets, mask):
        shapes.append(tuple(idx.shape))
        return mask.float(), mask, targets

    made = [item([[0] * n, [0] * n], [(1, n)] * 2) for n in (5, 3, 9, 4, 8)]
    done = []
    scoring.score_items(made, score, 0, 2, CPU, done.append)
    assert shapes == [(4, 8), (4, 4), (2, 2)] and sum(done) == 5


def test_centering_takes_percent_and_punishes_below_the_majority():
    assert scoring.centered(0.25, 25) == 0 and scoring.centered(1.0, 62) == 1
    assert scoring.centered(0.552294, 62) == pytest.approx(-0.178175, abs=2e-6)
    assert scoring.centered(0.4, 0) == 0.4


def test_letters_that_a_model_prefers_are_counted():
    task = BY_LABEL["commonsense_qa"]
    options = ["A", "B", "C"]
    items = [{"query": f"{i}?", "choices": options, "gold": i % 3} for i in range(12)]
    likes_c = [1.0] * V
    likes_c[ord("C")] = 0.5
    result = run(task, items, fixed(likes_c))
    assert result["predictions"] == [0, 0, 12] and result["accuracy"] == pytest.approx(1 / 3)
    assert result["centered_v1"] > 0 > result["centered_v2"] and result["sha256"] == "00"
    assert run(QA, questions(), fixed(likes_c))["predictions"] is None


# The 22 published accuracies of GPT-2 124M on the full data, in table order.
GPT2_124M = """0.308504 0.001889 0.282663 0.412458 0.221843 0.600000 0.224406 0.622960 0.278000
0.322919 0.307907 0.578755 0.486188 0.155000 0.226087 0.419697 0.085714 0.031250 0.058278 0.133659
0.552294 0.256600"""


def published():
    accuracies = map(float, GPT2_124M.split())
    return {
        task.label: {
            "centered_v1": scoring.centered(accuracy, task.baseline_v1),
            "centered_v2": scoring.centered(accuracy, task.baseline_v2),
        }
        for task, accuracy in zip(TASKS, accuracies, strict=True)
    }


def test_published_accuracies_make_the_published_core():
    result = scoring.aggregate(published(), [])
    assert result["core_v1"] == pytest.approx(0.113891, abs=5e-7) and result["core"] is None
    assert result["core_v2"] == pytest.approx(0.088095, abs=5e-7)
    assert result["mean_of_present_v1"] == result["core_v1"] != result["mean_of_short_v1"]


def test_fewer_than_22_tasks_are_never_called_core():
    tasks = published()
    for label in ("squad", "boolq"):
        del tasks[label]
    result = scoring.aggregate(tasks, ["squad", "boolq"])
    assert result["core"] == "n/a (missing: squad, boolq)"
    assert result["core_v1"] is None and result["core_v2"] is None
    present = sum(row["centered_v1"] for row in tasks.values()) / 20
    assert result["mean_of_present_v1"] == pytest.approx(present)
    short = [row["centered_v2"] for label, row in tasks.items() if label not in LONG_TASKS]
    assert len(short) == 16 and result["mean_of_short_v2"] == pytest.approx(sum(short) / 16)
    del tasks["copa"]
    result = scoring.aggregate(tasks, ["boolq", "squad"])
    assert result["core"] == "n/a (missing: squad, boolq; not run: copa)"
    assert result["mean_of_short_v1"] is None
    assert scoring.aggregate({}, [])["mean_of_present_v1"] is None


# ---------------------------------------------------------------- the bundle


def write_lines(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


@pytest.fixture
def folder(tmp_path):
    """A bundle with two of the tasks."""
    write_lines(tmp_path / "eval_data/commonsense_reasoning/copa.jsonl", questions(4))
    write_lines(tmp_path / "eval_data/language_understanding/winograd_wsc.jsonl", pronouns(4))
    return tmp_path


def test_the_table_has_the_22_tasks():
    assert len(TASKS) == len(BY_LABEL) == 22 and len({task.file for task in TASKS}) == 21
    kinds = [task.kind for task in TASKS]
    counts = [kinds.count(k) for k in ("multiple_choice", "schema", "language_modeling")]
    assert counts == [11, 2, 9]
    differ = [task.label for task in TASKS if task.baseline_v1 != task.baseline_v2]
    assert set(differ) < LETTER_TASKS and len(differ) == 3 and set(BY_LABEL) > LONG_TASKS


def test_tasks_that_are_there_come_in_table_order(folder):
    found, missing = find_tasks(folder)
    assert [task.label for task in found] == ["copa", "winograd"]
    assert len(missing) == 20 and missing[0] == "hellaswag_zeroshot"
    named, _ = find_tasks(folder, "winograd, copa")
    assert named == found and find_tasks(folder, "winograd")[0] == found[1:]


@pytest.mark.parametrize(
    "names, words",
    [
        ("copa,winogrand", ["'winogrand'", "'winogrande'"]),
        ("", ["''"]),
        ("boolq", ["boolq has no data", "eval_data/reading_comprehension/boolq.jsonl"]),
    ],
)
def test_tasks_that_cannot_be_had_are_refused(folder, names, words):
    with pytest.raises(ValueError) as error:
        find_tasks(folder, names)
    assert all(word in str(error.value) for word in words), error.value


def test_a_folder_without_data_says_what_a_bundle_holds(tmp_path):
    for path in (tmp_path, tmp_path / "no/such"):
        with pytest.raises(ValueError, match="eval_data/CATEGORY/FILE.jsonl"):
            find_tasks(path)


def entry(label="winograd", **changes):
    task = BY_LABEL["piqa" if label == "piqa" else "winograd"]
    plain = {"label": label, "dataset_uri": task.file, "num_fewshot": [task.n_shots]}
    return {**plain, "icl_task_type": task.kind, "has_categories": False, **changes}


def test_a_core_yaml_that_agrees_is_accepted(folder):
    piqa = entry("piqa", continuation_delimiter="\nAnswer: ")
    (folder / "core.yaml").write_text(json.dumps({"icl_tasks": [entry(), piqa]}))  # JSON is YAML
    assert len(find_tasks(folder)[0]) == 2


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"dataset_uri": "a.jsonl"}, ["a.jsonl", "language_understanding/winograd_wsc.jsonl"]),
        ({"num_fewshot": [5]}, ["num_fewshot", "[5]", "[0]"]),
        ({"num_fewshot": 0}, ["num_fewshot", "[0]"]),
        ({"icl_task_type": "multiple_choice"}, ["icl_task_type", "'schema'"]),
        ({"continuation_delimiter": "\n"}, ["continuation_delimiter", r"'\n'", "' '"]),
        ({"label": "winogrant"}, ["label", "'winogrant'", "'winogrande'"]),
    ],
)
def test_a_core_yaml_that_differs_is_refused(folder, changes, words):
    (folder / "core.yaml").write_text(json.dumps({"icl_tasks": [entry(**changes)]}))
    with pytest.raises(ValueError) as error:
        find_tasks(folder, "copa")
    assert all(word in str(error.value) for word in ("core.yaml: task", "wino", *words)), (
        error.value
    )


@pytest.mark.parametrize(
    "text", ["icl_tasks: [", "[]", "a: 1", "!!python/object/apply:os.getcwd []"]
)
def test_a_core_yaml_of_another_kind_is_refused(folder, text):
    (folder / "core.yaml").write_text(text)
    with pytest.raises(ValueError, match="core.yaml: "):
        find_tasks(folder)


@pytest.mark.parametrize(
    "row, fine",
    [
        ("commonsense_qa,20", True),
        ("commonsense_qa,40.3", True),
        ("mmlu,1", True),
        ("commonsense_qa,25", False),
        ("copa,half", False),
        ("copa", False),
    ],
)
def test_baselines_beside_the_data_must_be_one_of_the_two(folder, row, fine):
    (folder / "eval_meta_data.csv").write_text(f"Eval Task,Random baseline\n{row}\n")
    if fine:
        assert find_tasks(folder)[0]
    else:
        with pytest.raises(ValueError, match=f"eval_meta_data.csv: task {row.split(',')[0]}"):
            find_tasks(folder)
    (folder / "eval_meta_data.csv").write_text("Task,Baseline\ncopa,50\n")
    with pytest.raises(ValueError, match="no columns"):
        find_tasks(folder)


def test_lines_end_at_newlines_only_and_strings_stay_as_they_are(tmp_path):
    query = " a\u2028b\x85c\u2029 d\r "
    text = json.dumps({"query": query, "choices": [" x", "\ty\n"], "gold": 1}, ensure_ascii=False)
    path = tmp_path / "copa.jsonl"
    path.write_bytes(f"{text}\r\n\n  {text}".encode())
    items = load_items(path, BY_LABEL["copa"])
    assert len(items) == 2 and items[0] == items[1]
    assert items[0]["query"] == query and items[0]["choices"] == [" x", "\ty\n"]


GOOD = {"query": "q", "choices": ["a", "b"], "gold": 0}


@pytest.mark.parametrize(
    "label, line, word",
    [
        ("copa", {"choices": ["a", "b"], "gold": 0}, "query is missing"),
        ("copa", {"query": "q", "gold": 0}, "choices is missing"),
        ("copa", {"query": "q", "choices": ["a", "b"]}, "gold is missing"),
        ("copa", {**GOOD, "query": 3}, "query: expected text, got 3"),
        ("copa", {**GOOD, "choices": "ab"}, "choices: expected a list"),
        ("copa", {**GOOD, "choices": ["a", 1]}, "choices: expected a list"),
        ("copa", {**GOOD, "choices": ["a"]}, "at least 2, got 1"),
        ("copa", {**GOOD, "gold": 2}, "from 0 to 1, got 2"),
        ("copa", {**GOOD, "gold": -1}, "from 0 to 1, got -1"),
        ("copa", {**GOOD, "gold": True}, "got True"),
        ("copa", {**GOOD, "gold": "0"}, "got '0'"),
        ("winograd", {"continuation": "x", "gold": 0}, "context_options is missing"),
        ("winograd", {"context_options": ["a", "b"], "gold": 0}, "continuation is missing"),
        ("squad", {"context": "x"}, "continuation is missing"),
        ("squad", {"context": None, "continuation": "x"}, "context: expected text, got None"),
        ("copa", [1], "expected an object"),
        ("copa", b'{"query": ', "not JSON"),
        ("copa", b'{"query": "\xff"}', "not UTF-8 at byte 11"),
        ("copa", b"[" * 100_000, "line 2"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(tmp_path, label, line, word):
    path = tmp_path / "data.jsonl"
    good = {**GOOD, "context": "c", "continuation": "d", "context_options": ["e", "f"]}
    second = line if isinstance(line, bytes) else json.dumps(line).encode()
    path.write_bytes(json.dumps(good).encode() + b"\n" + second + b"\n")
    with pytest.raises(ValueError) as error:
        load_items(path, BY_LABEL[label])
    assert f"{path}, line 2: " in str(error.value) and word in str(error.value)


def test_a_file_without_items_is_refused(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(b"\n \n")
    with pytest.raises(ValueError, match="data.jsonl: has no items"):
        load_items(tmp_path / "data.jsonl", BY_LABEL["copa"])


# ---------------------------------------------------------------- download


def zipped(path, members, link=None):
    """A zip of these members and its hash."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in members.items():
            file.writestr(name, text)
        if link:
            member = zipfile.ZipInfo(link)
            member.external_attr = (stat.S_IFLNK | 0o777) << 16
            file.writestr(member, "/etc/passwd")
    return path.as_uri(), hashlib.sha256(path.read_bytes()).hexdigest()


COPA = "eval_data/commonsense_reasoning/copa.jsonl"


@pytest.mark.parametrize("top", ["eval_bundle/", ""])
def test_a_zip_is_unpacked_once(tmp_path, top):
    url, digest = zipped(
        tmp_path / "b.zip", {top + COPA: json.dumps(GOOD), top + "core.yaml": "icl_tasks: []"}
    )
    root = bundle.download(url, digest.upper(), tmp_path / "deep/core")
    assert root == tmp_path / "deep/core" / top and (root / COPA).is_file()
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["core"], "nothing is left behind"
    (tmp_path / "b.zip").unlink()
    assert bundle.download(url, digest, tmp_path / "deep/core") == root, "no request"
    with pytest.raises(ValueError, match="holds the bundle with sha256.*name another folder"):
        bundle.download(url, "0" * 64, tmp_path / "deep/core")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    with pytest.raises(ValueError, match="holds something else"):
        bundle.download(url, digest, tmp_path / "full")
    assert [task.label for task in find_tasks(root, "copa")[0]] == ["copa"]


@pytest.mark.parametrize(
    "name", ["../out.txt", "a/../../out.txt", "/abs.txt", "..\\out.txt", "C:\\x.txt", "C:x.txt"]
)
def test_a_zip_that_reaches_outside_is_refused(tmp_path, name):
    url, digest = zipped(tmp_path / "b.zip", {COPA: "{}", name: "x"})
    with pytest.raises(ValueError, match="outside of the folder"):
        bundle.download(url, digest, tmp_path / "in/core")
    assert not list((tmp_path / "in").iterdir())
    assert {p.name for p in tmp_path.iterdir()} == {"b.zip", "in"}


def test_a_zip_with_a_link_is_refused(tmp_path):
    url, digest = zipped(tmp_path / "b.zip", {COPA: "{}"}, link="eval_data/passwd")
    with pytest.raises(ValueError, match="'eval_data/passwd' is a link"):
        bundle.download(url, digest, tmp_path / "core")


def test_the_hash_is_checked_before_anything_is_unpacked(tmp_path, monkeypatch):
    url, digest = zipped(tmp_path / "b.zip", {COPA: "{}"})
    opened = []
    monkeypatch.setattr(bundle.zipfile, "ZipFile", opened.append)
    with pytest.raises(ValueError, match=f"expected sha256 {'0' * 64}, found {digest}"):
        bundle.download(url, "0" * 64, tmp_path / "core")
    assert not opened and not (tmp_path / "core").exists()


def test_what_is_no_bundle_is_refused(tmp_path):
    (tmp_path / "page.zip").write_text("<html>")
    digest = hashlib.sha256(b"<html>").hexdigest()
    with pytest.raises(ValueError, match="page.zip: not a zip"):
        bundle.download((tmp_path / "page.zip").as_uri(), digest, tmp_path / "core")
    url, digest = zipped(tmp_path / "b.zip", {"readme": "x"})
    with pytest.raises(ValueError, match="b.zip: has no eval_data/"):
        bundle.download(url, digest, tmp_path / "core")
    for url, word in (
        ((tmp_path / "none.zip").as_uri(), "no such file"),
        ("ftp://host/b.zip", "must begin with https://"),
    ):
        with pytest.raises(ValueError, match=word):
            bundle.download(url, digest, tmp_path / "core")
    with pytest.raises(ValueError, match="sha256='abc': must be 64 hex digits"):
        bundle.download(url, "abc", tmp_path / "core")
    assert not (tmp_path / "core").exists()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


def test_http_is_one_request_and_its_failures_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    (tmp_path / "www").mkdir()
    _, digest = zipped(tmp_path / "www/b.zip", {"eval_bundle/" + COPA: json.dumps(GOOD)})
    handler = partial(Quiet, directory=str(tmp_path / "www"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        root = bundle.download(f"{url}/b.zip", digest, tmp_path / "core")
        assert root == tmp_path / "core/eval_bundle" and (root / COPA).is_file()
        with pytest.raises(ValueError, match="HTTP status 404"):
            bundle.download(f"{url}/c.zip", digest, tmp_path / "other")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert bundle.download(f"{url}/b.zip", digest, tmp_path / "core") == root
    with pytest.raises(ValueError, match=r"no answer.*\(ConnectionError\)") as error:
        bundle.download(f"{url}/b.zip", digest, tmp_path / "other")
    assert "\n" not in str(error.value) and not (tmp_path / "other").exists()
