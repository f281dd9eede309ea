"""Set runs beside each other: one table of perplexity by context length, from their eval folders.

    python report.py out/demo-rope out/demo-rove --out out/demo

Reads RUN/eval/*.json as eval.py wrote them, prints the table and writes report.md into --out.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rove.config import load, user_errors
from rove.files import write_atomic
from rove.runs import split_names


@dataclass(frozen=True)
class Settings:
    out: str = "out/report"
    """folder of report.md"""


def read_results(run: Path) -> list[dict[str, Any]]:
    """Return a run folder's results of `perplexity --protocol packed`, with the file of each.

    Raises ValueError for a folder without any and for a file that is none.
    """
    results = []
    for path in sorted(run.glob("eval/*.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            if (result["kind"], result.get("protocol")) == ("perplexity", "packed"):
                rows = [(row["length"], row["ppl"], row["tokens"]) for row in result["results"]]
                keys = ("pos_mode", "yarn_values", "block_size", "data")
                results.append({key: result[key] for key in keys} | {"rows": rows, "file": path})
                assert rows
        except (ValueError, TypeError, KeyError, AssertionError):
            raise ValueError(f"{path}: not a result of eval.py; remove it") from None
    if not results:
        command = f"eval.py perplexity --checkpoint {run}"
        raise ValueError(f"{run}/eval holds no perplexity by length; run {command} first")
    return results


def perplexity_table(results: list[dict[str, Any]]) -> str:
    """Return perplexity by context length as a Markdown table, a row for each run and mode.

    Raises ValueError when the results were not measured on the same targets.
    """
    first = results[0]
    n_targets = first["rows"][0][2]
    for r in results:
        if (r["data"], r["rows"][0][2]) != (first["data"], n_targets):
            two = f"{first['file']} and {r['file']}"
            raise ValueError(f"{two}: different targets (data or tokens); evaluate them alike")
    lengths = sorted({length for r in results for length, _, _ in r["rows"]})
    contexts = {r["block_size"] for r in results}
    marks = [f"{length}{' (trained)' if length in contexts else ''}" for length in lengths]
    lines = ["| run | mode | " + " | ".join(marks) + " |", "|---|---|" + "---|" * len(lengths)]
    for r in results:
        ppl = {length: ppl for length, ppl, _ in r["rows"]}
        cells = ["" if ppl.get(length) is None else f"{ppl[length]:.2f}" for length in lengths]
        values = ", values orig" if r["yarn_values"] == "orig" else ""
        name = r["file"].parent.parent
        lines.append(f"| {name} | {r['pos_mode']}{values} | " + " | ".join(cells) + " |")
    note = f"{n_targets:,} targets, the same in every cell, protocol packed"
    return f"Perplexity by context length ({note}):\n\n" + "\n".join(lines) + "\n"


def main(argv: list[str]) -> None:
    """Print and write the report of the runs that stand on the command line."""
    runs, flags = split_names(argv)
    description = "Set runs beside each other: report.py RUN ... [--out DIR]"
    settings = load(Settings, flags, prog="report.py", description=description)
    with user_errors():
        if not runs:
            raise ValueError("no run folders given: report.py RUN ... [--out DIR]")
        folders = dict.fromkeys(Path(run) for run in runs)
        text = perplexity_table([result for run in folders for result in read_results(run)])
        out = Path(settings.out)
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(out / "report.md", lambda file: file.write(text.encode()))
    print(text)
    print(f"wrote {out / 'report.md'}")


if __name__ == "__main__":
    main(sys.argv[1:])
