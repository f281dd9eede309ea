"""Time generation: one sequence behind a prompt, greedy, KV cache, against nanoGPT's generate.

    python bench/generate.py --peer ../nanoGPT --out generate.json

Weights are random; the time of a token does not depend on them. The prompt's own pass is part of
the time, as it is for a user. The peer runs in fp32, as its sample.py does on a CPU, and under
autocast in our precision, as it does on a GPU.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import timing  # noqa: E402

from model import GPT, GPTConfig  # noqa: E402
from rove import device as dev  # noqa: E402
from rove.config import load  # noqa: E402
from rove.errors import user_errors  # noqa: E402
from rove.files import write_json  # noqa: E402

BLOCK_SIZE = 1024
PLAIN, CAST = "nanoGPT, fp32", "nanoGPT, cast"


@dataclass(frozen=True)
class Settings:
    n_layer: int = 12
    """transformer blocks"""
    n_head: int = 12
    """attention heads"""
    n_embd: int = 768
    """width"""
    prompt_tokens: int = 512
    """tokens of the prompt"""
    new_tokens: int = 64
    """tokens to generate"""
    dtype: dev.DtypeName = "auto"
    """of matrix products on our sides"""
    peer: str | None = None
    """checkout of nanoGPT"""
    repeats: int = 3
    """timed generations of each side"""
    out: str | None = None
    """JSON file of the result"""


def make_generate(s: Settings, side: str) -> Callable[[], object]:
    """Return a call that generates new_tokens on one side: rope, rove or nanoGPT."""
    torch.manual_seed(0)
    device = dev.resolve_device("auto")
    dtype = dev.resolve_dtype(s.dtype, device, s.n_embd)
    prompt = torch.randint(50257, (1, s.prompt_tokens), device=device)
    sizes = {"n_layer": s.n_layer, "n_head": s.n_head, "n_embd": s.n_embd, "block_size": BLOCK_SIZE}
    if side in (PLAIN, CAST):
        peer = timing.peer_gpt(str(s.peer), **sizes).to(device).eval()

        def generate_theirs() -> None:
            with dev.autocast(device, dtype) if side == CAST else nullcontext():
                peer.generate(prompt, s.new_tokens, top_k=1)

        return generate_theirs
    model = GPT(GPTConfig(pos_mode=side, **sizes)).to(device).eval()  # type: ignore[arg-type]

    def generate() -> None:
        with dev.autocast(device, dtype):
            model.generate(prompt, s.new_tokens, temperature=0.0)

    return generate


def main(argv: list[str]) -> None:
    """Print the time of a generated token on each side."""
    s = load(Settings, argv, prog="bench/generate.py", description=__doc__)
    with user_errors():
        timing.check_settings(s)
        if s.prompt_tokens + s.new_tokens > BLOCK_SIZE:
            raise ValueError(f"--prompt_tokens and --new_tokens: more than {BLOCK_SIZE} in all")
        device = dev.resolve_device("auto")
        dtype = dev.resolve_dtype(s.dtype, device, s.n_embd)
        names = ["rope", "rove"]
        if s.peer is not None:
            timing.peer_module(s.peer, "model.py")
            names += [PLAIN, CAST] if device.type == "cpu" else [CAST]
        sides: dict[str, Any] = {name: partial(make_generate, s, name) for name in names}
        times = timing.alternate(sides, s.repeats, device=device.type)
    base = next(name for name in (PLAIN, CAST, "rope") if name in times)
    result = timing.summary(times, base, dtype=str(dtype), **timing.described(s, device))
    print(f"{s.new_tokens} tokens behind {s.prompt_tokens}, {dtype}")
    timing.show(result, base)
    if PLAIN in times:
        others = {name: own for name, own in times.items() if name != PLAIN}
        timing.show(timing.summary(others, CAST), CAST)
    for name in times:
        result[name]["token_s"] = result[name]["median_s"] / s.new_tokens
        print(f"  {name:28s} {result[name]['token_s'] * 1e3:10.1f} ms a token")
    if s.out is not None:
        write_json(Path(s.out), result)
        print(f"wrote {s.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
