"""wandb runs of training and of reports: what they are called, and what their curves stand on."""

import os
import subprocess
from pathlib import Path
from typing import Any, Literal

Mode = Literal["disabled", "offline", "online"]
ROOT = Path(__file__).resolve().parent.parent
GIT_S = 10.0  # longest wait for git
X_AXES = {
    **dict.fromkeys(("train/loss", "val/loss"), "tokens"),
    **dict.fromkeys(("lr", "grad_norm", "perf/*"), "step"),
}


def git_commit(root: Path = ROOT) -> str | None:
    """Return the commit of a checkout, with "-dirty" behind it when tracked files differ.

    None when root itself is no checkout or has no commit, and when git is missing or takes longer
    than GIT_S seconds.
    """
    there = [f"--git-dir={root / '.git'}", f"--work-tree={root}"]
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]  # no tag's name
    try:
        found = subprocess.run(
            ["git", "--no-optional-locks", *there, *describe],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=GIT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


def start_run(
    folder: Path,
    mode: Mode,
    project: str,
    name: str | None,
    run_id: str | None,
    config: dict[str, Any],
) -> Any:
    """Start a wandb run whose files lie in folder/wandb, or with run_id go on with that one.

    config: all settings of the training, and what else is to stand beside them. Raises whatever
    wandb raises. Rows go to the run by `log(row)`, without its argument `step`, and with keys
    "step" and "tokens", which are the x axes. wandb's own count only ever rises: a run that went
    back to a checkpoint would log steps that wandb has already, and it would drop each of them
    with a warning; and `wandb sync` renumbers the rows of an offline run's second part. A step
    that was done twice is there twice, at the same x.
    """
    # wandb reports its timings and errors home, which would be a request even when offline
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    model = config["model"]
    value_path = str(model["pos_mode"]).removesuffix("+yarn")
    size = "/".join(str(model[key]) for key in ("n_layer", "n_head", "n_embd"))
    made = wandb.init(
        mode=mode,
        dir=str(folder),
        project=project,
        name=name,
        id=run_id,
        resume="allow",
        config=config,
        group=f"{value_path} {size}",  # an arm: its runs differ in their seeds
        tags=[value_path, size],
        settings={"console": "off"},  # captured, the progress bar would be a line for each step
    )
    for metric, x_axis in X_AXES.items():  # a resumed run forgets them
        made.define_metric(metric, step_metric=x_axis)
    return made
