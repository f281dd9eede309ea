"""`eval.py ruler` from start to end."""

import hashlib
import json
from dataclasses import asdict
from functools import partial as bind
from operator import itemgetter
from pathlib import Path
from typing import Any

from torch import Tensor

from rove import distributed as dist
from rove.evals.bootstrap import mean_interval
from rove.evals.cost import forward_flops
from rove.evals.perplexity.protocols import parse_numbers
from rove.evals.results import Partial, result_path
from rove.evals.ruler import (
    TASKS,
    Sample,
    Sources,
    categories,
    make_samples,
    needs,
    read_samples,
    score_samples,
    summarize,
    write_samples,
)
from rove.evals.ruler.results import by_context, gain_of
from rove.evals.ruler.tasks import find_task
from rove.evals.session import Session
from rove.files import check_folder
from rove.tokenizer import Tokenizer, load_tokenizer
from rove.words import names_in

Job = tuple[str, int]  # task, length


def find_samples(e: Session, tokenizer: Tokenizer) -> dict[Job, list[Sample]]:
    """Return the samples to score by task and length: read from a file, or made."""
    s = e.settings
    for key in ("samples", "essay", "squad", "hotpot"):
        if (file := getattr(s, key)) is not None and not Path(file).is_file():
            raise ValueError(f"--{key} {file}: no such file; name one")
    names = None if s.tasks is None else names_in("tasks", s.tasks)
    lengths = parse_numbers("lengths", s.lengths or "4096,8192")
    if s.samples is not None:
        task = names[0] if names is not None and len(names) == 1 else None
        length = lengths[0] if s.lengths is not None and len(lengths) == 1 else None
        found: dict[Job, list[Sample]] = {}
        for name in names or ():
            find_task(name)
        for sample in read_samples(Path(s.samples), task, length):
            is_wanted = names is None or sample.task in names
            if is_wanted and (s.lengths is None or sample.length in lengths):
                found.setdefault((sample.task, sample.length), []).append(sample)
        if not found:
            asked = f"tasks={s.tasks}, lengths={s.lengths}"
            raise ValueError(f"{s.samples}: holds no sample of {asked}")
        return {job: samples[: s.num_samples] for job, samples in found.items()}
    sources = Sources(*(None if p is None else Path(p) for p in (s.essay, s.squad, s.hotpot)))
    lacking = {task: needs(task, sources) for task in names or TASKS}
    if names is not None and (fault := next(filter(None, lacking.values()), None)):
        raise ValueError(fault)
    for reason in filter(None, lacking.values()):
        e.say(f"notice: left out: {reason}")
    jobs = [(task, n) for n in lengths for task, reason in lacking.items() if reason is None]
    bar = e.bar(len(jobs) * s.num_samples, "sample made")
    how = tokenizer.encode, sources, s.layout, bar.update
    made = {(task, n): make_samples(task, n, s.num_samples, s.seed, *how) for task, n in jobs}
    bar.close()
    return made


def run(e: Session) -> None:
    """Score every task at every length and write the result."""
    s, tokenizer = e.settings, load_tokenizer(e.saved["tokenizer"]["name"])
    mode, values = e.only_variant()
    name = f"ruler_{'samples' if s.samples else s.layout}"
    path = result_path(s.out, e.run, name, mode, values)
    jobs = find_samples(e, tokenizer)
    if s.save_samples is not None and e.world.is_main:
        folder = Path(s.save_samples)
        check_folder("--save_samples", folder)
        folder.mkdir(parents=True, exist_ok=True)
        for (task, length), samples in jobs.items():
            write_samples(folder / f"{task}_{length}.jsonl", samples)
    e.open(mode, values)
    e.say(f"RULER by the NLL of the answer: {e.describe()}")
    flops = sum(2 * len(made) * forward_flops(e.model.config, length, 32)
                for (_, length), made in jobs.items())  # fmt: skip
    n_samples = sum(map(len, jobs.values()))
    e.say(f"cost: {n_samples} samples, with controls; {e.describe_cost(flops)}")
    bar = e.bar(-(-n_samples // e.world.size), "sample")

    def generate(ids: Tensor, max_new_tokens: int) -> list[int]:
        stops = (tokenizer.eot_id,)
        out = e.model.generate(ids, max_new_tokens, 0.0, stop_ids=stops, max_context=None)
        return [int(i) for i in out[0, ids.shape[1] :]]

    setting: dict[str, Any] = {"layout": "file" if s.samples else s.layout}
    setting |= {"generated": s.generate, "samples_seed": None if s.samples else s.seed}
    hashes = {}
    for job, samples in jobs.items():
        text = json.dumps([asdict(sample) for sample in samples])
        hashes[job] = hashlib.sha256(text.encode()).hexdigest()
    data = hashlib.sha256("".join(hashes.values()).encode()).hexdigest()
    identity = e.identity("ruler", **setting, data=data, yarn_factor=s.yarn_factor)
    partial = Partial(path, identity, e.world)
    results = []
    for (task, length), samples in jobs.items():
        factors = e.factors(mode, length)
        if len(factors) > 1:
            raise ValueError(f"yarn_factor={s.yarn_factor}: one factor at a time here")
        how = e.set_factor(factors[0])
        score = bind(score_samples, samples, e.score, generate if s.generate else None,
                     tokenizer.encode, tokenizer.decode, tokenizer.eot_id, s.batch_size,
                     e.device, e.world.rank, e.world.size, dist.gather, bar.update)  # fmt: skip
        rows = partial.get(f"{task} {length} {how['yarn_factor']}", score)
        row = summarize(task, length, rows) | how | {"sha256": hashes[task, length]}
        row["variant"] = None if s.samples else TASKS[task].variant
        for key, measure in (("nll", itemgetter("nll")), ("gain", gain_of)):
            measured = by_context(task, rows, [measure(r) for r in rows])
            row[f"{key}_interval"] = mean_interval(measured)
        results.append(row)
        _say_row(e, row)
    bar.close()
    content = e.common("ruler") | setting | {"data": data, "results": results}
    partial.finish(path, content | {"categories": categories(results)})
    e.say(f"wrote {path}")


def _say_row(e: Session, row: dict[str, Any]) -> None:
    def shown(key: str, form: str) -> str:
        return "n/a" if row[key] is None else format(row[key], form)

    match = "" if row["string_match"] is None else f"  string match {row['string_match']:.1f} %"
    nll = f"nll {row['nll']:.3f} (format only {shown('nll_guess', '.3f')})"
    found = f"gain {shown('gain', '+.3f')}  exact {row['exact']:.3f}{match}  {nll}"
    how = f"factor {row['yarn_factor']:g}, {row['n']} samples"
    e.say(f"  {row['task']:18s} {row['length']:6d}  {found}  {how}")
    for part in row["by_hop"] or []:
        e.say(f"    {part['hop']} hops: exact {part['exact']:.3f}, nll {part['nll']:.3f}")
