"""Weights to start a training from (`train.py --train.init_from FILE`) where a study needs its own.

    python studies/start.py --file FILE --seed 1 --reversed true --model.n_layer=4 ...

`reversed` is RoVE with its sign flipped, R_(i-j) in place of R_(j-i): let P exchange the halves of
a head's channels; then P R_t P = R_t^-1, so that a head with value rows P W_V and output columns
W_O P does under RoVE what one with W_V and W_O does under the flipped sign, and as AdamW treats
each weight alike, it goes on doing so through all of training.
"""

import math
import sys
from dataclasses import dataclass, field, replace
from functools import partial as bind
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from model import GPT, GPTConfig  # noqa: E402
from rove import checkpoint as ckpt  # noqa: E402
from rove.config import load  # noqa: E402
from rove.errors import user_errors  # noqa: E402
from rove.files import write_atomic  # noqa: E402
from rove.tokenizer import load_tokenizer  # noqa: E402


@dataclass(frozen=True)
class Settings:
    file: str
    """file to write"""
    model: GPTConfig = field(default_factory=lambda: GPTConfig(vocab_size=None))
    seed: int = 1
    """seed of the weights, which are those that train.py draws with it"""
    std_by_width: bool = False
    """standard deviation 1/sqrt(n_embd) in place of GPT-2's 0.02"""
    reversed: bool = False
    """exchange the halves of every head's values, which flips the sign of RoVE"""


@torch.no_grad()
def reverse_values(model: GPT) -> None:
    """Exchange channels m and m + D / 2 of every head's values and of what reads them."""
    C, D = model.config.n_embd, model.config.head_dim
    order = torch.arange(C).view(-1, 2, D // 2).flip(1).flatten()
    for name, parameter in model.named_parameters():
        if ".attn.c_attn." in name:  # weight or bias, rows of q, k and v
            parameter[2 * C :] = parameter[2 * C :][order]
        elif name.endswith(".attn.c_proj.weight"):
            parameter.copy_(parameter[:, order])


def make(s: Settings) -> GPT:
    """Return a model with the initial weights that the settings ask for."""
    torch.manual_seed(s.seed)
    model = GPT(s.model)
    if s.std_by_width:
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.data *= 1 / math.sqrt(s.model.n_embd) / 0.02
    if s.reversed:
        reverse_values(model)
    return model


def main(argv: list[str]) -> None:
    """Write a checkpoint of step 0, for text in bytes."""
    s = load(Settings, argv, prog="studies/start.py", description="Write weights to start from.")
    with user_errors():
        tokenizer = load_tokenizer("byte")
        model = make(replace(s, model=replace(s.model, vocab_size=tokenizer.vocab_size)))
        known = ("name", "vocab_size", "sha256", "eot_id")
        state: dict[str, Any] = dict.fromkeys(ckpt.KEYS) | {"format": ckpt.FORMAT, "step": 0}
        state |= {"model": model.state_dict(), "model_config": model.config.stored()}
        state |= {"tokenizer": {key: getattr(tokenizer, key) for key in known}}
        Path(s.file).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(Path(s.file), bind(torch.save, state))


if __name__ == "__main__":
    main(sys.argv[1:])
