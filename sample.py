"""Write text with a trained model.

python sample.py --checkpoint out/demo-rove --prompt "def main(" --max_new_tokens 200
python sample.py --checkpoint out/124m-rove --prompt FILE:story.txt --num_samples 3
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from model import GPT, PosMode
from rove import device as dev
from rove.checkpoint import load_checkpoint
from rove.config import load
from rove.errors import user_errors
from rove.tokenizer import load_tokenizer

MOST_TOKENS = 1_000_000  # to write; their ids are kept in memory
COLDEST = 1e-4  # greedy but for ties; logits divided by far smaller ones are no numbers


@dataclass(frozen=True)
class Settings:
    checkpoint: str
    """run folder (its latest checkpoint), checkpoint file, export or GPT-2 folder, hub:NAME"""
    prompt: str = ""
    """text to continue, or FILE:path to read it; it opens a document"""
    max_new_tokens: int = 200
    """tokens to write; a sample ends earlier at end-of-text"""
    num_samples: int = 1
    """how many samples"""
    temperature: float = 0.8
    """0 is greedy, 1 the model's own distribution"""
    top_k: int | None = 200
    """draw from the k most likely ids; 0 or null: from all"""
    top_p: float | None = None
    """draw from the fewest ids that hold this much probability; null: from all"""
    seed: int = 1337
    """seed of the draws"""
    pos_mode: PosMode | None = None
    """position mode; null: as trained, and +yarn may be added"""
    yarn_factor: float | None = None
    """YaRN factor of the +yarn modes; null: max(1, tokens / block_size)"""
    yarn_values: Literal["yarn", "orig"] = "yarn"
    """frequencies of the values under rove+yarn: YaRN's or the original ones"""
    allow_retrofit: bool = False
    """allow a value path that the weights were not trained with; known to hurt"""
    device: dev.DeviceName = "auto"
    """where to run; auto: cuda, else mps, else cpu"""
    dtype: dev.DtypeName = "float32"
    """of matrix products"""

    def __post_init__(self) -> None:
        t, factor = self.temperature, self.yarn_factor
        for key, holds, expected in (
            ("num_samples", self.num_samples >= 1, "at least 1"),
            ("max_new_tokens", 0 <= self.max_new_tokens <= MOST_TOKENS, f"0 to {MOST_TOKENS}"),
            ("temperature", t == 0 or COLDEST <= t < math.inf, f"0 (greedy) or from {COLDEST:g}"),
            ("yarn_factor", factor is None or 1 <= factor < math.inf, "at least 1"),
            ("seed", 0 <= self.seed < 2**63, "at least 0, below 2^63"),
        ):
            if not holds:
                raise ValueError(f"{key}={getattr(self, key)}: must be {expected}")


def main(argv: list[str]) -> None:
    """Print samples as the command line says."""
    s = load(Settings, argv, prog="sample.py", description="Write text with a trained model.")
    with user_errors():
        text = s.prompt
        if text.startswith("FILE:"):
            path = Path(text.removeprefix("FILE:"))
            try:
                text = path.read_text(encoding="utf-8")
            except OSError as error:
                raise ValueError(f"--prompt {text}: {error.strerror}; name a file") from None
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: not UTF-8 at byte {error.start}; convert it") from None
        device = dev.resolve_device(s.device)
        saved = load_checkpoint(s.checkpoint)
        model = GPT.from_checkpoint(saved, s.pos_mode, s.allow_retrofit, yarn_values=s.yarn_values)
        if not all(p.isfinite().all() for p in model.parameters()):
            raise ValueError(f"{s.checkpoint}: some weights are not finite; take an earlier one")
        dtype = dev.resolve_dtype(s.dtype, device, model.config.n_embd)
        tokenizer = load_tokenizer(saved["tokenizer"]["name"])
        if tokenizer.vocab_size != model.config.vocab_size:
            sizes = f"{tokenizer.vocab_size} ids of {tokenizer.name}, {model.config.vocab_size}"
            raise ValueError(f"{s.checkpoint}: tokenizer and model differ: {sizes} of the model")
        eot = tokenizer.eot_id
        prompt = torch.tensor([[eot, *tokenizer.encode(text).tolist()]], device=device)
        context = model.config.block_size
        length = prompt.shape[1] + s.max_new_tokens
        if model.config.pos_mode.endswith("+yarn"):
            by_length = max(1.0, length / context)
            model.set_yarn_factor(by_length if s.yarn_factor is None else s.yarn_factor)
            config = model.config
            note = f"factor {config.factor:g}, temperature {config.mscale:.4f}"
            print(f"{config.pos_mode}: trained at {context}, for {length} tokens; {note}")
        elif s.yarn_factor is not None:
            print(f"warning: yarn_factor={s.yarn_factor} has no effect in {model.config.pos_mode}")
        model = model.to(device)
        for number in range(s.num_samples):
            with dev.autocast(device, dtype):
                ids = model.generate(
                    prompt,
                    s.max_new_tokens,
                    s.temperature,
                    s.top_k,
                    s.top_p,
                    stop_ids=[eot],
                    seed=s.seed + number,
                )
            shown = ids[0, 1:].tolist()
            shown = shown[:-1] if shown and shown[-1] == eot else shown
            print(f"--- sample {number + 1} of {s.num_samples}, {ids.shape[1] - 1} tokens")
            print(tokenizer.decode(shown), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
