"""The commands that stand in README and docs, as they stand there."""

import re
import shlex

from helpers import ROOT

FILES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
SCRIPT = re.compile(r"[\w/]+\.(py|sh)")


def blocks(file):
    """The indented code blocks of a Markdown file, each a list of lines without the indent."""
    found, block = [], []
    for line in [*(ROOT / file).read_text(encoding="utf-8").splitlines(), "end"]:
        if line.startswith("    "):
            block.append(line[4:])
        elif block and line.strip():
            found.append(block)
            block = []
    return found


def commands(block):
    """The shell commands of a block: comments gone, continued lines joined, loops as they are."""
    text = "\n".join(block).replace("\\\n", " ")
    return [
        line for line in (re.sub(r"\s+#.*", "", raw).strip() for raw in text.split("\n")) if line
    ]


def script_calls(file):
    """Yield (script, arguments) of every call of one of our scripts in a file."""
    for block in blocks(file):
        for line in commands(block):
            if not re.match(r"(python|torchrun|srun|[a-z]+/\w+\.sh)\b", line):
                continue
            line = line.replace("$mode", "rope").replace("$scale", "124m")
            words = shlex.split(re.sub(r"\$\{?\w+\}?", "X", line))
            at = next((n for n, word in enumerate(words) if SCRIPT.fullmatch(word)), None)
            if at is not None:
                yield words[at], words[at + 1 :]
