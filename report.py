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


@dataclass(frozen=True)
class Settings:
    out: str = "out/report"
    """folder of report.md"""


def read_results(run: Path) -> list[dict[str, Any]]:
    """Return the evaluation results of a run folder; ValueError for a folder without any."""
    results = []
    for path in sorted(run.glob("eval/*.json")):
        try:
            results.append(dict(json.loads(path.read_text(encoding="utf-8"))) | {"run": str(run)})
        except (ValueError, TypeError):
            raise ValueError(f"{path}: not a result of eval.py; remove it") from None
    if not results:
        raise ValueError(f"{run}/eval holds no results; run eval.py --checkpoint {run} first")
    return results


def perplexity_table(results: list[dict[str, Any]]) -> str:
    """Return perplexity by context length as a Markdown table, a row for each run and mode.

    Raises ValueError when the results were not measured on the same targets.
    """
    found = [r for r in results if r["kind"] == "perplexity" and r.get("protocol") == "packed"]
    if not found:
        raise ValueError("no result of `eval.py perplexity --protocol packed` among the runs")
    if len({(r["data"], r["results"][0]["tokens"]) for r in found}) > 1:
        raise ValueError("perplexities on different targets (data or tokens); evaluate them alike")
    lengths = sorted({row["length"] for r in found for row in r["results"]})
    contexts = {r["block_size"] for r in found}
    marks = [f"{length}{' (trained)' if length in contexts else ''}" for length in lengths]
    lines = ["| run | mode | " + " | ".join(marks) + " |", "|---|---|" + "---|" * len(lengths)]
    for r in found:
        ppl = {row["length"]: row["ppl"] for row in r["results"]}
        cells = ["" if ppl.get(length) is None else f"{ppl[length]:.2f}" for length in lengths]
        values = ", values orig" if r["yarn_values"] == "orig" else ""
        lines.append(f"| {r['run']} | {r['pos_mode']}{values} | " + " | ".join(cells) + " |")
    first = found[0]
    note = f"{first['results'][0]['tokens']:,} targets, the same in every cell, protocol packed"
    return f"Perplexity by context length ({note}):\n\n" + "\n".join(lines) + "\n"


def main(argv: list[str]) -> None:
    """Print and write the report of the runs named before the first flag."""
    n_runs = next((i for i, arg in enumerate(argv) if arg.startswith("-")), len(argv))
    runs, flags = argv[:n_runs], argv[n_runs:]
    description = "Set runs beside each other: report.py RUN ... [--out DIR]"
    settings = load(Settings, flags, prog="report.py", description=description)
    with user_errors():
        if not runs:
            raise ValueError("no run folders given: report.py RUN ... [--out DIR]")
        text = perplexity_table([result for run in runs for result in read_results(Path(run))])
        out = Path(settings.out)
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(out / "report.md", lambda file: file.write(text.encode()))
    print(text)
    print(f"wrote {out / 'report.md'}")


if __name__ == "__main__":
    main(sys.argv[1:])
