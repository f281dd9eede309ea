"""What was trained, and how its loss went."""

from collections.abc import Sequence
from functools import partial
from statistics import fmean, median

from rove.config import flatten
from rove.report.plots import Frame, Series, curves, look_of_run
from rove.report.read import Run, is_number
from rove.report.tables import Section, number, table

MOST_COLUMNS = 8
VAL_SETTINGS = ("data.dir", "train.eval_tokens", "model.block_size", "model.vocab_size")
HEAD = ("run", "mode", "layers/heads/width", "context", "seed", "steps", "tokens")
LOSSES = ("train loss, last", "val loss, best", "val loss, last")


def runs_section(runs: Sequence[Run]) -> Section:
    """Return the section that names every run."""
    rows = []
    for run in runs:
        done = f"{run.step:,}"
        if run.step < run.max_steps:
            done = f"unfinished: {run.step:,} of {run.max_steps:,}"
        tokens = run.rows[-1].get("tokens") if run.rows else None
        train, val = run.series("train/loss"), run.series("val/loss")
        mode, context = str(run.config["model"]["pos_mode"]), f"{run.block_size:,}"
        cells = [run.name, mode, run.shape, context, str(run.seed), done]
        cells.append(f"{tokens:,}" if is_number(tokens) else "")
        cells.append(_loss(train[-1] if train else None))
        cells.append(_loss(min(val, key=lambda point: point[2]) if val else None))
        cells.append(_loss(val[-1] if val else None))
        rows.append(cells)
    text = "Losses in nats/token; behind a validation loss stands its step.\n\n"
    return Section("Runs", text + table([*HEAD, *LOSSES], rows))


def _loss(point: tuple[int, float, float] | None) -> str:
    return "" if point is None else f"{point[2]:.4f} @{point[0]:,}"


def training_section(runs: Sequence[Run]) -> Section | None:
    """Return loss curves and a table of validation losses; None when no run has a step."""
    if not any(run.rows for run in runs):
        return None
    lines = []
    for run in runs:
        train, look, window = run.series("train/loss"), look_of_run(run), smoothing_of(run)
        smooth = running_mean([loss for _, _, loss in train], window)
        thin = look | {"marker": "", "linewidth": 0.8, "alpha": 0.6}
        x = [tokens for _, tokens, _ in train]
        lines.append(Series(f"{run.short} train", thin, x, smooth))
        val = run.series("val/loss")
        x, y = [tokens for _, tokens, _ in val], [loss for _, _, loss in val]
        every = look | {"markevery": max(1, len(val) // 20)}
        lines.append(Series(f"{run.short} val", every, x, y))
    frame = Frame("Training and validation loss", "tokens", "loss, nats/token")
    plot = partial(curves, lines, frame)
    windows = sorted({smoothing_of(run) for run in runs})
    steps = " to ".join(f"{n:,}" for n in dict.fromkeys((windows[0], windows[-1])))
    text = (
        f"In the plot, training loss is the mean of the last {steps} steps (a hundredth of the "
        "run), validation loss as measured. In the table, validation loss in nats/token after so "
        "many tokens.\n\n"
    )
    if len({_val_settings(run) for run in runs}) > 1:
        keys = ", ".join(f"`{key}`" for key in VAL_SETTINGS)
        text += f"The runs differ in one of {keys}: their losses are not on the same targets.\n\n"
    return Section("Training", text + _val_table(runs), {"loss.png": plot})


def smoothing_of(run: Run) -> int:
    """Return over how many steps the training loss is averaged."""
    return max(1, len(run.rows) // 100)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return at each place the mean of the last `window` values, fewer at the beginning."""
    return [fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def _val_settings(run: Run) -> tuple[object, ...]:
    config = flatten(run.config)
    return tuple(config.get(key) for key in VAL_SETTINGS)


def _val_table(runs: Sequence[Run]) -> str:
    """Return validation loss by tokens (some of them, if they are many), and speed."""
    losses = [{tokens: loss for _, tokens, loss in run.series("val/loss")} for run in runs]
    evaluated = sorted({tokens for of_run in losses for tokens in of_run})
    stride = -(-len(evaluated) // MOST_COLUMNS) or 1
    shown = evaluated[::-1][::stride][::-1]
    head = ["run", *(f"{tokens:,.0f}" for tokens in shown)]
    rows = []
    for run, of_run in zip(runs, losses, strict=True):
        speed = [value for _, _, value in run.series("perf/tok_per_s")]
        mfu = [value for _, _, value in run.series("perf/mfu")]
        cells = [run.name, *(number(of_run.get(tokens)) for tokens in shown)]
        cells.append(f"{median(speed):,.0f}" if speed else "")
        rows.append([*cells, number(median(mfu) if mfu else None, 3)])
    return table([*head, "tokens/s, median", "MFU, median"], rows)
