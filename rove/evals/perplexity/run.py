"""`eval.py perplexity` from start to end, for any number of modes on the same targets."""

from pathlib import Path
from typing import Any

import numpy as np

from rove import distributed as dist
from rove import runs
from rove.evals.cost import forward_flops
from rove.evals.perplexity import protocols as ppl
from rove.evals.results import Partial, result_path
from rove.evals.session import Session
from rove.shards import TokenData, open_split
from rove.tokenizer import load_tokenizer

GPU_TOKENS, CPU_TOKENS, CPU_UNITS = 10_485_760, 131_072, 20


def open_data(e: Session, folder: str | None) -> TokenData:
    """Return the validation split of `folder`, or of the run's data; its vocabulary must fit."""
    if folder is None:
        folder = runs.run_setting(e.run, "data.dir")
        if folder is None or not Path(folder).is_dir():
            raise ValueError(f"--data: the run's data folder ({folder}) is not here; name one")
    val = open_split(folder, "val", e.say)
    trained = e.saved["tokenizer"]
    for key in ("name", "vocab_size", "sha256"):
        found = val.tokenizer.get(key)
        if None not in (found, trained[key]) and found != trained[key]:
            both = f"{found}, the model was trained on {trained[key]}"
            raise ValueError(f"{folder}: tokenizer {key} {both}")
    return val


def token_bytes(name: str) -> ppl.Ids | None:
    """Return the bytes of each id, or None where the vocabulary is not at hand."""
    try:
        return load_tokenizer(name).token_bytes()
    except ValueError:
        return None


def run(e: Session) -> None:
    """Measure every mode that the settings ask for, and write a result for each."""
    s, val = e.settings, open_data(e, e.settings.data)
    context = e.trained["block_size"]
    is_default = s.lengths is None
    lengths = ppl.default_lengths(context) if is_default else ppl.parse_lengths(s.lengths)
    if is_default and e.trained["pos_mode"] == "learned":  # there are no positions beyond
        lengths = [length for length in lengths if length <= context]
    on_cpu = max(CPU_TOKENS, CPU_UNITS * lengths[-1])
    usual = on_cpu if e.device.type == "cpu" else GPU_TOKENS
    if s.protocol == "tail":  # its units have few targets each
        n_anchors = max(ppl.LEAST_ANCHORS, usual // lengths[-1])
        usual = n_anchors * min(ppl.STRIDE, lengths[0])
    most = usual if s.max_tokens is None else s.max_tokens
    text = ppl.open_text(s.protocol, val, lengths, most)
    lengths = lengths[-1:] if s.protocol == "positions" else lengths
    bytes_of = token_bytes(val.tokenizer["name"])
    if bytes_of is None:
        e.say("notice: no bits per byte, as the tokenizer's vocabulary is not on this machine")
    variants = e.variants()
    name = f"perplexity_{s.protocol}"
    paths = [result_path(s.out, e.run, name, *variant) for variant in variants]
    if len(set(paths)) < len(paths):
        raise ValueError(f"--out {s.out}: one file cannot hold {len(paths)} modes; leave it out")
    for number, (variant, path) in enumerate(zip(variants, paths, strict=True)):
        e.open(*variant, is_last=variant == variants[-1])
        if number == 0:
            jobs = [(length, f) for mode, _ in variants for length in lengths
                    for f in e.factors(mode, length)]  # fmt: skip
            e.say(f"perplexity, {s.protocol}: {text.targets.size:,} targets in {len(text.rows)} "
                  f"units of {text.largest} tokens, windows of {lengths}")  # fmt: skip
            e.say(f"cost: {e.describe_cost(sum(_flops(e, text, length) for length, _ in jobs))}")
        _measure_variant(e, text, lengths, bytes_of, val.sha256, path)


def _flops(e: Session, text: ppl.Text, length: int) -> float:
    windows = text.windows(length)
    return len(text.rows) * sum(forward_flops(e.model.config, length, n) for _, n in windows)


def _measure_variant(
    e: Session,
    text: ppl.Text,
    lengths: list[int],
    bytes_of: ppl.Ids | None,
    data: str,
    path: Path,
) -> None:
    """Measure the session's model at every length and factor; write the result."""
    s, mode = e.settings, e.model.config.pos_mode
    setting = {"protocol": s.protocol, "data": data, "mask_eot": s.mask_eot}
    setting |= {"units": len(text.rows), "largest": text.largest, "scored": text.n_scored}
    setting |= {"stride": text.stride if s.protocol == "sliding" else None}
    jobs = [(length, factor) for length in lengths for factor in e.factors(mode, length)]
    partial = Partial(path, e.identity("perplexity", **setting, jobs=jobs), e.world)
    e.say(f"{e.describe()}")
    own = range(e.world.rank, len(text.rows), e.world.size)
    bar = e.bar(sum(n * len(text.windows(n)) for n, _ in jobs) * len(own), "token")
    rows: list[dict[str, Any]] = []
    for length, factor in jobs:

        def measure(length: int = length) -> list[dict[str, Any]]:
            sums = ppl.measure(text, length, e.nll, own, s.batch_size, e.device, bar.update)
            by_rank = dist.gather(sums)  # unit u was scored by rank u mod world.size
            size = e.world.size
            every = np.array([by_rank[u % size][u // size] for u in range(len(text.rows))])
            if s.protocol == "positions":
                return ppl.position_results(text, every, s.mask_eot)
            return [ppl.length_result(text, length, every, bytes_of, s.mask_eot)]

        how = e.set_factor(factor)
        measured = partial.get(f"length {length} factor {factor}", measure)
        rows += [row | how for row in measured]
        _say_rows(e, length, rows[-len(measured) :])
    bar.close()
    if s.protocol != "positions":
        ppl.add_degradation(rows, e.model.config.block_size, s.yarn_factor is None)
        _say_degradation(e, rows)
    content = e.common("perplexity") | setting | {"tokens": int(text.targets.size)}
    content |= {"results": rows}
    if s.protocol == "positions":
        content["length"] = text.largest
    partial.finish(path, content)
    e.say(f"wrote {path}")


def _say_rows(e: Session, length: int, rows: list[dict[str, Any]]) -> None:
    how = f"factor {rows[0]['yarn_factor']:g}, temperature {rows[0]['temperature']:.4f}"
    if "from" in rows[0]:
        e.say(f"  one pass at {length}, {how}")
        for row in rows:
            nll = "" if row["nll"] is None else f"{row['nll']:.4f}"
            e.say(f"  positions [{row['from']}, {row['to']})  nll {nll}")
        return
    for row in rows:
        ppl_shown = "over e^700" if row["ppl"] is None else f"{row['ppl']:10.3f}"
        e.say(f"  length {length:6d}  nll {row['nll']:.4f}  ppl {ppl_shown}  {how}")


def _say_degradation(e: Session, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["degradation"] is not None and row["degradation"] != 0:
            within = row["degradation_interval"]
            shown = "" if within is None else f"  [{within[0]:+.4f}, {within[1]:+.4f}]"
            e.say(f"  D({row['length']}) = {row['degradation']:+.4f} nats/token{shown}, "
                  f"factor {row['yarn_factor']:g}")  # fmt: skip
