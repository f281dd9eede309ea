"""What a result holds: a row for each task and length, and means by category."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rove.evals.ruler.tasks import TASKS
from rove.evals.ruler.tracing import N_VARIABLES

Row = dict[str, Any]
CATEGORIES = tuple(dict.fromkeys(task.category for task in TASKS.values()))


def mean_of(values: Iterable[float | None]) -> float | None:
    """Return the mean of what was measured; None when nothing was."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def gain_of(row: Row) -> float | None:
    """Return how much less than the control's a sample's NLL is, in nats per token."""
    return None if row["nll_control"] is None else row["nll_control"] - row["nll"]


def guess_of(row: Row) -> float | None:
    """Return the NLL of a guesser that knows the format alone, in nats per token."""
    possible = row["log_possibilities"]
    return None if possible is None else possible / row["n_tokens"]


def summarize(task: str, length: int, rows: Sequence[Row]) -> Row:
    """Return the result of one task at one length from the rows of score_samples.

    Means over samples; gain and nll_control over those with a control (n_control). exact is a
    share, string_match a percentage. by_depth has the tenths of the longest prompt; it is None
    where no sample has a depth, by_hop where none has a hop.
    """
    assert rows, "no samples were scored"
    deep = [row for row in rows if row["depth"] is not None]
    longest = length - TASKS[task].gen  # of a prompt
    tenths = [[r for r in deep if min(9, 10 * r["depth"] // longest) == i] for i in range(10)]
    by_depth = [{"from": i / 10, "to": (i + 1) / 10} | _part(p) for i, p in enumerate(tenths)]
    hops = sorted({row["hop"] for row in rows if row["hop"] is not None})
    by_hop = [{"hop": hop} | _part([r for r in rows if r["hop"] == hop]) for hop in hops]
    return {
        "task": task,
        "length": length,
        "n": len(rows),
        "nll": mean_of(row["nll"] for row in rows),
        "nll_content": mean_of(row["nll_content"] for row in rows),
        "nll_control": mean_of(row["nll_control"] for row in rows),
        "nll_min_reference": mean_of(row["nll_min_reference"] for row in rows),
        "nll_guess": mean_of(guess_of(row) for row in rows),
        "gain": mean_of(gain_of(row) for row in rows),
        "n_control": sum(row["nll_control"] is not None for row in rows),
        "exact": mean_of(row["exact"] for row in rows),
        "string_match": mean_of(row["string_match"] for row in rows),
        "first_rank_median": statistics.median(row["first_rank"] for row in rows),
        "n_prefix_mismatch": sum(row["prefix_mismatch"] for row in rows),
        "by_depth": by_depth if deep else None,
        "by_hop": by_hop or None,
        "samples": list(rows),
    }


def by_context(task: str, rows: Sequence[Row], values: Sequence[float | None]) -> list[float]:
    """Return the values to resample: one for each context, as samples that share it are alike."""
    contexts: dict[int, list[float]] = {}
    for row, value in zip(rows, values, strict=True):
        if value is not None:
            shared = N_VARIABLES if TASKS[task].kind == "vt_hops" else 1
            contexts.setdefault(row["index"] // shared, []).append(float(value))
    return [math.fsum(own) / len(own) for own in contexts.values()]


def _part(rows: Sequence[Row]) -> Row:
    measures: dict[str, Callable[[Row], float | None]] = {
        "nll": lambda row: row["nll"],
        "gain": gain_of,
        "exact": lambda row: row["exact"],
    }
    return {"n": len(rows)} | {k: mean_of(map(f, rows)) for k, f in measures.items()}


def categories(results: Sequence[Row]) -> dict[str, dict[str, float | None]]:
    """Return the mean NLL of each category's tasks by length, None where none ran.

    Keys are lengths as text, then CWE, NIAH, QA, VT, and apart from these FWE and vt_hops.
    """
    by_length: dict[str, dict[str, float | None]] = {}
    for length in sorted({row["length"] for row in results}):
        rows = [row for row in results if row["length"] == length]
        by_length[str(length)] = {
            category: mean_of(r["nll"] for r in rows if TASKS[r["task"]].category == category)
            for category in CATEGORIES
        }
    return by_length
