"""Print a short table of the JSON files and logs that bench/gpu.sh left in a folder.

python bench/table.py OUT
"""

import json
import sys
from pathlib import Path
from typing import Any


def lines_of(name: str, content: dict[str, Any]) -> list[str]:
    """Return the table's lines for one file."""
    lines = []
    for side, row in content.items():
        if isinstance(row, dict) and "median_s" in row:
            share, token_s = row.get("share_of_matmul_rate"), row.get("token_s")
            more = f"{share:.1%} of the products' rate" if share is not None else ""
            more += f"{token_s * 1e3:.2f} ms a token" if token_s is not None else ""
            faster = f"{row['faster']:.2f} x {content['base']}" if side != content["base"] else ""
            lines.append(
                f"| {name} | {side} | {row['median_s'] * 1e3:.1f} ms | {faster} | {more} |"
            )
    if "rove_over_rope" in content:
        lines.append(f"| {name} | rove / rope | {content['rove_over_rope']:.3f} | | |")
    if "peak_mib" in content:
        peak, seconds = content["peak_mib"], content["seconds"]
        lines.append(
            f"| {name} | eval.py | {seconds * 1e3:.0f} ms | | host's peak {peak:,.0f} MiB |"
        )
    for check in content.get("checks", []):
        verdict = "ok" if check["holds"] else "MISSED"
        figures = f"{float(check['value']):.2e} <= {check['bound']:g}"
        lines.append(f"| {name} | {check['check']} | {figures} | | {verdict} |")
    return lines


def last_line(log: Path) -> str:
    """Return the last line that a step left, which says why it has no result."""
    words = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    said = [line.strip() for line in words if line.strip()]
    return f"{log.name}: {said[-1]:.100}" if said else f"see {log.name}"


def main(argv: list[str]) -> None:
    """Print a line for each side of each file, and for each step that left none."""
    if len(argv) != 1 or not Path(argv[0]).is_dir():
        print("error: give the folder of the JSON files", file=sys.stderr)
        raise SystemExit(2)
    print("| step | side | median | as fast as | |\n|---|---|---|---|---|")
    names = {path.stem for path in Path(argv[0]).iterdir() if path.suffix in (".json", ".log")}
    for name in sorted(names):
        path = Path(argv[0]) / f"{name}.json"
        try:
            lines = lines_of(name, json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            lines = []
        if not lines:
            lines = [f"| {name} | | | | no result, {last_line(path.with_suffix('.log'))} |"]
        for line in lines:
            print(line)


if __name__ == "__main__":
    main(sys.argv[1:])
