"""Tables and figures of a study's results: DIR/E1.json, ... become DIR/tables.md and PNGs.

python studies/report.py out/studies          # of your own runs
python studies/report.py docs/study           # of those that docs/STUDY.md tells of
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from rove.config import user_errors  # noqa: E402
from rove.files import write_atomic  # noqa: E402
from rove.report.tables import table  # noqa: E402
from studies import figures  # noqa: E402
from studies.analysis import Effect, effect, holm  # noqa: E402
from studies.endpoints import (  # noqa: E402
    PAIRS,
    Entry,
    cell_of,
    language_endpoints,
    losses,
    p_values,
    paired,
    window_effect,
)  # fmt: skip
from studies.entries import read_entries  # noqa: E402
from studies.experiments import EXPERIMENTS  # noqa: E402

ARMS, TIMES = ("rope", "rove", "null"), (1, 2, 4, 8)
SETTINGS: dict[str, dict[str, Any]] = {
    "as trained": {},
    "YaRN": {"yarn": True},
    "YaRN, values orig": {"yarn": True, "yarn_values": "orig"},
}


def shown(e: Effect, digits: int = 4) -> str:
    """Return an effect with its interval and seeds."""
    ends = f"[{e.low:+.{digits}f}, {e.high:+.{digits}f}]"
    return f"{e.mean:+.{digits}f} {ends} ({e.n_seeds})"


def p_shown(p: float) -> str:
    """Return a p value as it is usually written."""
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}"


def primary_table(results: dict[str, list[Entry]]) -> str:
    """Return the primary endpoints of E1 and E3 with Holm's correction, and those of E2."""
    parts: list[str] = []
    for name, others in (("E3", ("E1",)), ("E2", ())):
        if not results.get(name):
            continue
        arms = paired(results[name], PAIRS["rove"])
        endpoints = language_endpoints(*arms)
        nulls = language_endpoints(*paired(results[name], PAIRS["null"]))
        p = p_values(endpoints)
        rows = {key: (shown(endpoints[key]), shown(nulls[key])) for key in endpoints}
        rows["P3, of YaRN"] = (rows["P3, of YaRN"][0], "")  # within an arm
        if others:
            p |= {"P4": 1.0, "P5": 1.0}
            rows["P4"] = ("not run", "")
        if others and results.get("E1"):
            found = [window_effect(results["E1"], "k3-h1", pair) for pair in PAIRS]
            p["P5"], rows["P5"] = found[0].p, (shown(found[0]), shown(found[1]))
        corrected = holm(p)
        lines = []
        for key, cells in rows.items():
            primary = key.split(",")[0]
            is_whole = key == primary or key == "P3, of YaRN"
            shown_p = (
                [p_shown(p[primary]), p_shown(corrected[primary])] if primary in p else ["", ""]
            )
            lines.append([key, *cells, *(shown_p if is_whole else ["", ""])])
        head = ["endpoint", "RoVE - RoPE", "null - RoVE", "p", "p, Holm"]
        parts += [f"{name}, {EXPERIMENTS[name].what}:", table(head, lines)]
    return "\n\n".join(parts)


def language_tables(name: str, entries: Sequence[Entry]) -> str:
    """Return losses by arm, setting and length, and the differences between arms."""
    arms = dict(zip(ARMS, paired(entries, ARMS), strict=True))
    lines, differences = [], []
    for setting, wanted in SETTINGS.items():
        for arm, own in arms.items():
            if arm == "rope" and "orig" in setting:
                continue
            means = [losses(own, n, **_at(n, wanted)).mean() for n in TIMES]
            lines.append([arm, setting, str(len(own)), *(f"{value:.4f}" for value in means)])
        for label, (a, b) in {"RoVE - RoPE": PAIRS["rove"], "null - RoVE": PAIRS["null"]}.items():
            of_b = {key: x for key, x in wanted.items() if b != "rope" or key == "yarn"}
            cells = [
                shown(
                    effect(
                        losses(arms[a], n, **_at(n, wanted)) - losses(arms[b], n, **_at(n, of_b))
                    )
                )
                for n in TIMES
            ]
            differences.append([label, setting, *cells])
    head = [f"{n}x" for n in TIMES]
    return "\n\n".join([
        f"{name}: NLL, nats per byte, mean over seeds.",
        table(["arm", "setting", "seeds", *head], lines),
        "Differences with 95 % intervals and the number of seeds (exploratory but for P1 to P3):",
        table(["difference", "setting", *head], differences),
    ])  # fmt: skip


def _at(times: int, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return what to look up at a length: at the training context YaRN changes nothing."""
    return {} if times == 1 else wanted


def window_tables(entries: Sequence[Entry]) -> str:
    """Return the ordered window's accuracies by k, heads, arm and length."""
    lines, differences = [], []
    for variant in sorted({e["variant"] for e in entries}):
        k, heads = (part[1:] for part in variant.split("-"))
        for arm, own in zip(ARMS, paired(entries, ARMS, variant), strict=True):
            by_seed = [[cell_of(e, n)["accuracy"] for e in own] for n in TIMES]
            cells = [f"{min(x):.2f} {sum(x) / len(x):.3f} {max(x):.2f}" for x in by_seed]
            lines.append([k, heads, arm, str(len(own)), *cells])
        cells = [shown(window_effect(entries, variant, pair), 3) for pair in PAIRS]
        differences.append([k, heads, *cells])
    head = [f"{n}x" for n in TIMES]
    return "\n\n".join([
        "E1: accuracy on the ordered window, least, mean and largest over seeds (chance 0.17).",
        table(["k", "heads", "arm", "seeds", *head], lines),
        "Differences at 1x:",
        table(["k", "heads", "RoVE - RoPE", "null - RoVE"], differences),
    ])  # fmt: skip


def tables(results: dict[str, list[Entry]]) -> str:
    """Return all tables as Markdown."""
    parts = [primary_table(results)]
    parts += [window_tables(results["E1"])] if results.get("E1") else []
    parts += [language_tables(name, results[name]) for name in ("E2", "E3") if results.get(name)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _write(content: bytes, file: Any) -> None:
    file.write(content)


def main(argv: list[str]) -> None:
    """Write tables.md and the figures of one folder."""
    with user_errors():
        if len(argv) != 1:
            raise ValueError("give the folder that studies/run.py wrote, such as out/studies")
        folder = Path(argv[0])
        results = {name: read_entries(folder / f"{name}.json") for name in EXPERIMENTS}
        if not any(results.values()):
            raise ValueError(
                f"{folder}: no results (E1.json, ...) there; studies/run.py makes them"
            )
        text = tables(results)
        write_atomic(folder / "tables.md", partial(_write, text.encode()))
        print(text)
        for name, png in figures.draw_all(results).items():
            write_atomic(folder / name, partial(_write, png))
            print(f"wrote {folder / name}")


if __name__ == "__main__":
    main(sys.argv[1:])
