"""Sizes, durations and differences in words; names that were given in a list."""

from typing import Any

from rove.config import flatten

HASH_DIGITS = 64


def size(n_bytes: float) -> str:
    """Return bytes in MB or GB, powers of ten."""
    return f"{n_bytes / 1e9:,.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:,.1f} MB"


def duration(seconds: float) -> str:
    """Return seconds in the unit that suits them."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def differences(there: dict[str, Any], asked: dict[str, Any]) -> str:
    """Return where two nested dicts differ, as `key VALUE (asked: VALUE)`; empty if nowhere."""
    there, asked = flatten(there), flatten(asked)
    return ", ".join(
        f"{key} {_short(there.get(key))} (asked: {_short(asked.get(key))})"
        for key in sorted(there | asked)
        if there.get(key) != asked.get(key)
    )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) != HASH_DIGITS else f"{text[:12]}.."


def names_in(key: str, text: str) -> list[str]:
    """Read names such as "a, b"; ValueError for an empty one."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ValueError(f"{key}={text!r}: must be names joined by single commas, such as a,b")
    return names
