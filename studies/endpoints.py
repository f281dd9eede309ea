"""The study's endpoints, as docs/STUDY.md fixes them, from the entries of finished runs."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from studies.analysis import Effect, Floats, both, effect

Entry = dict[str, Any]
PAIRS = {"rove": ("rove", "rope"), "null": ("null", "rove")}  # what is compared with what
LONG = (2, 4, 8)  # lengths of P2, in training contexts
LONGEST = (4, 8)  # of P3


def paired(entries: Sequence[Entry], arms: Sequence[str], variant: str = "") -> list[list[Entry]]:
    """Return for each arm its entries in the order of the seeds, those that all arms have.

    ValueError when runs of an arm differ in their settings, or arms of a seed in their text.
    """
    own = [e for e in entries if e["variant"] == variant]
    found = {arm: {e["seed"]: e for e in own if e["arm"] == arm} for arm in arms}
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in found.values())))
    for arm, by_seed in found.items():
        if len({by_seed[seed]["config_sha256"] for seed in seeds}) > 1:
            raise ValueError(f"{arm} {variant}: its runs differ in their settings")
    for seed in seeds:
        if len({by_seed[seed]["data_sha256"] for by_seed in found.values()}) > 1:
            raise ValueError(f"seed {seed} {variant}: its arms differ in their text")
    return [[by_seed[seed] for seed in seeds] for by_seed in found.values()]


def cell_of(entry: Entry, times: int, yarn: bool = False, **wanted: Any) -> dict[str, Any]:
    """Return the measurement at `times` the training context, which is the shortest measured.

    With YaRN at its usual factor, values at YaRN's frequencies, unless `wanted` has others.
    """
    context = min(cell["length"] for cell in entry["cells"])
    wanted = {"yarn_values": "yarn", "yarn_factor": times if yarn else 1, **wanted}
    for cell in entry["cells"]:
        same = all(cell.get(key, x) == x for key, x in wanted.items())
        if same and cell["length"] == times * context and ("+yarn" in cell["mode"]) == yarn:
            return cell
    raise ValueError(f"{entry['arm']}-{entry['seed']}: nothing at {times} x, {wanted}")


def losses(entries: Sequence[Entry], times: int, yarn: bool = False, **wanted: Any) -> Floats:
    """Return losses by block of text, (n_seeds, n_blocks) nats."""
    cells = [cell_of(e, times, yarn, **wanted) for e in entries]
    return np.array([cell.get("block_nll", [cell["nll"]]) for cell in cells])


def mean(parts: Sequence[Floats]) -> Floats:
    """Return the mean of matrices of one shape."""
    return np.mean(np.stack(parts), axis=0)


def degradation(entries: Sequence[Entry], times: int, yarn: bool = False) -> Floats:
    """Return D = NLL at a length - NLL at the training context, by seed and block."""
    return losses(entries, times, yarn) - losses(entries, 1)


def language_endpoints(a: Sequence[Entry], b: Sequence[Entry]) -> dict[str, Effect]:
    """Return the effects of arm a over arm b on a language model: a - b in nats, less is better."""

    def gain(times: int, yarn: bool = False) -> Floats:
        return losses(a, times, yarn) - losses(b, times, yarn)

    of_yarn = {times: losses(a, times, True) - losses(a, times) for times in LONGEST}
    return {
        "P1": effect(gain(1)),
        "P2": effect(mean([degradation(a, n) - degradation(b, n) for n in LONG])),
        "P3, under YaRN": effect(mean([gain(n, True) for n in LONGEST])),
        "P3, of YaRN": effect(mean([of_yarn[n] for n in LONGEST])),
        "interaction": effect(mean([gain(n, True) - gain(n) for n in LONGEST])),
    }


def p_values(endpoints: dict[str, Effect]) -> dict[str, float]:
    """Return p of the primary endpoints P1, P2 and P3, of which P3 asks for both its parts."""
    parts = [endpoints["P3, under YaRN"], endpoints["P3, of YaRN"]]
    return {"P1": endpoints["P1"].p, "P2": endpoints["P2"].p, "P3": both(parts)}


def window_effect(entries: Sequence[Entry], variant: str, pair: str, times: int = 1) -> Effect:
    """Return the difference in accuracy on the ordered window, more is better (P5: k3-h1, 1 x)."""
    first, second = paired(entries, PAIRS[pair], variant)
    return effect([
        cell_of(a, times)["accuracy"] - cell_of(b, times)["accuracy"]
        for a, b in zip(first, second, strict=True)
    ])  # fmt: skip
