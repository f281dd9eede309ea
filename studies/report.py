"""Tables and figures of a study's results: DIR/E1.json, ... become DIR/tables.md and PNGs.

python studies/report.py                        # of out/studies, your own runs
python studies/report.py --folder docs/study    # of those that docs/STUDY.md tells of
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from rove.config import load  # noqa: E402
from rove.errors import user_errors  # noqa: E402
from rove.files import write_atomic  # noqa: E402
from rove.report.plots import why_no_plots  # noqa: E402
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

BETAS = ((32, 1), (2, 0.25))  # YaRN's, in E1
ARMS, TIMES = ("rope", "rove", "null"), (1, 2, 4, 8)
SETTINGS: dict[str, dict[str, Any]] = {
    "as trained": {},
    "YaRN": {"yarn": True},
    "YaRN, values orig": {"yarn": True, "yarn_values": "orig"},
}


@dataclass(frozen=True)
class Settings:
    folder: str = "out/studies"
    """folder of E1.json, ... as studies/run.py writes them"""


def shown(e: Effect, digits: int = 4) -> str:
    """Return an effect with its interval and seeds."""
    ends = f"[{e.low:+.{digits}f}, {e.high:+.{digits}f}]"
    return f"{e.mean:+.{digits}f} {ends} ({e.n_seeds})"


def p_shown(p: float) -> str:
    """Return a p value as it is usually written."""
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}"


Rows = dict[str, tuple[str, str]]
NOT_RUN = ("not run", "")


def primary_tables(results: dict[str, list[Entry]]) -> str:
    """Return the primary endpoints with Holm's correction, and what E2 says of P1 to P3."""
    rows, p = _language_rows(results.get("E3", []))
    rows["P4"], p["P4"] = NOT_RUN, 1.0
    rows["P5"], p["P5"] = NOT_RUN, 1.0
    if _n_seeds(results.get("E1", []), "k3-h1") > 1:
        found = [window_effect(results["E1"], "k3-h1", pair) for pair in PAIRS]
        rows["P5"], p["P5"] = (shown(found[0]), shown(found[1])), found[0].p
    parts = ["Primary endpoints, P1 to P3 from E3, P5 from E1:", _endpoint_table(rows, p)]
    if _n_seeds(results.get("E2", [])) > 1:
        small = _endpoint_table(*_language_rows(results["E2"]))
        parts += ["P1 to P3 in E2, corrected among themselves:", small]
    return "\n\n".join(parts)


def _n_seeds(entries: Sequence[Entry], variant: str = "") -> int:
    """Return how many seeds all three arms have."""
    return len(paired(entries, ARMS, variant)[0])


def _language_rows(entries: Sequence[Entry]) -> tuple[Rows, dict[str, float]]:
    """Return what to show of P1 to P3 and the interaction, and the p values."""
    if _n_seeds(entries) < 2:
        names = ("P1", "P2", "P3")
        return dict.fromkeys(names, NOT_RUN), dict.fromkeys(names, 1.0)
    found, null = (language_endpoints(*paired(entries, pair)) for pair in PAIRS.values())
    rows = {key: (shown(found[key]), shown(null[key])) for key in found}
    rows["P3, of YaRN"] = (rows["P3, of YaRN"][0], "")  # within an arm
    return rows, p_values(found)


def _endpoint_table(rows: Rows, p: dict[str, float]) -> str:
    corrected, lines = holm(p), []
    for key, cells in rows.items():
        own = key.split(",")[0]
        has_p = own in p and cells != NOT_RUN and key != "P3, under YaRN"
        ps = [p_shown(p[own]), p_shown(corrected[own])] if has_p else ["", ""]
        lines.append([key, *cells, *ps])
    return table(["endpoint", "RoVE - RoPE", "null - RoVE", "p", "p, Holm"], lines)


def language_tables(name: str, variant: str, entries: Sequence[Entry]) -> str:
    """Return losses by arm, setting and length, and the differences between arms."""
    arms = dict(zip(ARMS, paired(entries, ARMS, variant), strict=True))
    if len(arms["rope"]) < 2:
        return f"{name} {variant}: fewer than two seeds of all arms are done."
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
        f"{name} {variant}".strip() + ": NLL, nats per byte, mean over seeds.",
        table(["arm", "setting", "seeds", *head], lines),
        "Differences with 95 % intervals and the number of seeds (exploratory but for P1 to P3):",
        table(["difference", "setting", *head], differences),
    ])  # fmt: skip


def grid_table(name: str, entries: Sequence[Entry]) -> str:
    """Return mean losses by YaRN's factor and length; empty where none were measured."""
    lines = []
    for arm in ARMS:
        own = [e["grid"] for e in entries if e["arm"] == arm and e.get("grid")]
        by_setting: dict[tuple[str, float, int], list[float]] = {}
        for cell in (cell for grid in own for cell in grid):
            key = (cell["yarn_values"], cell["yarn_factor"], cell["length"])
            by_setting.setdefault(key, []).append(cell["nll"])
        lengths = sorted({length for _, _, length in by_setting})
        for values, factor in sorted({key[:2] for key in by_setting}, reverse=True):
            found = [by_setting[values, factor, n] for n in lengths]
            means = [f"{sum(x) / len(x):.4f}" for x in found]
            lines.append([arm, values, f"{factor:g}", str(len(own)), *means])
    if not lines:
        return ""
    head = ["arm", "values", "factor", "seeds", *(f"{n}x" for n in TIMES)]
    return f"{name}: NLL with YaRN's factor fixed (exploratory).\n\n{table(head, lines)}"


def _at(times: int, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return what to look up at a length: at the training context YaRN changes nothing."""
    return {} if times == 1 else wanted


def window_tables(entries: Sequence[Entry]) -> str:
    """Return the ordered window's accuracies by k, heads, arm, setting and length."""
    lines, differences, with_yarn = [], [], []
    for variant in sorted({e["variant"] for e in entries}):
        k, heads = (part[1:] for part in variant.split("-"))
        for arm, own in zip(ARMS, paired(entries, ARMS, variant), strict=True):
            cells = [_spread(own, n) for n in TIMES]
            lines.append([k, heads, arm, str(len(own)), *cells])
            for values in ("yarn", "orig") if arm != "rope" else ("yarn",):
                for fast, slow in BETAS:
                    yarn = {"yarn_beta_fast": fast, "yarn_beta_slow": slow, "yarn_values": values}
                    cells = [_spread(own, n, True, **yarn) for n in TIMES[1:]]
                    names = [k, heads, arm, f"{fast:g}, {slow:g}", values, str(len(own))]
                    with_yarn.append([*names, *cells])
        cells = [shown(window_effect(entries, variant, pair), 3) for pair in PAIRS]
        differences.append([k, heads, *cells])
    head = [f"{n}x" for n in TIMES]
    return "\n\n".join([
        "E1: accuracy on the ordered window, least, mean and largest over seeds (chance 0.17).",
        table(["k", "heads", "arm", "seeds", *head], lines),
        "E1, differences at 1x:",
        table(["k", "heads", "RoVE - RoPE", "null - RoVE"], differences),
        "E1 with YaRN (exploratory), as above:",
        table(["k", "heads", "arm", "betas", "values", "seeds", *head[1:]], with_yarn),
    ])  # fmt: skip


def _spread(entries: Sequence[Entry], times: int, yarn: bool = False, **wanted: Any) -> str:
    """Return the least, mean and largest accuracy."""
    x = [cell_of(e, times, yarn, **wanted)["accuracy"] for e in entries]
    return f"{min(x):.2f} {sum(x) / len(x):.3f} {max(x):.2f}"


def tables(results: dict[str, list[Entry]]) -> str:
    """Return all tables as Markdown."""
    parts = [primary_tables(results)]
    parts += [window_tables(results["E1"])] if results.get("E1") else []
    for name in ("E2", "E3", "E4", "E7", "E8"):
        variants = sorted({e["variant"] for e in results.get(name, [])})
        parts += [language_tables(name, variant, results[name]) for variant in variants]
        parts += [grid_table(name, results.get(name, []))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _write(content: bytes, file: Any) -> None:
    file.write(content)


def main(argv: list[str]) -> None:
    """Write tables.md and the figures of one folder."""
    s = load(Settings, argv, prog="studies/report.py", description="Tables and figures of a study.")
    with user_errors():
        folder = Path(s.folder)
        results = {name: read_entries(folder / f"{name}.json") for name in EXPERIMENTS}
        if not any(results.values()):
            raise ValueError(
                f"{folder}: no results (E1.json, ...) there; studies/run.py makes them"
            )
        text = tables(results)
        write_atomic(folder / "tables.md", partial(_write, text.encode()))
        print(text)
        if why := why_no_plots():
            print(f"notice: no figures: {why}")
            return
        for name, png in figures.draw_all(results).items():
            write_atomic(folder / name, partial(_write, png))
            print(f"wrote {folder / name}")


if __name__ == "__main__":
    main(sys.argv[1:])
