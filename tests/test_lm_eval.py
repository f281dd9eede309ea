"""eval.py lm_eval: answers against sums by hand, and against the harness's hf backend."""

import contextlib
import json
import math
import socket
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import ROOT, run_script, shard_bytes, tiny_flags

import eval as evaluation
import train
from model import GPT
from rove import distributed as dist
from rove.evals.lm_eval import run as running
from rove.shards import MANIFEST
from rove.tokenizer import load_tokenizer

TASKS = "tests/lm_eval_tasks"
NAMES = ["rove_colours", "rove_pages", "rove_endings"]
OWN = ["--include_path", TASKS, "--device", "cpu"]
CONTEXT = 64
CLOSE = 1e-5


@pytest.mark.parametrize("content", [None, "import not_here", "raise RuntimeError('x')", "f(:"])
def test_without_the_package_one_line_says_what_to_install(monkeypatch, tmp_path, content):
    """It is not there, or does not load."""
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    if content is None:
        monkeypatch.setitem(sys.modules, "lm_eval", None)
    else:
        (tmp_path / "lm_eval.py").write_text(content)
        monkeypatch.syspath_prepend(tmp_path)
    fields = {"limit": None, "num_fewshot": None, "max_length": None, "seed": 0}
    settings = SimpleNamespace(tasks="piqa", **fields)
    with pytest.raises(ValueError, match="does not load .*pip install -r requirements-eval.txt"):
        running.run(SimpleNamespace(settings=settings, world=SimpleNamespace(is_main=True)))


def test_values_become_json_and_what_is_no_number_null():
    row = {"a": float("nan"), "b": [math.inf, "N/A", 1], "c": np.float64(0.5), "d": np.int64(3)}
    assert running.plain(row) == {"a": None, "b": [None, None, 1], "c": 0.5, "d": 3}
    assert running.plain({"e": np.float32("nan"), "f": (True, None, "x")}) == {
        "e": None,
        "f": [True, None, "x"],
    }


# ---------------------------------------------------------------- models and sessions


@pytest.fixture(scope="module")
def facts():
    names = [ROOT / TASKS / f"{name}.jsonl" for name in ("colours", "shots")]
    rows = [json.loads(line) for name in names for line in name.read_text().splitlines()]
    picked = np.random.default_rng(0).choice(rows, 4000)
    return "".join(f"The {row['thing']} is {row['choices'][row['gold']]}\n" for row in picked)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, facts):
    """A byte model that has learned which thing has which colour, and a gpt2 one that has not."""
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("lm_eval")
    for name, mode, steps in (("byte", "rove", 120), ("gpt2", "rope", 1)):
        tokenizer = load_tokenizer(name)
        data = folder / f"data-{name}"
        data.mkdir()
        ids = np.append(tokenizer.encode(facts), tokenizer.eot_id)
        shards = []
        for split, part in (("train", ids), ("val", ids[:1000])):
            file = f"facts_{split}_000000.bin"
            (data / file).write_bytes(shard_bytes(part))
            shards.append({"file": file, "split": split, "tokens": int(part.size)})
        kept = {"name": name, "vocab_size": tokenizer.vocab_size, "sha256": tokenizer.sha256}
        manifest = {"tokenizer": kept, "eot_id": tokenizer.eot_id, "shards": shards}
        (data / MANIFEST).write_text(json.dumps(manifest))
        shape = {"model__pos_mode": mode, "model__block_size": CONTEXT, "optim__lr": 1e-2}
        batch = {"train__tokens_per_step": 1024, "train__micro_batch_size": 16}
        ends = {"train__max_steps": steps, "train__eval_interval": steps, "optim__warmup_steps": 1}
        train.main(tiny_flags(data, folder / name, **shape, **batch, **ends))
    return folder


@pytest.fixture(autouse=True)
def own_cache(request, tmp_path_factory, monkeypatch):
    """Paths in the tasks are relative to the repository; the data sets' cache is the tests' own."""
    if "trained" in request.fixturenames:
        import datasets

        cache = tmp_path_factory.getbasetemp() / "datasets"
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
        monkeypatch.chdir(ROOT)


def make_lm(checkpoint, mode=None, max_length=CONTEXT, **settings):
    """The harness's view of a checkpoint."""
    from rove.evals.lm_eval.adapter import RoveLM

    settings = evaluation.LmEval(str(checkpoint), device="cpu", **settings)
    e = evaluation.Session(settings, GPT.from_checkpoint)
    e.open(mode or e.trained["pos_mode"], "yarn")
    return RoveLM(e, load_tokenizer(e.saved["tokenizer"]["name"]), max_length, seed=7)


def asked(kind, *arguments):
    """Requests as the harness makes them."""
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, args, 0, ("t", n, 1)) for n, args in enumerate(arguments)]


def alone(lm, ids, n_scored):
    """Log-probability of the last ids behind all before them, and whether each is the likeliest:
    one text at a time, log_softmax in float64."""
    with torch.no_grad():
        logits, _ = lm.session.model(torch.tensor([ids[:-1]]))
    logprobs = logits[0, -n_scored:].double().log_softmax(-1)
    targets = torch.tensor(ids[-n_scored:])
    picked = logprobs[torch.arange(n_scored), targets]
    return float(picked.sum()), bool((logprobs.argmax(-1) == targets).all())


def near(got, want):
    close = math.isclose(
        got[0], want[0], rel_tol=1e-6, abs_tol=CLOSE
    )  # hundreds of nats in float32
    return close and got[1] == want[1]


# ---------------------------------------------------------------- log-likelihoods

PAIRS = [
    ("The sky is", " blue"),
    ("The sky is ", "blue"),
    ("The grass is  \n ", "green\nThe snow is white"),
    ("", "The coal is black"),
    ("  ", "red"),
    ("The caf\u00e9", " \u4e16\u754c"),
    ("The fog is grey\n" * 30, "The sun is yellow"),
    ("The milk is white<|endoftext|>The", " sea"),
    ("The rose is", " pinkish grey and not at all like blood"),
]


def pair_by_hand(tokenizer, context, option):
    """Ids of both and how many are the option's, by the rules of the harness's hf backend."""

    def encode(text):
        parts = [tokenizer.encode(part).tolist() for part in text.split("<|endoftext|>")]
        return [i for n, part in enumerate(parts) for i in [tokenizer.eot_id] * (n > 0) + part]

    kept = context.rstrip()
    before, whole = encode(kept), encode(kept + context[len(kept) :] + option)
    if not before:
        before, whole = [tokenizer.eot_id], [tokenizer.eot_id, *whole]
    return whole, len(whole) - len(before)


@pytest.mark.parametrize("name", ["byte", "gpt2"])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_loglikelihoods_equal_a_log_softmax_of_one_pair_at_a_time(trained, name, batch_size):
    lm = make_lm(trained / name, batch_size=batch_size)
    got = lm.loglikelihood(asked("loglikelihood", *PAIRS))
    for answer, pair in zip(got, PAIRS, strict=True):
        ids, n = pair_by_hand(lm.vocabulary, *pair)
        assert near(answer, alone(lm, ids[-(CONTEXT + 1) :], n)), pair
    if name == "byte":
        assert got[0][1] and not got[-1][1], "it has learned the colour of the sky"


def test_order_and_batches_change_no_answer(trained):
    one = make_lm(trained / "byte").loglikelihood(asked("loglikelihood", *PAIRS))
    back = make_lm(trained / "byte", batch_size=9).loglikelihood(
        asked("loglikelihood", *PAIRS[::-1])
    )
    assert all(near(a, b) for a, b in zip(one, back[::-1], strict=True))


def test_options_of_one_token_share_a_row(trained, monkeypatch):
    lm = make_lm(trained / "gpt2", batch_size=8)
    hidden, rows = lm.session.model.hidden, []

    def counted(idx, *more):
        rows.append(len(idx))
        return hidden(idx, *more)

    monkeypatch.setattr(lm.session, "describe_cost", lambda flops: "")
    monkeypatch.setattr(lm.session.model, "hidden", counted)
    pairs = [("The sky is", " blue"), ("The sky is", " green"), ("The sea is", " blue"),
             ("The sky is", " blue green"), ("The sky is blue", " white")]  # fmt: skip
    got = lm.loglikelihood(asked("loglikelihood", *pairs))
    assert sum(rows) == 3
    for answer, pair in zip(got, pairs, strict=True):
        assert near(answer, alone(lm, *pair_by_hand(lm.vocabulary, *pair)))


def test_an_option_fills_the_context_and_a_longer_one_is_refused(trained):
    lm = make_lm(trained / "byte")
    (answer,) = lm.loglikelihood(asked("loglikelihood", ("The", "x" * CONTEXT)))
    assert near(answer, alone(lm, list(b"e" + b"x" * CONTEXT), CONTEXT))
    for option in ("x" * (CONTEXT + 1), ""):
        with pytest.raises(ValueError, match="option"):
            lm.loglikelihood(asked("loglikelihood", ("The", option)))


@pytest.mark.parametrize("max_length", [CONTEXT, 24, 1])
def test_rolling_equals_windows_by_hand(trained, max_length):
    lm = make_lm(trained / "byte", max_length=max_length, batch_size=3)
    texts = ["The sky is blue\n" * 9, "", "x", "The coal is black " * 3 + "<|endoftext|>", "a" * 64]
    got = lm.loglikelihood_rolling(asked("loglikelihood_rolling", *((text,) for text in texts)))
    eot = lm.eot_token_id
    for total, text in zip(got, texts, strict=True):
        marks = [eot] if text.endswith("<|endoftext|>") else []
        ids = [*text.removesuffix("<|endoftext|>").encode(), *marks]
        want = 0.0
        for start in range(0, len(ids), max_length):
            stop = min(start + max_length, len(ids))
            before = [eot, *ids][max(0, stop - max_length) : start + 1]
            want += alone(lm, before + ids[start:stop], stop - start)[0]
        assert total == pytest.approx(want, abs=CLOSE * 4)


def test_weights_that_are_not_finite_are_refused(trained):
    lm = make_lm(trained / "byte")
    with torch.no_grad():
        lm.session.model.transformer.ln_f.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        lm.loglikelihood(asked("loglikelihood", ("The", " sky")))


# ---------------------------------------------------------------- texts


def written_by_hand(lm, context, most, stops):
    """Greedy ids by full passes, looked at after each token, cut at the first stop."""
    eot = lm.eot_token_id
    ids = ([*context.encode()] or [eot])[-(lm.max_length - most) :]
    text, new = "", []
    for _ in range(most):
        with torch.no_grad():
            token = int(lm.session.model(torch.tensor([ids + new]))[0][0, -1].argmax())
        if token == eot:
            break
        new.append(token)
        text = bytes(new).decode("utf-8", errors="replace")
        if any(stop in text for stop in stops):
            break
    return min((text.split(stop)[0] for stop in stops), key=len, default=text)


PROMPTS = [
    ("The sky is", {"until": ["\n"], "max_gen_toks": 40}),
    ("The grass is", {"until": ["\nThe snow", "is w"], "max_gen_toks": 40}),
    ("The rose", {"until": [], "max_gen_toks": 40}),
    ("", {"until": "ck", "max_gen_toks": 40}),
    ("The sun is yellow\n" * 9, {"until": ["\n\n"], "max_gen_toks": 50, "do_sample": False}),
    ("The sun", {"until": ["w"], "max_gen_toks": 1, "temperature": 0.0}),
    ("The coal is bl", {"until": ["nowhere"], "max_new_tokens": 33, "num_beams": 1}),
]


@pytest.mark.parametrize("batch_size", [1, 6])
def test_texts_equal_a_plain_loop_that_looks_for_stops_after_each_token(trained, batch_size):
    lm = make_lm(trained / "byte", batch_size=batch_size)
    got = lm.generate_until(asked("generate_until", *PROMPTS))
    for text, (context, how) in zip(got, PROMPTS, strict=True):
        most = how.get("max_gen_toks") or how["max_new_tokens"]
        stops = [how["until"]] if isinstance(how["until"], str) else how["until"]
        assert text == written_by_hand(lm, context, most, stops), context
    assert got[0] == " blue" and len(got[2]) == 40


def record_writing(lm, monkeypatch):
    """The list to which each call of generate adds its rows, its tokens at most, and its seed."""
    real, calls = lm.session.model.generate, []

    def generate(idx, n, **how):
        calls.append((len(idx), n, how["seed"]))
        return real(idx, n, **how)

    monkeypatch.setattr(lm.session.model, "generate", generate)
    return calls


def test_end_of_text_ends_a_text(trained, monkeypatch):
    lm = make_lm(trained / "byte")
    calls = record_writing(lm, monkeypatch)
    before = written_by_hand(lm, "The sky is", 40, [])
    with torch.no_grad():  # end-of-text takes the place of "u", and is seen by nothing else
        weight = lm.session.model.transformer.wte.weight
        weight[lm.eot_token_id] = weight[ord("u")] * 3
    (text,) = lm.generate_until(asked("generate_until", ("The sky is", {"max_gen_toks": 40})))
    assert text == before.split("u")[0] == " bl" and len(calls) == 1


def test_drawn_texts_depend_on_the_seed_and_their_place_alone(trained):
    how = {"do_sample": True, "temperature": 1.5, "max_gen_toks": 40, "until": []}
    prompts = [("The sky", how), ("The snow", how), ("The sky", how)]
    got = [make_lm(trained / "byte", batch_size=n).generate_until(asked("generate_until", *prompts))
           for n in (1, 4)]  # fmt: skip
    assert got[0] == got[1] and got[0][0] != got[0][2]
    once = {"do_sample": True, "top_k": 1, "max_gen_toks": 40, "until": ["\n"]}
    lm = make_lm(trained / "byte")
    (request,) = asked("generate_until", ("The sky is", once))
    assert lm.generate_until([request]) == [" blue"]
    assert lm._writing(request).how["temperature"] == 1.0


def test_no_more_is_written_than_stops_allow_and_each_part_is_drawn_anew(trained, monkeypatch):
    lm = make_lm(trained / "byte", batch_size=4)
    calls = record_writing(lm, monkeypatch)
    prompts = [("The sky is", {"until": ["\n"], "max_gen_toks": 60}),
               ("The sea is", {"until": [], "max_gen_toks": 60})]  # fmt: skip
    lm.generate_until(asked("generate_until", *prompts))
    assert [call[:2] for call in calls] == [(2, 32), (1, 28)]
    calls.clear()
    how = {"do_sample": True, "top_k": 1, "max_gen_toks": 60, "until": []}
    lm.generate_until(asked("generate_until", ("The", how), ("The", how)))
    assert [call[:2] for call in calls] == [(1, 32), (1, 28)] * 2
    assert len({seed for *_, seed in calls}) == 4


def test_ranks_share_the_batches_without_overlap(trained, monkeypatch):
    lm, done = make_lm(trained / "byte"), []
    batches = [[3, 1], [0], [5, 2], [4]]
    monkeypatch.setattr(dist, "gather", lambda found: done.append(found) or [found])
    for rank in range(3):
        lm.session.world = replace(lm.session.world, rank=rank, size=3)
        with contextlib.suppress(KeyError):  # of the answers that other ranks have
            lm._share(batches, lambda batch: dict.fromkeys(batch, "answer"), "row")
    assert [list(found) for found in done] == [[3, 1, 4], [0], [5, 2]]


@pytest.mark.parametrize(
    "how, message",
    [
        ({"max_gen_toks": CONTEXT}, "raise --max_length"),
        ({"max_gen_toks": 0}, "max_gen_toks=0"),
        ({"max_gen_toks": 8, "num_beams": 4}, "num_beams"),
        ({"max_gen_toks": 8, "repetition_penalty": 2.0}, "repetition_penalty"),
        ({}, "max_gen_toks=256"),
    ],
)
def test_what_cannot_be_written_is_refused(trained, how, message):
    with pytest.raises(ValueError, match=message):
        make_lm(trained / "byte").generate_until(asked("generate_until", ("The", how)))


# ---------------------------------------------------------------- from the command line


def run(checkpoint, out, *flags):
    argv = ["lm_eval", "--checkpoint", checkpoint, "--out", out, *OWN, *flags]
    evaluation.main([str(arg) for arg in argv])
    return json.loads(out.read_text())


def refused(capsys, *argv):
    with pytest.raises(SystemExit) as stop:
        evaluation.main(["lm_eval", *map(str, argv)])
    error = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and sum(line.startswith("error: ") for line in error) == 1, error
    return error[-1]


def without(result, *keys):
    return {key: x for key, x in result.items() if key not in ("created", *keys)}


def test_three_local_tasks_from_the_command_line_without_network(trained, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError(f"asked for the network: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    argv = ["--tasks", ",".join(NAMES), "--num_fewshot", 2]
    run_folder = tmp_path / "run"
    run_folder.symlink_to(trained / "byte")
    monkeypatch.setenv("HOME", str(tmp_path))
    evaluation.main(["lm_eval", "--checkpoint", str(run_folder), *OWN, *map(str, argv)])
    text = (trained / "byte/eval/lm_eval_rove.json").read_text()
    result = json.loads(text)
    assert result["kind"] == "lm_eval" and result["pos_mode"] == "rove" and result["step"] == 120
    assert result["tasks"] == NAMES and result["max_length"] == result["block_size"] == CONTEXT
    assert result["harness"].startswith("0.4.") and result["fewshot_seed"] == 1234
    assert result["limit"] is None and result["yarn_factor"] == 1 and len(result["data"]) == 64
    assert result["versions"] == {NAMES[0]: 1.0, NAMES[1]: 2.0, NAMES[2]: 1.0}
    assert result["num_fewshot"] == {NAMES[0]: 2, NAMES[1]: 2, NAMES[2]: 0}, "a fixed 0 stays"
    colours, pages, endings = (result["results"][name] for name in NAMES)
    assert colours["n"] == endings["n"] == 12 and pages["n"] == 5
    assert colours["acc,none"] > 0.7 and endings["exact_match,none"] > 0.5
    assert pages["bits_per_byte,none"] > 0 and pages["bits_per_byte_stderr,none"] is None
    assert result["higher_is_better"][NAMES[1]]["bits_per_byte"] is False
    assert text.replace(str(run_folder), "").count(str(ROOT)) == 0 and '": "/' not in text.replace(
        f'"{run_folder}"', '""'
    )


def test_bits_per_byte_and_accuracies_equal_sums_by_hand(trained, tmp_path):
    flags = ["--tasks", ",".join(NAMES[:2]), "--num_fewshot", 0]
    result = run(trained / "byte", tmp_path / "a.json", *flags)
    lm = make_lm(trained / "byte")
    read = [json.loads(line) for line in (ROOT / TASKS / "pages.jsonl").read_text().splitlines()]
    total = 0.0
    for ids in (list(row["text"].encode()) for row in read):
        for start in range(0, len(ids), CONTEXT):
            stop = min(start + CONTEXT, len(ids))
            before = [lm.eot_token_id, *ids][max(0, stop - CONTEXT) : start + 1]
            total += alone(lm, before + ids[start:stop], stop - start)[0]
    n_bytes = sum(len(row["text"].encode()) for row in read)
    got = result["results"]["rove_pages"]
    assert got["bits_per_byte,none"] == pytest.approx(-total / n_bytes / math.log(2), abs=CLOSE)
    right = []
    for line in (ROOT / TASKS / "colours.jsonl").read_text().splitlines():
        row = json.loads(line)
        texts = [f"The {row['thing']} is {choice}".encode() for choice in row["choices"]]
        sums = [alone(lm, list(t), len(c) + 1)[0]
                for t, c in zip(texts, row["choices"], strict=True)]  # fmt: skip
        right.append(sums.index(max(sums)) == row["gold"])
    assert result["results"]["rove_colours"]["acc,none"] == pytest.approx(np.mean(right))


def test_results_equal_those_of_the_harness_s_own_entry_point(trained, tmp_path):
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    names = ",".join(NAMES)
    flags = ["--tasks", names, "--num_fewshot", 2, "--limit", 7, "--seed", 5]
    got = run(trained / "byte", tmp_path / "a.json", *flags)["results"]
    seeds = dict.fromkeys(("numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), 5)
    manager = TaskManager(include_path=TASKS, include_defaults=False)
    found = evaluator.simple_evaluate(
        make_lm(trained / "byte"), tasks=NAMES, task_manager=manager, num_fewshot=2, limit=7,
        log_samples=False, **seeds,
    )  # fmt: skip
    for name in NAMES:
        want = {key: x for key, x in found["results"][name].items() if "," in key}
        assert {key: x for key, x in got[name].items() if "," in key} == running.plain(want)
    assert got[NAMES[0]]["n"] == 7


def test_a_group_has_its_mean_and_a_pattern_is_expanded(trained, tmp_path):
    parts = ["task: [rove_colours, rove_pages]", "group: rove_group", "metadata: {version: 3.0}"]
    mean = "aggregate_metric_list: [{metric: acc, aggregation: mean, weight_by_size: true}]"
    (tmp_path / "group.yaml").write_text("\n".join([*parts, mean, ""]))
    for path in (ROOT / TASKS).glob("*.yaml"):
        (tmp_path / path.name).write_text(path.read_text())
    flags = ["--tasks", "rove_group,rove_end*", "--include_path", tmp_path]
    got = run(trained / "byte", tmp_path / "a.json", *flags)
    assert got["tasks"] == ["rove_group", "rove_endings"]
    assert got["groups"] == {"rove_group": ["rove_colours", "rove_pages"]}
    assert set(got["results"]) == {"rove_group", *NAMES} and got["results"]["rove_group"]["n"] == 17
    assert got["results"]["rove_group"]["acc,none"] == got["results"]["rove_colours"]["acc,none"]
    assert got["versions"]["rove_group"] == "3.0"


def test_batch_size_changes_nothing(trained, tmp_path):
    flags = ["--tasks", ",".join(NAMES), "--num_fewshot", 1]
    one, many = (run(trained / "byte", tmp_path / f"{n}.json", *flags, "--batch_size", n)
                 for n in (1, 16))  # fmt: skip
    assert without(one, "results") == without(many, "results")
    for name in NAMES:
        got, want = many["results"][name], one["results"][name]
        assert list(got) == list(want) and got["n"] == want["n"]
        for key in (key for key, x in want.items() if isinstance(x, float)):
            assert got[key] == pytest.approx(want[key], rel=CLOSE, abs=1e-12), key


def test_two_ranks_give_the_very_results_of_one(trained, tmp_path):
    flags = ["--tasks", ",".join(NAMES), "--num_fewshot", 1]
    want = run(trained / "byte", tmp_path / "one.json", *flags)
    env = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    argv = ["eval.py", "lm_eval", "--checkpoint", trained / "byte", *OWN, *flags]
    done = run_script(*argv, "--out", tmp_path / "two.json", ranks=2, env=env)
    assert done.returncode == 0, done.stderr
    got = json.loads((tmp_path / "two.json").read_text())
    assert without(got) == without(want)
    assert done.stdout.count("rove_pages, 5 items") == 1


def test_yarn_factor_follows_max_length_and_changes_the_scores(trained, tmp_path):
    flags = ["--tasks", "rove_pages"]
    longer = [*flags, "--max_length", 128]
    plain = run(trained / "byte", tmp_path / "a.json", *longer)
    yarn = run(trained / "byte", tmp_path / "b.json", *longer, "--pos_mode", "rove+yarn")
    fixed = [*longer, "--pos_mode", "rove+yarn", "--yarn_factor", 2]
    same = run(trained / "byte", tmp_path / "c.json", *fixed)
    short = run(trained / "byte", tmp_path / "d.json", *flags, "--pos_mode", "rove+yarn")
    usual = run(trained / "byte", tmp_path / "e.json", *flags)
    assert plain["yarn_factor"] == 1 and yarn["yarn_factor"] == same["yarn_factor"] == 2
    assert yarn["max_length"] == 128 and yarn["temperature"] == pytest.approx(1 + 0.1 * math.log(2))
    assert yarn["results"] == same["results"] != plain["results"]
    assert short["yarn_factor"] == 1 and short["results"] == usual["results"]


def test_a_killed_evaluation_goes_on_unless_its_data_has_changed(trained, tmp_path, monkeypatch):
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for path in (ROOT / TASKS).iterdir():
        (tasks / path.name).write_text(path.read_text().replace(TASKS, str(tasks)))
    measured, real = [], running.evaluate

    def killed(e, lm, loaded):
        measured.extend(loaded["tasks"])
        if len(measured) == 2:
            raise KeyboardInterrupt
        return real(e, lm, loaded)

    monkeypatch.setattr(running, "evaluate", killed)
    flags = ["--tasks", ",".join(NAMES), "--include_path", tasks]
    out = tmp_path / "out.json"
    with pytest.raises(SystemExit, match="130"):
        run(trained / "byte", out, *flags)
    assert len(list(tmp_path.glob("*.partial"))) == 1 and not out.exists()
    result = run(trained / "byte", out, *flags)
    assert measured == [NAMES[0], NAMES[1], NAMES[1], NAMES[2]]
    assert not list(tmp_path.glob("*.partial")) and list(result["results"]) == sorted(NAMES)
    pages = tasks / "pages.jsonl"
    pages.write_text(pages.read_text().replace("blue", "grey"))
    changed = run(trained / "byte", out, *flags)
    assert measured[4:] == NAMES and changed["data"] != result["data"]
    assert list((tmp_path / "older").glob("out_*.json"))


def test_faults_are_one_line(trained, tmp_path, capsys):
    base = ["--checkpoint", trained / "byte", *OWN]
    assert "hellaswag" in refused(capsys, *base, "--tasks", "rove_colours,helaswag")
    assert "--tasks" in refused(capsys, *base)
    for flag, value in (
        ("limit", 0),
        ("limit", 1.5),
        ("limit", ".inf"),
        ("num_fewshot", -1),
        ("max_length", 0),
    ):
        assert f"--{flag}" in refused(capsys, *base, "--tasks", "rove_pages", f"--{flag}", value)
    nowhere = [*base, "--tasks", "rove_pages", "--include_path", tmp_path / "none"]
    assert "no such folder" in refused(capsys, *nowhere)
    factors = ["--pos_mode", "rove+yarn", "--yarn_factor", "2,4"]
    assert "one factor" in refused(capsys, *base, "--tasks", "rove_pages", *factors)
    (tmp_path / "broken.yaml").write_text((ROOT / TASKS / "pages.yaml").read_text().replace(
        f"{TASKS}/pages.jsonl", str(tmp_path / "none.jsonl")))  # fmt: skip
    lost = [*base, "--tasks", "rove_pages", "--include_path", tmp_path]
    assert "task 'rove_pages' cannot be loaded" in refused(capsys, *lost)


# ---------------------------------------------------------------- the harness's hf backend


def byte_tokenizer(eot_id):
    """The byte tokenizer as transformers has one; exports carry none for bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in plain]
    shown = {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}
    made = Tokenizer(models.BPE(vocab=shown | {"<|endoftext|>": eot_id}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    eot = dict.fromkeys(("bos_token", "eos_token"), "<|endoftext|>")
    return PreTrainedTokenizerFast(tokenizer_object=made, **eot)


@pytest.fixture(scope="module")
def exported(trained):
    """Exports of both models, loaded by the harness's own backend: (name, flags) -> its LM."""
    pytest.importorskip("accelerate")
    from lm_eval.models.huggingface import HFLM

    import export_hf

    for name in ("byte", "gpt2"):
        out = trained / f"{name}-hf"
        export_hf.main(["--checkpoint", str(trained / name), "--out_dir", str(out)])

    def opened(name, **flags):
        flags |= {"tokenizer": byte_tokenizer(256)} if name == "byte" else {}
        path = str(trained / f"{name}-hf")
        return HFLM(path, trust_remote_code=True, device="cpu", dtype="float32", **flags)

    return opened


LONGER = {"pos_mode": "rove+yarn", "yarn_factor": 2.0, "max_length": 128}


@pytest.mark.parametrize("name, longer", [("byte", {}), ("gpt2", {}), ("byte", LONGER)])
def test_answers_equal_those_of_the_hf_backend_on_the_export(trained, exported, name, longer):
    theirs, mode = exported(name, batch_size=3, **longer), longer.get("pos_mode")
    ours = make_lm(trained / name, mode, theirs.max_length, batch_size=2)
    ours.session.set_factor(longer.get("yarn_factor", 1.0))
    assert theirs.max_length == longer.get("max_length", CONTEXT)
    kept = [pair for pair in PAIRS if pair[0].strip() or not pair[0]]  # it fails on spaces alone
    requests = asked("loglikelihood", *kept)
    got, want = ours.loglikelihood(requests), theirs.loglikelihood(requests)
    assert all(near(a, b) for a, b in zip(got, want, strict=True))
    texts = ["The sky is blue\n" * 40, "x", "The caf\u00e9 \u4e16\u754c <|endoftext|> is"]
    requests = asked("loglikelihood_rolling", *((text,) for text in texts))
    got, want = ours.loglikelihood_rolling(requests), theirs.loglikelihood_rolling(requests)
    assert got == pytest.approx(want, rel=1e-6)
    prompts = [prompt for prompt in PROMPTS if prompt[0]]  # and on no prompt at all
    requests = asked("generate_until", *prompts)
    assert ours.generate_until(requests) == theirs.generate_until(requests)


def test_results_equal_those_of_the_hf_backend_on_the_export(trained, exported, tmp_path):
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=TASKS, include_defaults=False)
    for name in ("byte", "gpt2"):
        flags = ["--tasks", ",".join(NAMES), "--num_fewshot", 1, "--batch_size", 4]
        got = run(trained / name, tmp_path / f"{name}.json", *flags)["results"]
        found = evaluator.simple_evaluate(
            exported(name), tasks=NAMES, task_manager=manager, num_fewshot=1, log_samples=False
        )
        for task in NAMES:
            want = running.plain(found["results"][task])
            for key in (key for key, x in want.items() if isinstance(x, float)):
                assert got[task][key] == pytest.approx(want[key], rel=1e-6, abs=1e-12), key
