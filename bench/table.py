"""Print a short table of the JSON files that bench/gpu.sh left in a folder.

python bench/table.py OUT
"""

import json
import sys
from pathlib import Path


def main(argv: list[str]) -> None:
    """Print a line for each side of each file."""
    if len(argv) != 1 or not Path(argv[0]).is_dir():
        print("error: give the folder of the JSON files", file=sys.stderr)
        raise SystemExit(2)
    print("| file | side | median, ms | share of the products' rate |\n|---|---|---|---|")
    for path in sorted(Path(argv[0]).glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        for side, row in content.items():
            if isinstance(row, dict) and "median_s" in row:
                share = row.get("share_of_matmul_rate")
                shown = "" if share is None else f"{share:.1%}"
                print(f"| {path.stem} | {side} | {row['median_s'] * 1e3:.1f} | {shown} |")
        if "rove_over_rope" in content:
            print(f"| {path.stem} | rove / rope | {content['rove_over_rope']:.3f} | |")
        if "peak_mib" in content:
            print(f"| {path.stem} | peak {content['peak_mib']:,.0f} MiB | "
                  f"{content['seconds'] * 1e3:.0f} | |")  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
