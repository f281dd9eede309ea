"""`eval.py compare A B`: differences B - A on the same text, items or samples, with intervals.

A and B are result files or run folders; several training seeds of an arm are joined by commas, in
the same order on both sides. Intervals (95 %) come from a paired bootstrap over units, items or
samples, and over seeds jointly where there are several. Of NLLs less is better.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from rove.evals.bootstrap import LEAST, draw_means, interval
from rove.evals.core.tasks import BY_LABEL
from rove.evals.results import make_room, read_result
from rove.evals.ruler.results import by_context, gain_of
from rove.files import write_json
from rove.runs import run_setting
from rove.words import names_in

Result = dict[str, Any]
Row = dict[str, Any]
SAME = {  # what two results of a kind must have in common
    "perplexity": ("protocol", "data", "tokens", "mask_eot", "scored", "stride", "dtype"),
    "core": ("mode", "data", "truncation", "max_length", "max_per_task", "bos_id", "dtype"),
    "ruler": ("layout", "data", "dtype"),
}
PASSED_OVER = ("perplexity_positions", "lm_eval", "structure")  # they have no paired pieces


def run(a: str, b: str, out: str | None) -> None:
    """Compare, print a line for each measure, and write all of them to `out` if that is given."""
    if out is not None:
        make_room(Path(out), ("compare",))
    sides = {"A": a, "B": b}
    arms = [[Path(name) for name in names_in(key, side)] for key, side in sides.items()]
    if len(arms[0]) != len(arms[1]):
        raise ValueError(f"A has {len(arms[0])} results, B has {len(arms[1])}: give pairs of seeds")
    comparisons, pairs = [], pair_up(*arms)
    for files_a, files_b in pairs:
        try:
            results_a, results_b = ([read_result(f) for f in files] for files in (files_a, files_b))
            rows = compare(results_a, results_b, [str(file) for file in (*files_a, *files_b)])
        except ValueError as error:
            if len(pairs) == 1:
                raise
            print(f"left out: {error}")
            continue
        content: dict[str, Any] = {"a": [str(f) for f in files_a], "b": [str(f) for f in files_b]}
        comparisons.append(content | {"rows": rows})
        print(f"{_named(files_b, results_b)} minus {_named(files_a, results_a)}")
        if len(results_a) > 1:
            few = "of few seeds the interval is too narrow; report.py has Student's t over seeds"
            print(f"  seeds {[r['seed'] for r in results_a]}, resampled too: {few}")
        for row in rows:
            print(f"  {_shown(row)}")
    if not comparisons:
        raise ValueError(f"{a} and {b}: nothing to compare is left; the reasons stand above")
    if out is not None:
        write_json(Path(out), {"kind": "compare", "comparisons": comparisons})
        print(f"wrote {out}")


def _named(files: list[Path], results: list[Result]) -> str:
    """Return files with what may differ between the sides without being refused."""
    return ", ".join(f"{f} (step {r['step']})" for f, r in zip(files, results, strict=True))


def pair_up(a: list[Path], b: list[Path]) -> list[tuple[list[Path], list[Path]]]:
    """Return the files of A and B that belong together; ValueError when there are none.

    Files are taken as they stand. In run folders, results belong together that differ in the run
    and the value path only: of one kind and protocol, with or without YaRN on both sides.
    """
    if all(path.is_file() for path in (*a, *b)):
        return [(a, b)]
    for path in (*a, *b):
        if not path.is_dir():
            mixed = "neither all files nor all run folders; give one or the other"
            raise ValueError(
                f"{path}: {mixed if path.exists() else 'does not exist; name a result or a run'}"
            )
    found = [[_by_name(folder) for folder in side] for side in (a, b)]
    names = set.intersection(*(set(files) for side in found for files in side))
    if not names:
        raise ValueError(f"{a[0]} and {b[0]}: no results of the same kind and protocol in both")
    return [tuple([files[n] for files in side] for side in found) for n in sorted(names)]  # type: ignore[misc]


def _by_name(folder: Path) -> dict[str, Path]:
    """Return a run's result files by name without the value path, that of its training."""
    trained = run_setting(folder, "model.pos_mode") or ""
    arms = [arm for arm in ("rope", "rove") if trained.startswith(arm)] or ["rope", "rove"]
    files = {}
    for path in sorted(folder.glob("eval/*.json")):
        for arm in arms:
            name = path.stem.replace(f"_{arm}", "_")
            if name != path.stem and not name.startswith(PASSED_OVER):
                files[name] = path
    return files


def compare(a: list[Result], b: list[Result], names: list[str]) -> list[Row]:
    """Return the differences of B's results from A's, one for each seed on either side.

    ValueError when they did not measure the same: data, protocol, lengths, tasks; and when several
    results of a side are not one for each seed, in the same order on both.
    """
    first = a[0]
    seeds = [[result["seed"] for result in side] for side in (a, b)]
    if len(a) > 1 and (seeds[0] != seeds[1] or len(set(seeds[0])) < len(a)):
        raise ValueError(f"seeds of A are {seeds[0]}, of B {seeds[1]}: give each seed once, paired")
    kind = first["kind"]
    if kind not in SAME or first.get("protocol") == "positions":
        raise ValueError(f"{names[0]}: of kind {kind!r}, which has no paired pieces to compare")
    for result, name in zip((*a, *b), names, strict=True):
        for key in ("kind", *SAME[kind]):
            if result.get(key) != first.get(key):
                both = f"{result.get(key)!r}, {names[0]} has {first.get(key)!r}"
                raise ValueError(f"{name}: {key} is {both}; evaluate them alike")
        if (found := _parts(result)) != (wanted := _parts(first)):
            odd = sorted(set(found) ^ set(wanted), key=str) or [found]
            raise ValueError(f"{name} and {names[0]}: not the same lengths or tasks ({odd[0]})")
    measures = {"perplexity": _perplexity, "core": _core, "ruler": _ruler}
    return list(measures[kind](a, b))


def _parts(result: Result) -> list[Any]:
    """Return what a result has a row for."""
    if result["kind"] == "core":
        return sorted(result["tasks"])
    if result["kind"] == "ruler":
        return [(row["task"], row["length"], row["n"]) for row in result["results"]]
    return [(row["length"], len(row["block_nll"])) for row in result["results"]]


def _difference(what: str, values: Any, unit: str) -> Row:
    """Return the row of a measure from differences (n_seeds, n); None where a value is missing."""
    x = np.array(values, dtype=np.float64)
    x = x[:, ~np.isnan(x).any(axis=0)]
    n = x.shape[1]
    return {
        "what": what,
        "difference": float(x.mean()) if n else None,
        "interval": interval(draw_means(x)) if n >= LEAST else None,
        "unit": unit,
        "n": n,
        "seeds": len(x),
    }


def _perplexity(a: list[Result], b: list[Result]) -> Iterable[Row]:
    def blocks(results: list[Result], number: int) -> Any:
        return np.array([result["results"][number]["block_nll"] for result in results])

    rows = a[0]["results"]
    context = [i for i, row in enumerate(rows) if row["length"] == a[0]["block_size"]]
    for number, row in enumerate(rows):
        difference = blocks(b, number) - blocks(a, number)
        factors = f"factors {row['yarn_factor']:g}, {b[0]['results'][number]['yarn_factor']:g}"
        yield _difference(f"NLL at {row['length']} ({factors})", difference, "nats/token")
        if len(context) == 1 and number != context[0]:
            base = blocks(b, context[0]) - blocks(a, context[0])
            yield _difference(f"D({row['length']})", difference - base, "nats/token")


def _core(a: list[Result], b: list[Result]) -> Iterable[Row]:
    def right(results: list[Result], label: str) -> Any:
        return np.array([[int(c) for c in r["tasks"][label]["correct"]] for r in results])

    labels = [label for label in BY_LABEL if label in a[0]["tasks"]]
    values = {label: right(b, label) - right(a, label) for label in labels}
    for label in labels:
        yield _difference(f"accuracy, {label}", values[label], "share of items")
    whole = "CORE" if len(labels) == len(BY_LABEL) else f"mean of the {len(labels)} tasks run"
    for table in ("v1", "v2"):
        scale = {
            label: 1 - 0.01 * getattr(BY_LABEL[label], f"baseline_{table}") for label in labels
        }
        draws = np.mean([draw_means(values[x], i) / scale[x] for i, x in enumerate(labels)], axis=0)
        mean = float(np.mean([values[x].mean() / scale[x] for x in labels]))
        row = _difference(f"{whole}, centered {table}", [[mean]], "centered accuracy")
        yield row | {"interval": interval(draws), "n": sum(values[x].shape[1] for x in labels),
                     "seeds": len(a)}  # fmt: skip


def _ruler(a: list[Result], b: list[Result]) -> Iterable[Row]:
    measures: dict[str, tuple[Callable[[Row], Any], str]] = {
        "NLL": (lambda row: row["nll"], "nats/token"),
        "gain": (gain_of, "nats/token"),
        "exact match": (lambda row: float(row["exact"]), "share of samples"),
        "string match": (lambda row: row["string_match"], "percent"),
    }
    for number, row in enumerate(a[0]["results"]):
        factors = f"factors {row['yarn_factor']:g}, {b[0]['results'][number]['yarn_factor']:g}"
        for name, (measure, unit) in measures.items():
            both = [_by_context(x, y, number, measure) for x, y in zip(a, b, strict=True)]
            what = f"{name}, {row['task']} at {row['length']} ({factors})"
            found = _difference(what, both, unit)
            if found["n"]:
                yield found


def _by_context(
    a: Result, b: Result, number: int, measure: Callable[[Row], Any]
) -> list[float | None]:
    """Return B - A by context of one task, where both sides have a value."""
    row, samples = a["results"][number], [r["results"][number]["samples"] for r in (a, b)]
    pairs = [(measure(x), measure(y)) for x, y in zip(*samples, strict=True)]
    differences = [None if None in pair else pair[1] - pair[0] for pair in pairs]
    return [*by_context(row["task"], samples[0], differences)]


def _shown(row: Row) -> str:
    within = row["interval"]
    shown = "no interval, too few" if within is None else f"[{within[0]:+.4f}, {within[1]:+.4f}]"
    seeds = "" if row["seeds"] == 1 else f", {row['seeds']} seeds"
    return (
        f"{row['what']:48s} {row['difference']:+.4f} {shown} {row['unit']}, n = {row['n']}{seeds}"
    )
