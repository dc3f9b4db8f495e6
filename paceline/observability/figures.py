"""How figures are written for people: short, with their unit, always the same way. "-" stands for what is not known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from paceline.core.version import Version

BLOCKS = "▁▂▃▄▅▆▇█"
UNKNOWN = "-"


def seconds_text(seconds: float | None) -> str:
    """`0.0012` is "1.2 ms", `0.2` "200 ms", `4.26` "4.3 s", `65` "1:05", `3700` "1:01:40"."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms" if 0 < seconds < 0.01 else f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return clock_text(seconds)


def clock_text(seconds: float) -> str:
    """Minutes and seconds, with hours when there are any: "0:09", "1:01:40"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def bytes_text(count: float) -> str:
    """Decimal units: `3_900_000` is "3.9 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def count_text(count: float | None) -> str:
    """Whole number with thousands set apart: "18,240"."""
    return UNKNOWN if count is None or not math.isfinite(count) else f"{count:,.0f}"


def ratio_text(ratio: float | None) -> str:
    """Per cent: `0.12` is "12 %"."""
    return UNKNOWN if ratio is None or not math.isfinite(ratio) else f"{ratio * 100:.0f} %"


def share_text(share: float) -> str:
    """Per cent with two digits that count: `0.0031` is "0.31 %", `0.52` "52 %"."""
    per_cent = share * 100
    if per_cent == 0 or per_cent >= 10:
        return f"{per_cent:.0f} %"
    return f"{per_cent:.{1 if per_cent >= 1 else 2}f} %" if per_cent >= 0.01 else f"{per_cent:.1e} %"


def reduction_text(full: float, sent: float) -> str:
    """How many times less was sent: `(1000, 8)` is "125x"."""
    ratio = full / sent if sent else math.inf
    return UNKNOWN if not math.isfinite(ratio) else f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x"


def decimal_text(value: float | None, places: int) -> str:
    """Fixed number of places."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:.{places}f}"


def version_text(packed: int | None) -> str:
    """ "life.n" of a packed version."""
    return UNKNOWN if packed is None else str(Version.unpack(packed))


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of `values` in at most `width` blocks, each the mean of its share, scaled to lowest and highest."""
    known = [value for value in values if math.isfinite(value)]
    if not known or width < 1:
        return ""
    columns = min(width, len(known))
    edges = [len(known) * column // columns for column in range(columns + 1)]
    means = [sum(known[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = high - low
    return "".join(BLOCKS[round((mean - low) / span * (len(BLOCKS) - 1)) if span else 0] for mean in means)
