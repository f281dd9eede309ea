"""Evaluate a checkpoint: results as JSON under RUN/eval and as a printed table.

    python eval.py perplexity --checkpoint out/demo-rove --pos_mode rove+yarn --lengths 64,128,256
    torchrun --standalone --nproc_per_node=8 eval.py perplexity --checkpoint out/124m-rove

Several processes share the work and give the numbers that one would give.
"""

import datetime
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tqdm import tqdm

from model import GPT, PosMode
from rove import checkpoint as ckpt
from rove import device as dev
from rove import distributed as dist
from rove import runs
from rove.config import load, user_errors
from rove.evals import perplexity as ppl
from rove.files import write_json
from rove.shards import TokenData, open_split
from rove.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Common:
    checkpoint: str
    """run folder (its latest checkpoint) or checkpoint file"""
    pos_mode: PosMode | None = None
    """position mode; null: as trained, and +yarn may be added"""
    yarn_factor: float | None = None
    """YaRN factor of the +yarn modes; null: max(1, length / block_size) for each length"""
    yarn_values: Literal["yarn", "orig"] = "yarn"
    """frequencies of the values under rove+yarn: YaRN's or the original ones"""
    allow_retrofit: bool = False
    """allow a value path that the weights were not trained with; known to hurt"""
    device: dev.DeviceName = "auto"
    """where to evaluate; auto: cuda, else mps, else cpu"""
    dtype: dev.DtypeName = "float32"
    """of matrix products"""
    batch_size: int = 1
    """windows of the largest length in one forward pass; bounds memory, changes no result"""
    out: str | None = None
    """result file; null: RUN/eval/KIND_PROTOCOL_POSMODE.json"""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size}: must be at least 1")
        if self.yarn_factor is not None and not 1 <= self.yarn_factor < float("inf"):
            raise ValueError(f"yarn_factor={self.yarn_factor}: must be at least 1")


@dataclass(frozen=True)
class Perplexity(Common):
    data: str | None = None
    """folder of token shards, of which `val` is read; null: the run's"""
    protocol: Literal["packed", "positions"] = "packed"
    """packed: NLL by window length; positions: NLL by position in windows of the largest length"""
    lengths: str | None = None
    """window lengths such as 64,128; null: block_size / 2 to 16 block_size, doubling"""
    max_tokens: int | None = None
    """targets to score at most; null: 10,485,760, on a CPU 131,072 or 20 blocks if that is more"""


def open_model(s: Common, device: torch.device) -> tuple[GPT, dict[str, Any]]:
    """Return the model on the device, in the mode asked for, and the rest of its checkpoint."""
    saved = ckpt.load_checkpoint(s.checkpoint)
    model = GPT.from_checkpoint(saved, s.pos_mode, s.allow_retrofit, yarn_values=s.yarn_values)
    del saved["model"], saved["optimizer"]  # three times the model's memory
    return model.to(device), saved


def open_data(folder: str | None, run: Path, saved: dict[str, Any], say: Any) -> TokenData:
    """Return the validation split of `folder`, or of the run's data; its vocabulary must fit."""
    if folder is None:
        folder = runs.read_run_config(run).get("data", {}).get("dir")
        if folder is None or not Path(folder).is_dir():
            raise ValueError(f"--data: the run's data folder ({folder}) is not here; name one")
    val = open_split(folder, "val", say)
    trained = saved["tokenizer"]
    for key in ("name", "vocab_size", "sha256"):
        found = val.tokenizer.get(key)
        if None not in (found, trained[key]) and found != trained[key]:
            both = f"{found}, the model was trained on {trained[key]}"
            raise ValueError(f"{folder}: tokenizer {key} {both}")
    return val


def token_bytes(name: str) -> np.ndarray[Any, Any] | None:
    """Return the bytes of each id, or None where the vocabulary is not at hand."""
    try:
        return load_tokenizer(name).token_bytes()
    except ValueError:
        return None


def set_factor(model: GPT, s: Common, length: int) -> dict[str, Any]:
    """Set the YaRN factor for a target length; return what to record and print of it."""
    by_length = max(1.0, length / model.config.block_size)
    wanted = by_length if s.yarn_factor is None else s.yarn_factor
    model.set_yarn_factor(wanted if model.config.pos_mode.endswith("+yarn") else 1.0)
    return {"yarn_factor": model.config.factor, "temperature": model.config.mscale}


def perplexity(argv: list[str]) -> None:
    """Run `eval.py perplexity`."""
    s = load(Perplexity, argv, prog="eval.py perplexity", description=ppl.__doc__)
    world, run = dist.read_world(), runs.run_of(s.checkpoint)
    say = tqdm.write if world.is_main else (lambda line: None)
    device = dev.resolve_device(s.device, world.local_rank)
    model, saved = open_model(s, device)
    dtype = dev.resolve_dtype(s.dtype, device, model.config.n_embd)
    val = open_data(s.data, run, saved, say)
    context = model.config.block_size
    lengths = ppl.parse_lengths(s.lengths) if s.lengths else ppl.default_lengths(context)
    usual = max(131072, 20 * lengths[-1]) if device.type == "cpu" else 10485760
    most = usual if s.max_tokens is None else s.max_tokens
    n_blocks = ppl.count_blocks(val.n_tokens, lengths[-1], most)
    targets = ppl.Targets(val.read(0, n_blocks * lengths[-1] + 1), lengths[-1])
    lengths = lengths if s.protocol == "packed" else lengths[-1:]
    path = result_path(s, run, f"perplexity_{s.protocol}", model)
    dist.connect(world, device, timeout_s=3600)
    if s.yarn_factor is not None and not model.config.pos_mode.endswith("+yarn"):
        say(f"warning: yarn_factor={s.yarn_factor} has no effect in mode {model.config.pos_mode}")
    tokens = n_blocks * targets.block_size
    what = f"{s.checkpoint} at step {saved['step']}, {model.config.pos_mode}, trained at {context}"
    cost = 2 * sum(p.numel() for p in model.parameters()) * tokens * len(lengths)
    say(f"perplexity, {s.protocol}: {what}")
    say(f"{tokens:,} targets in windows of {lengths}, {cost:.1e} FLOPs and attention's on top")

    def score(idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with dev.autocast(device, dtype):
            return model.token_nll(idx, targets)

    results: list[dict[str, Any]] = []
    bytes_of = token_bytes(val.tokenizer["name"])
    if bytes_of is None:
        say("notice: no bits per byte, as the tokenizer's vocabulary is not on this machine")
    own = list(range(world.rank, n_blocks, world.size))
    add_up = ppl.text_sums(bytes_of) if s.protocol == "packed" else ppl.position_sums
    quiet = None if world.is_main else True  # None: shown on a terminal only
    bar = tqdm(total=len(lengths) * len(own), unit="block", disable=quiet)
    for length in lengths:
        factor = set_factor(model, s, length)
        rows = ppl.block_nll(targets, length, score, own, s.batch_size, add_up, device, bar.update)
        by_rank = dist.gather(rows)  # block b was scored by rank b mod world.size
        sums = np.array([by_rank[b % world.size][b // world.size] for b in range(n_blocks)])
        note = f"factor {factor['yarn_factor']:g}, temperature {factor['temperature']:.4f}"
        if s.protocol == "packed":
            results.append(ppl.packed_result(targets, length, sums, bytes_of) | factor)
            row = results[-1]
            ppl_shown = "over e^700" if row["ppl"] is None else f"{row['ppl']:10.3f}"
            say(f"  length {length:6d}  nll {row['nll']:.4f}  ppl {ppl_shown}  {note}")
        else:
            results = [row | factor for row in ppl.position_results(length, sums)]
            say(f"  one pass at {length}, {note}")
            for row in results:
                say(f"  positions [{row['from']}, {row['to']})  nll {row['nll']:.4f}")
    bar.close()
    if world.is_main:
        content = common(s, "perplexity", model, saved, dtype) | {"data": val.sha256}
        content |= {"protocol": s.protocol, "tokens": tokens, "results": results}
        write_json(path, content)
        say(f"wrote {path}")
    dist.disconnect()


def common(
    s: Common, kind: str, model: GPT, saved: dict[str, Any], dtype: torch.dtype
) -> dict[str, Any]:
    """Return the keys that every result has."""
    return {
        "kind": kind,
        "checkpoint": s.checkpoint,
        "step": saved["step"],
        "seed": saved["data"]["seed"],
        "pos_mode": model.config.pos_mode,
        "yarn_values": model.config.yarn_values,
        "block_size": model.config.block_size,
        "dtype": str(dtype).removeprefix("torch."),
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def result_path(s: Common, run: Path, name: str, model: GPT) -> Path:
    """Return --out, or a file under the run's eval folder; OSError now if it cannot be written."""
    orig = "_orig" if model.config.yarn_values == "orig" else ""
    path = Path(s.out) if s.out else run / "eval" / f"{name}_{model.config.pos_mode}{orig}.json"
    if path.is_dir():
        raise ValueError(f"--out {path}: is a folder; name a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{path.parent}: may not write there; give --out")
    return path


KINDS = {"perplexity": perplexity}


def main(argv: list[str]) -> None:
    """Run the evaluation that the first argument names."""
    if argv[:1] in ([], ["-h"], ["--help"]):
        print(f"{__doc__}\nevaluations: {', '.join(KINDS)}; each has its own --help")
    elif argv[0] in KINDS:
        with user_errors():
            KINDS[argv[0]](argv[1:])
    else:
        print(f"error: no evaluation {argv[0]!r}; there is: {', '.join(KINDS)}", file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        raise SystemExit(130) from None
