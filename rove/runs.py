"""Run folders: config.yaml, metrics.jsonl, .lock, checkpoints/ and eval/, with one writer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from rove.checkpoint import (
    STEP_FILE,
    latest_path,
    load_checkpoint,
    newest_entry,
    step_files,
    step_of,
    vouched_entries,
)
from rove.config import flatten, load, to_dict
from rove.gpt2 import HUB

OWN_TEMPORARIES = {
    f"{name}.tmp" for name in ("config.yaml", "metrics.jsonl", "latest.json", "best.json")
}
UNSAID = ("train.resume", "out_dir", "dry_run")


def tidy_run(run: Path) -> None:
    """Remove what a killed writer left behind.

    That is temporary files, and checkpoints newer than the newest that latest.json vouches for.
    """
    folder = run / "checkpoints"
    for path in [*run.glob("*.tmp"), *folder.glob("*.tmp")]:
        if path.name in OWN_TEMPORARIES or STEP_FILE.fullmatch(path.stem):
            path.unlink()
    newest, vouched = newest_entry(folder), {e["file"] for e in vouched_entries(folder)}
    for path in step_files(folder):
        if newest and step_of(path) > newest["step"] and path.name not in vouched:
            path.unlink()


def find_run(
    run: Path, config: Any, resume: bool, fixed: tuple[str, ...], say: Callable[[str], None]
) -> Path | None:
    """Return the checkpoint to go on from, or None for a run that starts (or never saved).

    The folder is tidied, unless this is a dry run. Raises ValueError when it holds a run and
    `resume` is false, or when a setting whose dotted key begins with one of `fixed` differs from
    the run's; other differences are told.
    """
    own = ("config.yaml", "metrics.jsonl", "checkpoints")
    holds_run = any((run / name).exists() for name in own)
    if holds_run and not resume:
        ways = "--train.resume auto continues it, another --out_dir starts a new one"
        raise ValueError(f"{run} holds a run: {ways}")
    if (run / "config.yaml").exists():
        saved = flatten(to_dict(load(type(config), ["--config", str(run / "config.yaml")])))
        for key, value in flatten(to_dict(config)).items():
            if value != saved[key] and key.startswith(fixed):
                raise ValueError(f"{key}={value}: the run in {run} has {saved[key]}; keep that")
            if value != saved[key] and key not in UNSAID:
                say(f"resume: {key} was {saved[key]}, is now {value}")
    if not config.dry_run:
        tidy_run(run)
    found = latest_path(run) if holds_run else None
    if holds_run and found is None:
        say(f"resume: {run} has no checkpoint yet; it starts from the beginning")
    return found


def start_from(path: str, model: Any, tokenizer: dict[str, Any]) -> None:
    """Put the weights of a run, checkpoint, export or GPT-2 folder into a new model.

    Raises ValueError, naming all differences, when vocabulary, shape or value path are others. The
    training context (block_size) may be another one, except where positions are learned.
    """
    saved, config = load_checkpoint(path, mmap=True), model.config.stored()
    keys = {"n_layer", "n_head", "n_embd", "vocab_size", "bias", "rope_theta", "rotary_pairing"}
    keys |= {"block_size"} if config["pos_mode"] == "learned" else set()
    there = {key: saved["model_config"].get(key) for key in sorted(keys)}
    there["pos_mode"] = str(saved["model_config"].get("pos_mode")).removesuffix("+yarn")
    asked = config | {"pos_mode": config["pos_mode"].removesuffix("+yarn")}
    found = [f"model.{k}={asked[k]}: it has {v}" for k, v in there.items() if v != asked[k]]
    for key in ("name", "vocab_size", "sha256"):
        own, data = saved["tokenizer"][key], tokenizer[key]
        if None not in (own, data) and own != data:
            found.append(f"tokenizer {key} of the data {data}: it has {own}")
    if found:
        raise ValueError(f"train.init_from={path}: does not fit: {'; '.join(found)}")
    model.load_state_dict(saved["model"])


def split_names(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the names of runs or files that stand on it, and its flags."""
    names: list[str] = []
    flags: list[str] = []
    for arg, before in zip(argv, ["", *argv], strict=False):
        is_value = before.startswith("--") and "=" not in before and before != "--print_config"
        (flags if arg.startswith("-") or is_value else names).append(arg)
    return names, flags


def run_of(checkpoint: str | Path) -> Path:
    """Return the run folder of a checkpoint argument, or the folder that a lone file lies in.

    hub:OWNER/NAME has out/OWNER_NAME.
    """
    if str(checkpoint).startswith(HUB):
        return Path("out") / str(checkpoint).removeprefix(HUB).replace("/", "_")
    path = Path(checkpoint)
    if path.is_dir():
        return path
    return path.parent.parent if path.parent.name == "checkpoints" else path.parent


def read_run_config(run: Path) -> dict[str, Any]:
    """Return config.yaml of a run folder as a plain dict; empty when there is none to read."""
    try:
        return dict(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, yaml.YAMLError):
        return {}


def run_setting(run: Path, key: str) -> str | None:
    """Return a text of a run's config.yaml by its dotted key; None where it has none."""
    value = flatten(read_run_config(run)).get(key)
    return value if isinstance(value, str) else None
