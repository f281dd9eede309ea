"""Export a checkpoint as a Hugging Face folder, which transformers loads without this project.

    python export_hf.py --checkpoint out/124m-rove --out_dir out/124m-rove-hf
    python export_hf.py --checkpoint RUN/checkpoints/step_00018795.pt --out_dir DIR --dtype bfloat16

Then, anywhere: AutoModelForCausalLM.from_pretrained("DIR", trust_remote_code=True). The folder
holds weights, config, the model's code, a model card and, for gpt2, the tokenizer. It is also a
checkpoint for sample.py and eval.py. transformers is not needed here.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from model import GPT
from rove.checkpoint import load_checkpoint
from rove.config import load
from rove.errors import user_errors
from rove.export.card import card_files, read_results
from rove.export.folder import WEIGHTS, check_out, export_config, tokenizer_files, write_folder
from rove.files import check_folder, sha256_of
from rove.runs import run_of
from rove.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Settings:
    checkpoint: str
    """run folder (its latest checkpoint), checkpoint file, or another export"""
    out_dir: str
    """folder to write; it must not exist, or be empty"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the stored weights"""


def find_tokenizer(trained: dict[str, Any], length: int) -> dict[str, bytes]:
    """Return the tokenizer's files, none for bytes; where there can be none, say so in a line."""
    if trained["name"] == "byte":
        return {}
    try:
        tokenizer = load_tokenizer(trained["name"])
        if tokenizer.sha256 != (trained["sha256"] or tokenizer.sha256):
            raise ValueError("the vocabulary on this machine is not the one of the training data")
        return tokenizer_files(tokenizer, length)
    except ValueError as error:
        print(f"notice: tokenizer files are left out: {error}")
        return {}


def main(argv: list[str]) -> None:
    """Export as the command line says."""
    what = "Export a checkpoint as a Hugging Face folder."
    s = load(Settings, argv, prog="export_hf.py", description=what)
    with user_errors():
        out, run = Path(os.path.abspath(s.out_dir)), run_of(s.checkpoint)
        check_folder("--out_dir", out)
        check_out(out)
        saved = load_checkpoint(s.checkpoint, mmap=True)
        model = GPT.from_checkpoint(saved)  # a checkpoint that is none is refused here
        training = {key: saved[key] for key in ("step", "tokens", "data", "tokenizer")}
        training["seed"] = saved["data"]["seed"]
        config = export_config(model.config.stored(), training, s.dtype)
        results, notices = read_results(run, saved["step"], sha256_of(Path(saved["file"])))
        for line in notices:
            print(f"notice: {line}")
        files = find_tokenizer(saved["tokenizer"], model.config.block_size)
        files |= card_files(out.name, run, config, results, has_tokenizer=bool(files))
        n_params = write_folder(out, config, model.state_dict(), files)
        size = (out / WEIGHTS).stat().st_size / 1e6
        what = f"{model.config.pos_mode}, step {saved['step']:,}, {len(results)} evaluations"
        print(f"wrote {s.out_dir}: {what}, {n_params:,} parameters in {s.dtype}, {size:,.1f} MB")
        call = f"from_pretrained({s.out_dir!r}, trust_remote_code=True)"
        print(f"next: AutoModelForCausalLM.{call}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
