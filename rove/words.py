"""Sizes and durations in words."""


def size(n_bytes: float) -> str:
    """Return bytes in MB or GB, powers of ten."""
    return f"{n_bytes / 1e9:,.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:,.1f} MB"


def duration(seconds: float) -> str:
    """Return seconds in the unit that suits them."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
