"""Counts the faults of this folder and says at the end what they were and what was lost."""

from collections import Counter

import pytest

COUNTS: Counter[str] = Counter()


@pytest.fixture
def count():
    """Call with the name of a fault once it has happened and its outcome is checked."""
    return lambda name, n=1: COUNTS.update({name: n})


def pytest_terminal_summary(terminalreporter):
    if COUNTS:
        lost = COUNTS.pop("lost steps", 0)
        parts = ", ".join(f"{n} {name}" for name, n in sorted(COUNTS.items()))
        total = sum(COUNTS.values())
        terminalreporter.write_line(f"faults: {total} ({parts}); steps lost: {lost}")
