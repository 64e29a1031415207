"""Formats numbers for people: sizes, counts and durations."""


def format_bytes(size: float) -> str:
    """1_500_000_000 → `1.5 GB` (powers of 1,000)."""
    if size < 1000:
        return f"{size:,.0f} bytes"
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 1000:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:,.1f} TB"


def format_count(count: float) -> str:
    """1_500_000 → `1.5M`, with three significant digits."""
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= unit:
            return f"{count / unit:.3g}{letter}"
    return f"{count:.3g}"


def format_duration(seconds: float) -> str:
    """5400 → `1.5 hours`."""
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:.1f} s"


def format_clock(seconds: float) -> str:
    """5400 → `1:30:00`; days are counted as hours."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
