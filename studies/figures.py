"""The study's figures: differences between arms by length, losses by length, the ordered window."""

from collections.abc import Mapping, Sequence
from typing import Any

from rove.report.plots import Frame, Series, look_of, panels
from studies.analysis import effect
from studies.endpoints import PAIRS, Entry, cell_of, losses, paired

TIMES = (1, 2, 4, 8)
NULL = {"color": "#999999", "marker": "x"}
ARMS = ("rope", "rove", "null")


def draw_all(results: Mapping[str, list[Entry]]) -> dict[str, bytes]:
    """Return PNGs by file name, of what there are results for."""
    found = {}
    languages = [name for name in ("E2", "E3") if results.get(name)]
    if languages:
        parts = [
            differences(name, results[name], yarn) for name in languages for yarn in (False, True)
        ]
        found["differences.png"] = panels(parts)
        found["losses.png"] = panels([by_length(name, results[name]) for name in languages])
    if results.get("E1"):
        found["window.png"] = panels(window(results["E1"]))
    return found


def differences(name: str, entries: Sequence[Entry], yarn: bool) -> tuple[list[Series], Frame]:
    """Return differences in NLL by length, with 95 % intervals over seeds and text."""
    series = []
    for label, pair in PAIRS.items():
        a, b = paired(entries, pair)
        effects = [
            effect(losses(a, n, yarn and n > 1) - losses(b, n, yarn and n > 1)) for n in TIMES
        ]
        look = look_of("rove+yarn" if yarn else "rove") if label == "rove" else NULL
        text = "RoVE - RoPE" if label == "rove" else "null - RoVE"
        band = [[e.low, e.high] for e in effects]
        series.append(Series(text, look, TIMES, [e.mean for e in effects], band))
    setting = "with YaRN" if yarn else "without YaRN"
    title, x_label = f"{name}, {setting}", "length / training context"
    return series, Frame(title, x_label, "nats per byte", "x", ticks=TIMES, zero=True)


def by_length(name: str, entries: Sequence[Entry]) -> tuple[list[Series], Frame]:
    """Return mean NLL by length of RoPE and RoVE, with and without YaRN."""
    series = []
    rope, rove = paired(entries, PAIRS["rove"][::-1])
    for mode, own, yarn, values in (
        ("rope", rope, False, "yarn"),
        ("rope+yarn", rope, True, "yarn"),
        ("rove", rove, False, "yarn"),
        ("rove+yarn", rove, True, "yarn"),
        ("rove+yarn", rove, True, "orig"),
    ):
        wanted: dict[str, Any] = {"yarn_values": values} if values == "orig" else {}
        y = [
            float(losses(own, n, yarn and n > 1, **(wanted if n > 1 else {})).mean()) for n in TIMES
        ]
        label = mode + (", values orig" if wanted else "")
        series.append(Series(label, look_of(mode, values), TIMES, y))
    frame = Frame(name, "length / training context", "NLL, nats per byte", "x", ticks=TIMES)
    return series, frame


def window(entries: Sequence[Entry]) -> list[tuple[list[Series], Frame]]:
    """Return accuracy on the ordered window by length, a panel for each k and number of heads."""
    parts = []
    for variant in sorted({e["variant"] for e in entries}):
        series = []
        for arm, own in zip(ARMS, paired(entries, ARMS, variant), strict=True):
            by_times = [[cell_of(e, n)["accuracy"] for e in own] for n in TIMES]
            look = NULL if arm == "null" else look_of(arm)
            ends = [[min(values), max(values)] for values in by_times]
            mean = [sum(values) / len(values) for values in by_times]
            series.append(Series(f"{arm} (least to largest)", look, TIMES, mean, ends))
        k, heads = (part[1:] for part in variant.split("-"))
        title = f"k = {k}, {heads} head" + ("s" if heads != "1" else "")
        frame = Frame(title, "length / training context", "accuracy", "x", ticks=TIMES)
        parts.append((series, frame))
    return parts
