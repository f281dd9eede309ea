"""RULER's scores: against known models, by hand, and alike for every batch size and rank."""

import json
import math
from dataclasses import replace

import pytest
import torch

from model import GPT, GPTConfig
from rove.evals.ruler import (
    TASKS,
    Sample,
    Sources,
    answer_tokens,
    categories,
    make_samples,
    score_samples,
    string_match,
    summarize,
)
from rove.evals.ruler.scoring import content_mask
from rove.tokenizer import load_tokenizer

GPT2 = load_tokenizer("gpt2")
BYTE = load_tokenizer("byte")
CPU = torch.device("cpu")
OFFLINE = [name for name, task in TASKS.items() if task.source is None]


def sample(prompt, answer, references=None, task="niah_single_1", **more):
    references = references or [answer]
    return replace(Sample(0, task, 256, prompt, answer, references, None, 1, "1"), **more)


def rate(samples, score, tokenizer=GPT2, generate=None, batch_size=3, rank=0, size=1, gather=None):
    return score_samples(
        samples,
        score,
        generate,
        tokenizer.encode,
        tokenizer.decode,
        tokenizer.eot_id,
        batch_size,
        CPU,
        rank,
        size,
        gather or (lambda rows: [rows]),
    )


def by_hash(idx, targets, mask):
    """A causal model made of arithmetic: the loss depends on all ids up to the target."""
    seen = (idx * torch.arange(1, idx.shape[1] + 1)).cumsum(1)
    nll = ((seen * 31 + targets * 17) % 101 + 1).float() / 10
    keep = torch.where(mask, nll, torch.full_like(nll, 1e6))
    return keep, (targets % 2 == 0) & mask, torch.where(mask, targets % 97, -1)


def copying(idx, targets, mask):
    """Every target known: loss 0, arg-max, rank 0; wrong where nothing was asked."""
    wrong = ~mask
    return wrong.float() * 1e6, mask, wrong.long() * 999


@pytest.fixture(scope="module")
def offline():
    made = {name: make_samples(name, 1024, 3, 5, GPT2.encode, Sources()) for name in OFFLINE}
    assert set(made) == set(OFFLINE)
    return made


# ---------------------------------------------------------------- tokens of the answer


def test_answer_begins_behind_the_prompt_with_the_space_moved_to_it():
    for prompt in ("the names are: ", "the names are:"):
        ids, start, mismatch = answer_tokens(prompt, "A B", GPT2.encode, GPT2.eot_id)
        assert ids[0] == GPT2.eot_id and mismatch == 0
        assert GPT2.decode(ids[1:start]) == "the names are:" and GPT2.decode(ids[start:]) == " A B"


def test_prompt_that_is_no_prefix_is_cut_where_ids_part_and_counted():
    def encode(text):  # pairs of characters, so that an odd prompt shares its last id
        return [sum(map(ord, text[i : i + 2])) + i for i in range(0, len(text), 2)]

    ids, start, mismatch = answer_tokens("abc", "d", encode, 0)
    assert (len(ids), start, mismatch) == (4, 2, 1)
    assert answer_tokens("abcd", "d", encode, 0)[1:] == (3, 0)
    seen = []

    def score(idx, targets, mask):
        seen.append(mask.sum().item())
        return copying(idx, targets, mask)

    decode = {tuple(encode("abc d")[:n]): "abc d"[: 2 * n] for n in range(4)}
    rows = score_samples(
        [sample("abc", "d")],
        score,
        None,
        encode,
        lambda ids: decode[tuple(ids)],
        0,
        1,
        CPU,
        0,
        1,
        lambda rows: [rows],
    )
    assert rows[0]["prefix_mismatch"] == 1 and rows[0]["n_tokens"] == 2 and seen == [2]


def content_of(prompt, answer, references, tokenizer=GPT2):
    ids, start, _ = answer_tokens(prompt, answer, tokenizer.encode, tokenizer.eot_id)
    mask = content_mask(ids, start, prompt, answer, references, tokenizer.decode)
    return [
        tokenizer.decode([i]) for i, inside in zip(ids[start:], mask, strict=True) if inside
    ], mask


def test_content_leaves_numerals_and_separators_out():
    words = ["cat", "1984", "in"]
    kept, mask = content_of("list:", "1. cat 2. 1984 3. in", words)
    assert "".join(kept).split() == words and len(mask) > len(kept)
    kept, _ = content_of("the numbers are", "1234567, 7654321", ["1234567", "7654321"])
    assert "".join(kept) == " 1234567 7654321"
    kept, mask = content_of("Answer: ", "one house", ["one house", "a house"])
    assert all(mask) and "".join(kept) == " one house"


def test_content_counts_both_halves_of_a_split_character():
    answer = "日本 ☃"
    _, mask = content_of("Antwort:", answer, ["日本"], BYTE)
    assert mask == [False] + [True] * 6 + [False] * 4
    _, mask = content_of("Größe ☃:", "☃", ["☃"])
    assert mask == [True] * len(mask) and len(mask) > 1, "tokens are parts of the character"
    kept, _ = content_of("Fünf:", "1. é 2. ☃", ["é", "☃"])
    assert not any(c.isdigit() for c in "".join(kept))


# ---------------------------------------------------------------- models with known scores


@pytest.mark.parametrize("task", OFFLINE)
def test_copying_oracle_scores_zero(task, offline):
    row = summarize(task, 1024, rate(offline[task], copying))
    assert row["nll"] == row["nll_content"] == row["nll_control"] == row["gain"] == 0
    assert row["exact"] == 1 and row["first_rank_median"] == 0 and row["n"] == 3
    assert row["n_prefix_mismatch"] == 0 and row["string_match"] is None and row["n_control"] == 3


@pytest.mark.parametrize("task", OFFLINE)
def test_format_only_guesser_scores_the_sanity_line(task, offline):
    for one in offline[task]:

        def guess(idx, targets, mask, possible=one.log_possibilities):
            share = possible / mask.sum(1, keepdim=True)
            return mask.float() * share, torch.zeros_like(mask), mask.long()

        row = summarize(task, 1024, rate([one], guess))
        assert row["nll"] == pytest.approx(row["nll_guess"], rel=1e-6) and row["exact"] == 0
        assert row["samples"][0]["nll_total"] == pytest.approx(one.log_possibilities, rel=1e-6)
        assert row["gain"] == pytest.approx(0, abs=1e-6)


def test_sanity_lines_are_where_the_specification_puts_them():
    for task, nats in (("niah_single_1", 5.0), ("niah_multikey_3", 3.4), ("vt_hops", 5.0)):
        samples = make_samples(task, 1024, 40, 1, GPT2.encode, Sources())
        line = math.fsum(s.log_possibilities / s.n_answer_tokens for s in samples) / 40
        assert line == pytest.approx(nats, abs=0.5), task
        rows = rate(samples[:2], copying)
        assert [r["n_tokens"] for r in rows] == [s.n_answer_tokens for s in samples[:2]]


def test_gain_is_what_the_values_in_the_prompt_are_worth(offline):
    def finder(idx, targets, mask):
        """Ids that stand in the prompt are known well, others are not."""
        nll = torch.zeros(idx.shape)
        for b, p in mask.nonzero().tolist():
            nll[b, p] = 1.0 if targets[b, p] in idx[b, : mask[b].nonzero()[0, 0]] else 9.0
        return nll, nll == 1, nll.long()

    row = summarize("niah_single_1", 1024, rate(offline["niah_single_1"], finder))
    assert row["nll"] == 1 and row["nll_control"] > 5 and row["exact"] == 1
    assert row["gain"] == pytest.approx(row["nll_control"] - 1)


# ---------------------------------------------------------------- batches and ranks


@pytest.mark.parametrize("batch_size", [1, 2, 8])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_batches_and_ranks_change_nothing(batch_size, size, offline):
    samples = [s for task in OFFLINE for s in offline[task][:2]]
    samples = [replace(s, index=i) for i, s in enumerate(samples)]
    want = rate(samples, by_hash)
    assert [row["index"] for row in want] == list(range(len(samples)))
    parts = []
    for rank in range(size):
        rest = [[None] * len(samples)] * size

        def gather(own, rest=rest):
            parts.append(own)
            return rest

        rate(samples, by_hash, batch_size=batch_size, rank=rank, size=size, gather=gather)
    assert list(map(len, parts)) == [len(samples[rank::size]) for rank in range(size)]
    rows = rate(samples, by_hash, size=size, gather=lambda own: parts)
    assert rows == want
    assert len({row["nll"] for row in rows}) == len(rows) and min(r["nll"] for r in rows) < 1e5


def test_model_scores_as_its_own_loss_says():
    config = GPTConfig(block_size=64, vocab_size=257, n_layer=1, n_head=2, n_embd=16)
    torch.manual_seed(0)
    model = GPT(config).eval()
    samples = [sample("a" * n + " is: ", f"x{n}", control="b" * n + " is: ") for n in (5, 30, 17)]
    rows = rate(samples, model.score, BYTE)
    for one, row in zip(samples, rows, strict=True):
        ids = torch.tensor([[256, *f"{one.prompt.rstrip()} {one.answer}".encode()]])
        nll = model.token_nll(ids[:, :-1], ids[:, 1:])[0, -row["n_tokens"] :].double()
        assert row["n_tokens"] == len(one.answer) + 1
        assert row["nll"] == pytest.approx(float(nll.mean()), abs=1e-5)
        assert row["nll_total"] == pytest.approx(float(nll.sum()), abs=1e-5)
        assert row["nll_control"] != row["nll"] and 0 <= row["first_rank"] < 257
    alone = [rate([one], model.score, BYTE)[0]["nll"] for one in samples]
    assert alone == pytest.approx([row["nll"] for row in rows], abs=1e-5)


def test_a_loss_that_is_not_finite_is_refused():
    def broken(idx, targets, mask):
        nll, top, rank = copying(idx, targets, mask)
        return nll * float("nan"), top, rank

    with pytest.raises(ValueError, match="task niah_single_1, length=256, sample 0: the loss is"):
        rate([sample("a", "b")], broken)


# ---------------------------------------------------------------- questions and generations


def test_best_reference_is_printed_for_questions_alone():
    def short_is_cheap(idx, targets, mask):
        n = mask.sum(1, keepdim=True)
        return mask.float() * n, torch.zeros_like(mask), mask.long()

    one = sample("Answer:", "in the old mill", ["in the old mill", "mill", "mill"], task="qa_1")
    row = rate([one], short_is_cheap)[0]
    assert row["nll"] == 4 and row["nll_min_reference"] == 1 and row["nll_control"] is None
    result = summarize("qa_1", 256, [row])
    assert result["nll_min_reference"] == 1 and result["nll_guess"] is None
    assert result["gain"] is None and result["n_control"] == 0
    other = rate([sample("Answer:", "old mill", ["old", "mill"])], short_is_cheap)[0]
    assert other["nll_min_reference"] is None


def test_string_match_is_rulers():
    assert string_match("all", " 12, 34 and 5", ["12", "34"]) == 100
    assert string_match("all", "12 and 43", ["12", "34"]) == 50
    assert string_match("part", "12 and 43", ["12", "34"]) == 100
    assert string_match("part", "none", ["12", "34"]) == string_match("all", "", ["1"]) == 0
    assert string_match("all", "THE Mill\x07", ["the mill"]) == 100
    assert string_match("all", "the\x00mill", ["the\nmill"]) == 100


def test_generation_gets_the_stripped_prompt_and_ends_at_end_of_text():
    calls = []

    def generate(ids, max_new_tokens):
        calls.append((ids.tolist(), max_new_tokens))
        return [*GPT2.encode(" ABC and"), GPT2.eot_id, *GPT2.encode(" DEF")]

    one = sample("the names are: ", "ABC DEF", ["ABC", "DEF"], task="vt")
    row = rate([one], copying, generate=generate)[0]
    assert row["string_match"] == 50
    assert calls == [([[GPT2.eot_id, *GPT2.encode("the names are:")]], 30)]
    assert summarize("vt", 256, [row])["string_match"] == 50


# ---------------------------------------------------------------- results


def row_of(**values):
    row = {"index": 0, "depth": None, "hop": None, "n_tokens": 2, "nll": 1.0, "nll_content": 1.0}
    row |= {"nll_total": 2.0, "nll_control": None, "nll_min_reference": None, "exact": False}
    row |= {"first_rank": 3, "string_match": None, "log_possibilities": None, "prefix_mismatch": 0}
    return row | values


def test_results_by_depth_and_hop():
    rows = [
        row_of(depth=0, nll=1.0, nll_control=3.0, exact=True, hop=0),
        row_of(depth=96, nll=2.0, hop=2),
        row_of(depth=100, nll=4.0, nll_control=5.0, hop=2, prefix_mismatch=1, first_rank=9),
        row_of(depth=999, nll=5.0, hop=0),
    ]
    result = summarize("vt_hops", 1000, rows)
    assert result["nll"] == 3 and result["gain"] == 1.5 and result["n_control"] == 2
    assert result["exact"] == 0.25 and result["n_prefix_mismatch"] == 1
    assert result["first_rank_median"] == 3 and result["nll_guess"] is None
    depth = result["by_depth"]
    assert [part["n"] for part in depth] == [2, 1, 0, 0, 0, 0, 0, 0, 0, 1]
    assert depth[0] == {"from": 0, "to": 0.1, "n": 2, "nll": 1.5, "gain": 2, "exact": 0.5}
    assert depth[2]["nll"] is None and depth[9]["nll"] == 5 and depth[9]["gain"] is None
    assert [(p["hop"], p["n"], p["nll"]) for p in result["by_hop"]] == [(0, 2, 3), (2, 2, 3)]
    assert result["samples"] == rows and json.dumps(result, allow_nan=False)
    bare = summarize("cwe", 1000, [row_of(log_possibilities=3.0)])
    assert bare["by_depth"] is None and bare["by_hop"] is None and bare["nll_guess"] == 1.5


def test_categories_are_means_over_the_tasks_that_ran():
    results = [
        {"task": task, "length": length, "nll": nll}
        for task, length, nll in (
            ("niah_single_1", 4096, 1.0),
            ("niah_multikey_3", 4096, 2.0),
            ("vt", 4096, 3.0),
            ("vt_hops", 4096, 100.0),
            ("fwe", 4096, 50.0),
            ("qa_2", 512, 7.0),
        )
    ]
    found = categories(results)
    assert list(found) == ["512", "4096"]
    assert found["4096"] == {
        "NIAH": 1.5, "VT": 3.0, "CWE": None, "FWE": 50.0, "QA": None, "vt_hops": 100.0
    }  # fmt: skip
    assert found["512"]["QA"] == 7 and found["512"]["NIAH"] is None and categories([]) == {}


def test_tasks_are_rulers_thirteen_and_one_of_ours():
    assert len(TASKS) == 14 and all(name == task.name for name, task in TASKS.items())
    gens = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32, "vt_hops": 30}
    assert {task.kind: task.gen for task in TASKS.values()} == gens
    assert {n for n, task in TASKS.items() if task.metric == "part"} == {"qa_1", "qa_2"}
    assert sum(task.category == "NIAH" for task in TASKS.values()) == 8
