"""Evaluate a checkpoint: results as JSON under RUN/eval and as a printed table.

    python eval.py perplexity --checkpoint out/demo-rove --pos_mode rove,rove+yarn --lengths 64,128
    python eval.py core --checkpoint out/124m-rove --bundle eval_bundle
    python eval.py ruler --checkpoint out/124m-rove --pos_mode rove+yarn --tasks niah_single_1,vt
    python eval.py lm_eval --checkpoint out/124m-rove --tasks hellaswag,piqa
    python eval.py structure --checkpoint out/124m-rove --layer 3 --head 5
    python eval.py compare out/124m-rope out/124m-rove
    torchrun --standalone --nproc_per_node=8 eval.py core --checkpoint out/124m-rove --bundle DIR

Several processes share the work and give the numbers that one would give. A killed evaluation goes
on, by the same command, after the last length or task that it had finished.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from model import GPT
from rove import device as dev
from rove import distributed as dist
from rove.config import load
from rove.errors import user_errors
from rove.evals import compare as comparing
from rove.evals.core import run as core
from rove.evals.core.prompts import Truncation
from rove.evals.lm_eval import run as lm_eval
from rove.evals.perplexity import run as perplexity
from rove.evals.perplexity.protocols import Protocol
from rove.evals.ruler import Layout
from rove.evals.ruler import run as ruler
from rove.evals.session import Session, parse_factors
from rove.evals.structure import run as structure
from rove.runs import split_names


@dataclass(frozen=True)
class Common:
    checkpoint: str
    """run folder (its latest checkpoint), checkpoint file, export or GPT-2 folder, hub:NAME"""
    pos_mode: str | None = None
    """position mode; null: as trained, and +yarn may be added; perplexity takes several: a,b"""
    yarn_factor: float | str | None = None
    """YaRN factor of the +yarn modes; null: max(1, length / block_size); perplexity: also 2,4,8"""
    yarn_values: str = "yarn"
    """frequencies of the values under rove+yarn: yarn, or orig for the original ones"""
    allow_retrofit: bool = False
    """allow a value path that the weights were not trained with; known to hurt"""
    device: dev.DeviceName = "auto"
    """where to evaluate; auto: cuda, else mps, else cpu"""
    dtype: dev.DtypeName = "float32"
    """of matrix products"""
    batch_size: int = 1
    """windows of the largest length, items or samples in a forward pass; changes no result"""
    out: str | None = None
    """result file; null: RUN/eval/KIND_PROTOCOL_POSMODE.json"""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size}: must be at least 1")
        for values in self.yarn_values.split(","):
            if values.strip() not in ("yarn", "orig"):
                raise ValueError(f"yarn_values={self.yarn_values!r}: must be yarn, orig or both")
        parse_factors(self.yarn_factor)


@dataclass(frozen=True)
class Perplexity(Common):
    data: str | None = None
    """folder of token shards, of which `val` is read; null: the run's"""
    protocol: Protocol = "packed"
    """packed: tiled windows; tail: the last targets of each; sliding: long documents by strides;
    positions: one pass at the largest length, by position"""
    lengths: str | None = None
    """window lengths such as 64,128; null: block_size / 2 to 16 block_size, doubling"""
    max_tokens: int | None = None
    """targets to score at most; null: 10,485,760, on a CPU 131,072 or 20 units if that is more"""
    mask_eot: bool = False
    """leave targets that are end-of-text out"""


@dataclass(frozen=True)
class Core(Common):
    bundle: str | None = None
    """folder that holds eval_data/ (and core.yaml, eval_meta_data.csv where there are)"""
    download: str | None = None
    """URL of the bundle's zip, unpacked into --bundle (data/core_bundle); needs --sha256"""
    sha256: str | None = None
    """hash of that zip"""
    tasks: str | None = None
    """labels such as copa,piqa; null: all whose data is there"""
    max_per_task: int | None = None
    """items of a task at most; shots are then drawn from these, which is another evaluation"""
    truncation: Truncation = "crop"
    """of prompts over max_length: crop their start, drop_shots, or extrapolate (no maximum)"""
    max_length: int | None = None
    """most tokens of a prompt; null: block_size"""


@dataclass(frozen=True)
class Ruler(Common):
    tasks: str | None = None
    """tasks such as niah_single_1,vt; null: all that can be made"""
    lengths: str | None = None
    """prompt and answer in tokens; null: 4096,8192"""
    num_samples: int = 500
    """samples of each task and length"""
    samples: str | None = None
    """jsonl file of samples, ours or NVIDIA/RULER's, instead of making them"""
    save_samples: str | None = None
    """folder for the samples that were made, TASK_LENGTH.jsonl"""
    seed: int = 42
    """of the samples"""
    layout: Layout = "stratified"
    """depths of the gold: stratified, or fixed as in RULER"""
    essay: str | None = None
    """UTF-8 text for the essay haystacks"""
    squad: str | None = None
    """SQuAD 2.0 JSON for qa_1"""
    hotpot: str | None = None
    """HotpotQA JSON (distractor setting) for qa_2"""
    generate: bool = False
    """also generate answers, for RULER's string match; slow"""


@dataclass(frozen=True)
class LmEval(Common):
    tasks: str | None = None
    """tasks, groups or tags of the harness, or patterns: hellaswag,mmlu,arc_*"""
    include_path: str | None = None
    """folder of YAML files with tasks of your own; what they name as code is run"""
    limit: int | float | None = None
    """items of a task at most, below 1 a share of them; for trying things"""
    num_fewshot: int | None = None
    """shots, except where a task has fixed 0; null: as the task says"""
    max_length: int | None = None
    """most tokens of a prompt with its continuation; null: block_size"""
    seed: int = 1234
    """of the shots, and of texts that a task wants drawn; 1234 is the harness's own"""


@dataclass(frozen=True)
class Structure(Common):
    data: str | None = None
    """folder of token shards, of which `val` is read; null: the run's"""
    layer: int = 0
    """layer of the explicit mixer, from 0"""
    head: int = 0
    """its head, from 0; figures by offset are of all layers and heads"""
    length: int = 32
    """tokens, the first of `val`; the explicit mixer grows with their square"""


@dataclass(frozen=True)
class Compare:
    out: str | None = None
    """result file; null: only print"""


KINDS: dict[str, tuple[Any, Callable[[Session], None], str]] = {
    "perplexity": (Perplexity, perplexity.run, "Perplexity by context length."),
    "core": (Core, core.run, "CORE: 22 few-shot tasks, centred on chance."),
    "ruler": (Ruler, ruler.run, "RULER's tasks, scored by the NLL of the answer."),
    "lm_eval": (LmEval, lm_eval.run, "Tasks of lm-evaluation-harness."),
    "structure": (Structure, structure.run, "What the mixer of an attention head is, by offset."),
}


def evaluate(kind: str, argv: list[str]) -> None:
    """Run one evaluation of a checkpoint."""
    settings, run, what = KINDS[kind]
    session = Session(
        load(settings, argv, prog=f"eval.py {kind}", description=what), GPT.from_checkpoint
    )
    run(session)
    dist.disconnect()


def compare(argv: list[str]) -> None:
    """Run `eval.py compare A B`."""
    names, flags = split_names(argv)
    what = "compare A B: results (files or run folders; several seeds: A1,A2 B1,B2), paired"
    settings = load(Compare, flags, prog="eval.py compare", description=what)
    if len(names) != 2:
        raise ValueError(f"compare takes A and B, got {len(names)} names: {' '.join(names)}")
    comparing.run(names[0], names[1], settings.out)


def main(argv: list[str]) -> None:
    """Run the evaluation that the first argument names."""
    known = [*KINDS, "compare"]
    if argv[:1] in ([], ["-h"], ["--help"]):
        print(f"{__doc__}\nevaluations: {', '.join(known)}; each has its own --help")
    elif argv[0] in known:
        with user_errors():
            compare(argv[1:]) if argv[0] == "compare" else evaluate(argv[0], argv[1:])
    else:
        print(f"error: no evaluation {argv[0]!r}; there is: {', '.join(known)}", file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
