"""RULER's samples: golds can be found again, lengths hold, seeds repeat, bad sources are named."""

import json
import math
import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from helpers import ROOT

from rove.evals.ruler import (
    TASKS,
    Sample,
    Sources,
    counting,
    make_samples,
    needs,
    read_samples,
    tracing,
    words,
    write_samples,
)
from rove.evals.ruler.haystacks import read_essay, spread, weave
from rove.tokenizer import load_tokenizer

SQUAD_LINE = (
    b'{"data": [{"paragraphs": [{"context": "x y", "qas": [{"question": "z", "answers": '
    b'[{"text": "y", "answer_start": START}]}]}]}]}'
)


@pytest.fixture(scope="module")
def encode():
    return load_tokenizer("gpt2").encode


def sentences(n, start=0):
    """Made-up text without the needles' words."""
    things = ["rivers", "old mills", "copper roofs", "quiet ferries", "tall reeds", "salt barns"]
    return [
        f"In part {start + i} of the valley the {things[i % 6]} outlast the {things[i % 5]}."
        for i in range(n)
    ]


def squad_content():
    articles = []
    for a in range(4):
        paragraphs = []
        for p in range(24):
            text = " ".join(sentences(4, start=100 * a + 4 * p))
            gold = f"the keeper of mill {a}{p:02d}"
            text = f"{text} It was {gold} who closed the gate. {text}"
            answers = [gold, gold, f"keeper of mill {a}{p:02d}"]
            answers = [{"text": t, "answer_start": text.index(t)} for t in answers]
            asked = {"question": f"Who closed gate {p}?", "answers": answers}
            never = {"question": "Who flew?", "answers": [], "is_impossible": True}
            qas = [never, asked | {"is_impossible": False}]
            paragraphs.append({"context": text, "qas": qas})
        articles.append({"title": f"Valley {a}", "paragraphs": paragraphs})
    return {"version": "v2.0", "data": articles}


def hotpot_content():
    items = []
    for i in range(12):
        context = [[f"Place {i} {d}", sentences(3, start=40 * i + 3 * d)] for d in range(10)]
        context[7][1].append(f" Its mayor was Rosa {chr(65 + i)}.")
        facts = [[f"Place {i} 2", 0], [f"Place {i} 7", 3]]
        question = f"Who led place {i} 7, near place {i} 2?"
        item = {"question": question, "answer": f"Rosa {chr(65 + i)}", "context": context}
        items.append(item | {"supporting_facts": facts})
    return items


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    (folder / "essay.txt").write_text("\n".join(sentences(600)))
    (folder / "squad.json").write_text(json.dumps(squad_content()))
    (folder / "hotpot.json").write_text(json.dumps(hotpot_content()))
    return Sources(folder / "essay.txt", folder / "squad.json", folder / "hotpot.json")


@pytest.fixture(scope="module")
def made(encode, sources):
    """Four samples of every task at 2048."""
    return {name: make_samples(name, 2048, 4, 42, encode, sources) for name in TASKS}


# ---------------------------------------------------------------- finding the gold again


def check_niah(sample):
    task = TASKS[sample.task]
    value = r"\d{7}" if task.values == "numbers" else r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    needle = rf"One of the special magic (?:number|uuid)s for (\S+) is: ({value})\."
    needles = re.findall(needle, sample.prompt)
    *body, asked = re.split(r"\nWhat (?:is|are all) the special magic \w+ for ", sample.prompt)
    assert len(body) == 1
    keys = re.split(r", and |, ", asked.partition(" in the text?")[0])
    assert len(keys) == task.n_queries and len(set(k for k, _ in needles)) >= task.n_keys
    found = [v for key in keys for k, v in needles if k == key]
    assert found == sample.references and sample.answer == ", ".join(found)
    assert len(found) == task.n_queries * task.n_values
    plural = len(found) > 1
    assert sample.prompt.endswith("mentioned in the text are" if plural else "the text is")
    assert asked.count("numbers" if task.values == "numbers" else "uuids") == int(plural)


def check_vt(sample):
    _, text = sample.prompt.rsplit("Memorise them.", 1)
    given = dict(re.findall(r"^VAR ([A-Z]{5}) = (?:VAR )?(\w+)$", text, re.M))
    wanted = re.search(r"have the value (\d{5})\?", text).group(1)
    names = []
    for name in given:  # in the order of the text, every name after the one it takes its value from
        value = given[name]
        while value in given:
            value = given[value]
        names += [name] if value == wanted else []
    assert names == sample.references and len(names) == 5
    assert sample.answer == " ".join(names) and sample.prompt.endswith("are: ")
    example = sample.prompt[: -len(text)]
    shown = re.findall(r"^VAR ([A-Z]{3}) = ", example, re.M)
    assert f"are: {' '.join(shown)}\n" in example and len(shown) == 5


def check_vt_hops(sample):
    given = dict(re.findall(r"^VAR ([A-Z]{5}) = (?:VAR )?(\w+)$", sample.prompt, re.M))
    assert len(given) == tracing.N_VARIABLES and sum(v.isdigit() for v in given.values()) == 2
    name, hops = re.search(r"What is the value of ([A-Z]{5})\?", sample.prompt).group(1), 0
    while given[name] in given:
        name, hops = given[name], hops + 1
    assert [given[name]] == sample.references == [sample.answer] and hops == sample.hop


def check_cwe(sample):
    listed = sample.prompt[sample.prompt.rindex("\n1. ") :].partition("\nQuestion")[0]
    entries = re.findall(r"\d+\. (\S+)", listed)
    (low, n_low), (high, n_high) = Counter(Counter(entries).values()).most_common()
    assert n_high == 10 and high > low and n_low > 10
    common = [w for w, n in Counter(entries).items() if n == high]
    assert common == sample.references, "in the order of their first appearance"
    assert sample.answer == " ".join(f"{i}. {w}" for i, w in enumerate(common, 1))


def check_fwe(sample):
    text = re.search(r"dots: (.*)\nQuestion", sample.prompt).group(1)
    counts = Counter(text.split()).most_common(5)
    assert counts[0][0] == "..." and sample.references == [word for word, _ in counts[1:4]]
    assert all(a > b for (_, a), (_, b) in zip(counts, counts[1:], strict=False))
    assert sample.answer == ", ".join(sample.references)


def check_qa(sample):
    assert sample.answer == sample.references[0] and sample.prompt.endswith("\nAnswer:")
    documents = re.findall(r"^Document (\d+):\n(.+)", sample.prompt, re.M)
    assert [int(i) for i, _ in documents] == list(range(1, len(documents) + 1))
    assert sample.prompt.count(sample.answer) == 1
    n = sample.index
    if sample.task == "qa_1":
        assert sample.references == [f"the keeper of mill 0{n:02d}", f"keeper of mill 0{n:02d}"]
    else:
        assert f"\nPlace {n} 2\n" in sample.prompt and f"\nPlace {n} 7\n" in sample.prompt


CHECKS = {
    "niah": check_niah,
    "vt": check_vt,
    "vt_hops": check_vt_hops,
    "cwe": check_cwe,
    "fwe": check_fwe,
    "qa": check_qa,
}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [256, 512, 1024, 2048, 4096])
def test_gold_is_found_again_and_no_prompt_is_too_long(task, length, encode, sources, made):
    try:
        samples = (
            made[task] if length == 2048 else make_samples(task, length, 2, 7, encode, sources)
        )
    except ValueError as error:  # some do not fit in the shortest, a data set ends before 4096
        assert length < 1024 or (length == 4096 and TASKS[task].kind == "qa"), error
        assert f"length={length}" in str(error)
        return
    for i, sample in enumerate(samples):
        assert (sample.index, sample.task, sample.length) == (i, task, length)
        CHECKS[TASKS[task].kind](sample)
        tokens = len(encode(sample.prompt))
        room = length - TASKS[task].gen - tokens
        assert 0 <= room < 200, "fits, and the haystack is as large as it may be"
        ids = encode(f"{sample.prompt.rstrip()} {sample.answer}")
        assert sample.n_answer_tokens == len(ids) - len(encode(sample.prompt.rstrip()))
        assert sample.n_answer_tokens <= TASKS[task].gen
        if sample.control is not None:
            assert len(encode(sample.control)) == tokens


@pytest.mark.parametrize("task", TASKS)
def test_control_has_other_values_and_nothing_else_is_changed(task, made):
    for sample in made[task]:
        assert sample.control is not None and sample.control != sample.prompt
        for reference in sample.references:
            pattern = rf"(?<![\w-]){re.escape(reference)}(?![\w-])"
            assert not re.search(pattern, sample.control)
        before, after = sample.prompt.splitlines(), sample.control.splitlines()
        assert len(before) == len(after) and before[-1] == after[-1], "the question is the same"
        if TASKS[task].kind in ("niah", "vt_hops") and TASKS[task].haystack != "essay":
            assert sum(a != b for a, b in zip(before, after, strict=True)) == len(sample.references)
        if task == "cwe":
            lists = [re.findall(r"\d+\. (\S+)", lines[-2]) for lines in (before, after)]
            spots = [(a, b) for a, b in zip(*lists, strict=True) if a != b]
            assert {a for a, _ in spots} == set(sample.references) and len(set(spots)) == 10


def test_control_of_a_question_whose_answer_cannot_be_replaced_is_missing(tmp_path, encode):
    content = squad_content()
    qas = content["data"][0]["paragraphs"][0]["qas"]
    qas[1]["question"] = "Who closed it, the keeper of mill 000 or the keeper of mill 001?"
    (tmp_path / "squad.json").write_text(json.dumps(content))
    sources = Sources(squad=tmp_path / "squad.json")
    samples = make_samples("qa_1", 1024, 2, 0, encode, sources)
    assert samples[0].control is None and samples[1].control is not None
    assert samples[0].log_possibilities is None, "open answers"


# ---------------------------------------------------------------- depth


@pytest.mark.parametrize(
    "task", ["niah_single_1", "niah_single_2", "niah_multikey_2", "vt", "qa_1"]
)
def test_depth_is_uniform_and_points_at_the_gold(task, encode, sources):
    n = 20
    samples = make_samples(task, 2048, n, 3, encode, sources)
    depths = sorted(s.depth for s in samples)
    first, span = depths[0], depths[-1] - depths[0]
    assert span > 0.65 * 2048
    for j, depth in enumerate(depths):
        assert depth - first == pytest.approx(j * span / (n - 1), abs=0.08 * span)
    assert [s.depth for s in samples] != sorted(s.depth for s in samples), "in permuted order"
    decode = load_tokenizer("gpt2").decode
    for sample in samples:
        rest = decode(encode(sample.prompt)[sample.depth :])
        starts = sample.references if task == "vt" else sample.references[:1]
        assert rest.lstrip().startswith(tuple(starts)), rest[:40]


def test_fixed_layout_has_one_place_for_all_and_other_contents(encode, sources):
    for task in ("niah_multikey_2", "qa_1", "niah_single_2"):
        samples = make_samples(task, 2048, 6, 3, encode, sources, layout="fixed")
        places = [s.depth / len(encode(s.prompt)) for s in samples]
        assert max(places) - min(places) < 0.08, task
        assert len({s.prompt for s in samples}) == 6 and len({s.answer for s in samples}) == 6
    beginnings = {s.prompt[:150] for s in samples}
    assert len(beginnings) == 1 and "In part 0 of the valley" in beginnings.pop()
    patterns: dict[int, set[tuple[int, ...]]] = {}
    common = make_samples("cwe", 1024, 8, 3, encode, sources, layout="fixed")
    for sample in common:
        entries = re.findall(r"\d+\. (\S+)", sample.prompt[sample.prompt.rindex("\n1. ") :])
        pattern = tuple(entries.index(word) for word in entries)
        patterns.setdefault(len(entries), set()).add(pattern)
    assert len(patterns) < 8 and all(len(same) == 1 for same in patterns.values())
    for sample in samples:
        CHECKS["niah"](sample)


def test_hops_share_a_context_between_all_variables(encode, sources):
    n = tracing.N_VARIABLES
    samples = make_samples("vt_hops", 1024, n + 3, 5, encode, sources)
    contexts = [s.prompt.partition("\nQuestion")[0] for s in samples]
    assert len(set(contexts[:n])) == 1 and len(set(contexts[n:])) == 1
    assert contexts[0] != contexts[n]
    assert Counter(s.hop for s in samples[:n]) == dict.fromkeys(range(5), tracing.N_CHAINS)
    assert len({s.prompt for s in samples}) == n + 3
    statements = re.findall(r"^VAR ([A-Z]{5}) =", contexts[0], re.M)
    asked = [re.search(r"value of ([A-Z]{5})\?", s.prompt).group(1) for s in samples[:n]]
    assert sorted(statements) == sorted(asked)
    chains = [statements.index(name) for name in asked]
    assert sorted(chains[:5]) != list(range(5)), "the chains' statements are interleaved"


def test_places_and_weaving():
    for n_places in (4, 9, 50):
        for quantile in (0.0, 0.49, 0.999):
            places = spread(Random(1), n_places, 4, quantile)
            assert len(set(places)) == 4 and places[0] == int(quantile * n_places)
            assert all(0 <= place < n_places for place in places)
    text, starts = weave(["a", "b"], ["X", "YY", "Z"], [2, 0, 1], "|")
    assert text == "YY|a|Z|b|X" and [text[i:].split("|")[0] for i in starts] == ["X", "YY", "Z"]


# ---------------------------------------------------------------- seeds


@pytest.mark.parametrize("task", TASKS)
def test_same_seed_same_samples_and_another_seed_others(task, encode, sources, made):
    again = make_samples(task, 2048, 4, 42, encode, sources)
    assert again == made[task]
    other = make_samples(task, 2048, 4, 43, encode, sources)
    assert all(a.prompt != b.prompt for a, b in zip(again, other, strict=True))
    assert len({s.prompt for s in again}) == 4


def test_a_sample_depends_on_no_other_and_on_n_by_its_depth_alone(encode, sources):
    few, many = (make_samples("niah_multikey_2", 1024, n, 42, encode, sources) for n in (2, 9))
    for a, b in zip(few, many[:2], strict=True):
        assert a.references == b.references, "contents stay, places move"
    alone = make_samples("niah_single_1", 1024, 1, 42, encode, sources)
    depth_of_all = [s.depth for s in make_samples("niah_single_1", 1024, 9, 42, encode, sources)]
    assert len(alone) == 1 and len(set(depth_of_all)) == 9


def test_samples_do_not_depend_on_the_hash_seed(encode, sources, made):
    script = (
        "import json, sys; from pathlib import Path; from rove.evals.ruler import *;"
        "from rove.tokenizer import load_tokenizer;"
        "s = Sources(*map(Path, sys.argv[1:]));"
        "e = load_tokenizer('gpt2').encode;"
        "print(json.dumps([[x.prompt, x.control] for t in ('vt_hops', 'cwe', 'qa_2', 'fwe')"
        " for x in make_samples(t, 2048, 4, 42, e, s)]))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "12345", "OMP_NUM_THREADS": "1"}
    files = map(str, (sources.essay, sources.squad, sources.hotpot))
    command = [sys.executable, "-c", script, *files]
    shown = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    tasks = ("vt_hops", "cwe", "qa_2", "fwe")
    assert json.loads(shown.stdout) == [[s.prompt, s.control] for t in tasks for s in made[t]]


# ---------------------------------------------------------------- words and numbers


def test_word_lists_are_sorted_and_have_no_spaces():
    for name in ("noun", "adjective", "verb"):
        entries = words.word_list(name)
        assert list(entries) == sorted(set(entries)) and not any(" " in w for w in entries)
    assert len(words.all_words()) == 8160 and len(words.word_list("noun")) == 6777


def test_missing_word_lists_are_named_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "wonderwords.assets", None)
    with pytest.raises(ValueError, match="wonderwords.assets .*pip install -r requirements.txt"):
        words.word_list.__wrapped__("noun")


def test_possibilities_are_those_of_the_format(made):
    number, n_words = math.log(9e6), len(counting.cwe_words())
    for task, wanted in (
        ("niah_single_1", number),
        ("niah_multivalue", 4 * number),
        ("niah_multiquery", 4 * number),
        ("niah_multikey_3", 122 * math.log(2)),
        ("vt", math.log(math.perm(26**5, 5))),
        ("vt_hops", math.log(90_000)),
        ("cwe", math.log(math.perm(n_words, 10))),
        ("fwe", math.log(math.perm(26**6, 3))),
    ):
        assert all(s.log_possibilities == pytest.approx(wanted) for s in made[task]), task


def test_counts_follow_the_lengths_and_questions_name_no_word_of_a_list():
    assert not {"list", "most", "question"} & set(counting.cwe_words())
    assert 8140 < len(counting.cwe_words()) < len(words.all_words())
    assert counting.cwe_counts(4096)[:2] == (30, 3) and counting.cwe_counts(4095)[:2] == (6, 1)
    zeta = sum(1 / k**2 for k in range(1, 200_000))
    assert counting.fwe_counts(1000, 3) == [int(1000 / zeta / k**2) for k in (1, 2, 3)]
    assert counting.fwe_vocabulary(4046) == 80


def test_twins_have_as_many_tokens_or_are_missing(encode):
    rng = Random(0)
    values = words.distinct(lambda: words.draw_number(rng), 20)
    fresh = words.twins(lambda: words.draw_number(rng), values, lambda t: len(encode(t)), set())
    assert set(fresh) == set(values) and not set(fresh.values()) & set(values)
    assert all(len(encode(f" {a}")) == len(encode(f" {b}")) for a, b in fresh.items())
    assert words.twins(lambda: "long" * 9, values, lambda t: len(encode(t)), set()) is None


# ---------------------------------------------------------------- what cannot work


@pytest.mark.parametrize("length", [-5, 1, 64, 140])
@pytest.mark.parametrize("task", TASKS)
def test_absurd_lengths_are_refused_at_once(task, length, encode, sources):
    began = time.monotonic()
    with pytest.raises(ValueError, match=f"task {task}, length={length}: .* lengths from about"):
        make_samples(task, length, 4, 1, encode, sources)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("task", TASKS)
def test_the_length_that_a_refusal_names_works(task, encode, sources):
    with pytest.raises(ValueError) as refusal:
        make_samples(task, 100, 2, 1, encode, sources)
    least = int(re.search(r"from about (\d+)", str(refusal.value)).group(1))
    assert make_samples(task, int(1.2 * least) + 20, 2, 1, encode, sources)


def test_sources_that_are_missing_or_too_small_are_named(tmp_path, encode, sources):
    assert "--essay FILE" in needs("niah_single_2", Sources())
    assert "--squad FILE" in needs("qa_1", Sources()) and needs("vt", Sources()) is None
    assert "--hotpot FILE" in needs("qa_2", Sources()) and needs("qa_2", sources) is None
    with pytest.raises(ValueError, match="--hotpot FILE"):
        make_samples("qa_2", 2048, 1, 1, encode, Sources())
    with pytest.raises(ValueError, match="unknown; there is: niah_single_1"):
        make_samples("niah_single_9", 2048, 1, 1, encode, sources)
    with pytest.raises(ValueError, match="num_samples=0"):
        make_samples("vt", 2048, 0, 1, encode, sources)
    with pytest.raises(ValueError, match="essay.txt: has .* tokens and samples need 16256"):
        make_samples("niah_single_2", 16384, 1, 1, encode, sources)
    with pytest.raises(ValueError, match=r"squad.json: all its 96 documents .* length=16384"):
        make_samples("qa_1", 16384, 1, 1, encode, sources)
    with pytest.raises(ValueError, match="num_samples=97, but it has 96 answerable"):
        make_samples("qa_1", 1024, 97, 1, encode, sources)
    assert TASKS["niah_single_3"].variant == "essay:custom" and TASKS["vt"].variant is None


@pytest.mark.parametrize(
    "task, content, message",
    [
        ("qa_1", b"[1, 2]", "not SQuAD 2.0"),
        (
            "qa_1",
            b'{"data": [{"paragraphs": [{"context": "x"}]}]}',
            "not SQuAD 2.0: KeyError 'qas'",
        ),
        ("qa_1", SQUAD_LINE.replace(b"START", b'"here"'), "not SQuAD 2.0: ValueError"),
        ("qa_1", SQUAD_LINE.replace(b"START", b"null"), "not SQuAD 2.0: TypeError"),
        ("qa_1", b'{"data": []}', "no question with an answer"),
        ("qa_1", b"{", "not JSON"),
        ("qa_1", b"\xff\xfe", "not UTF-8 at byte 0"),
        ("qa_2", b'{"data": []}', "not HotpotQA"),
        ("niah_single_2", b"caf\xe9", "not UTF-8 at byte 3"),
        ("niah_single_2", b"", "has 0 tokens"),
    ],
)
def test_sources_of_another_kind_are_named(task, content, message, tmp_path, encode):
    path = tmp_path / "source"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"source: .*{message}"):
        make_samples(task, 1024, 1, 1, encode, Sources(path, path, path))


def test_text_without_full_stops_has_places_too(tmp_path, encode):
    path = tmp_path / "plain.txt"
    path.write_text("reeds and mills " * 400)
    assert max(len(s.split()) for s in read_essay(path, encode).sentences) == 30
    CHECKS["niah"](make_samples("niah_multivalue", 512, 1, 1, encode, Sources(path))[0])


def test_bytes_are_tokens_like_any_other(sources):
    encode = load_tokenizer("byte").encode
    for task in ("niah_single_1", "niah_single_2", "fwe", "vt_hops", "qa_2"):
        for sample in make_samples(task, 3000, 2, 1, encode, sources):
            CHECKS[TASKS[task].kind](sample)
            assert len(sample.prompt.encode()) <= 3000 - TASKS[task].gen
            assert len(sample.control.encode()) == len(sample.prompt.encode())


# ---------------------------------------------------------------- files


def test_samples_survive_a_file(tmp_path, made):
    samples = [sample for name in TASKS for sample in made[name]]
    odd = replace(samples[0], prompt="caf\u2028é \ud800", control=None)
    write_samples(tmp_path / "s.jsonl", [*samples, odd])
    assert read_samples(tmp_path / "s.jsonl") == [*samples, odd]
    assert len((tmp_path / "s.jsonl").read_bytes().splitlines()) == len(samples) + 1


@pytest.mark.parametrize(
    "change, message",
    [
        ({"prompt": None}, "prompt='None': must be str"),
        ({"length": "512"}, "length='512': must be int"),
        ({"length": 0}, "length=0: must be at least 1"),
        ({"task": "vt9"}, "task='vt9': must be one of"),
        ({"references": []}, "references=.*: must be a list of answers"),
        ({"references": [1]}, "references=.*: must be a list of answers"),
        ({"answer": " "}, "answer=' ': must be a text"),
        ({"index": True}, "index='True': must be int"),
        ({"extra": 1}, "extra: no field of a sample"),
    ],
)
def test_wrong_fields_are_named_with_file_and_line(change, message, tmp_path):
    sample = Sample(0, "vt", 512, "a b", "c", ["c"], 3, 1, "1")
    write_samples(tmp_path / "s.jsonl", [sample])
    good = (tmp_path / "s.jsonl").read_text()
    (tmp_path / "s.jsonl").write_text(f"{good}\n{json.dumps(json.loads(good) | change)}\n")
    with pytest.raises(ValueError, match=f"s.jsonl:3: {message}"):
        read_samples(tmp_path / "s.jsonl")


def test_files_that_hold_no_samples_are_refused(tmp_path):
    path = tmp_path / "s.jsonl"
    for content, message in (
        (b"\n", "holds no samples"),
        (b"{]", ":1: not JSON"),
        (b"3", ":1: must be"),
        (b"{}", ":1: index is missing"),
        (b"\xff", ":1: not JSON"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"s.jsonl.*{message}"):
            read_samples(path)


def official(folder, rows):
    folder.mkdir(parents=True)
    (folder / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "validation.jsonl"


def test_official_files_are_read_with_the_task_and_length_of_their_folders(tmp_path):
    row = {
        "index": 930,
        "input": "Text. 7 and 5 and 9.",
        "outputs": ["9", "7", "5"],
        "length": 3990,
    }
    row |= {"answer_prefix": " The numbers are", "token_position_answer": 12}
    path = official(tmp_path / "4096/data/niah_multivalue", [row, row | {"index": 931}])
    samples = read_samples(path)
    assert [s.index for s in samples] == [0, 1] and {s.length for s in samples} == {4096}
    assert samples[0].prompt == "Text. 7 and 5 and 9. The numbers are"
    assert samples[0].answer == "7, 5, 9", "several values in the order of the text"
    assert samples[0].control is None and samples[0].log_possibilities is None
    assert samples[0].depth == 12 and samples[0].seed is None and samples[0].hop is None
    vt = {"index": 0, "input": "VAR A = 1 ... are: ", "outputs": ["B", "A"], "length": 500}
    path = official(tmp_path / "elsewhere", [vt])
    with pytest.raises(ValueError, match="task 'elsewhere' is unknown"):
        read_samples(path)
    read = read_samples(path, task="vt")[0]
    assert (read.answer, read.length, read.depth) == ("B A", 500, None)
    assert read_samples(path, task="vt", length=1024)[0].length == 1024
    with pytest.raises(ValueError, match="length=64, but it has a sample of length 500"):
        read_samples(path, task="vt", length=64)


def test_official_common_words_are_put_in_the_order_of_the_last_list(tmp_path):
    text = "1. oak 2. elm 3. ash\nthe words are: 1. oak\n1. fir 2. elms 3. oak 4. elm 21. fir are:"
    row = {"index": 0, "input": text, "outputs": ["elm", "fir", "oak"], "length": 90}
    sample = read_samples(official(tmp_path / "cwe", [row]))[0]
    assert sample.references == ["fir", "oak", "elm"]
    assert sample.answer == "1. fir 2. oak 3. elm"


@pytest.mark.parametrize(
    "row, message",
    [
        ({"input": "a", "length": 5}, "outputs is missing"),
        ({"input": "a", "outputs": "b", "length": 5}, "outputs='b': must be list"),
        ({"input": "a", "outputs": [""], "length": 5}, "must be a list of answers"),
        ({"input": "a", "outputs": ["b"]}, "length is missing"),
        ({"input": " ", "outputs": ["b"], "length": 5}, "input=' ': must be a text"),
        ({"input": "a", "outputs": ["b"], "length": 5, "answer_prefix": 1}, "answer_prefix="),
    ],
)
def test_wrong_official_lines_are_named(row, message, tmp_path):
    good = {"input": "a", "outputs": ["b"], "length": 5}
    with pytest.raises(ValueError, match=f"validation.jsonl:2: .*{message}"):
        read_samples(official(tmp_path / "qa_1", [good, row]))


def test_a_file_of_another_task_is_refused(tmp_path, made):
    write_samples(tmp_path / "s.jsonl", made["vt"])
    with pytest.raises(ValueError, match="holds samples of vt, not of task=cwe"):
        read_samples(tmp_path / "s.jsonl", task="cwe")
