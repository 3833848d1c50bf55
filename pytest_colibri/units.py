"""Byte figures with their source, and the one rule for writing them.

GB is 10^9 bytes in everything that is printed or exported; MiB is 2^20 bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

GB = 10**9
KIB = 2**10
MIB = 2**20
MAX_BYTES = 2**63
UNITS = {"B": 1, "kB": 1000, "MB": 10**6, "GB": GB, "G": GB, "KiB": KIB, "MiB": MIB, "GiB": 2**30}


@dataclass(frozen=True)
class Figure:
    """A byte count and where it comes from; ``bytes`` is None when no source gives it.

    Unknown is not zero: a None figure drives no decision and says so when printed.
    """

    bytes: int | None
    source: str

    def __str__(self) -> str:
        return f"{format_bytes(self.bytes)} ({self.source})"


def smallest(*figures: Figure) -> Figure:
    """Return the smallest known figure, or an unknown one that names every source asked."""
    known = [figure for figure in figures if figure.bytes is not None]
    if not known:
        return Figure(None, " and ".join(figure.source for figure in figures) or "no source")
    return min(known, key=lambda figure: figure.bytes or 0)


def format_bytes(count: int | None) -> str:
    """Write a byte count for people: ``unknown``, ``512 B``, ``16.0 kB``, ``2.4 MB`` or ``114.2 GB``."""
    if count is None:
        return "unknown"
    if abs(count) >= GB // 10:
        return f"{count / GB:.1f} GB" if abs(count) >= 10 * GB else f"{count / GB:.2f} GB"
    if abs(count) >= 10**5:
        return f"{count / 10**6:.1f} MB"
    if abs(count) >= 10**4:
        return f"{count / 1000:.1f} kB"
    return f"{count} B"


def parse_bytes(text: str) -> int:
    """Read a byte count such as ``2GB`` or ``512MiB``; :class:`ValueError` says what is allowed."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(B|kB|MB|GB|G|KiB|MiB|GiB)?", text.strip(), re.ASCII)
    if match is None:
        raise ValueError("not a size; write a number and one of B, kB, MB, GB, KiB, MiB, GiB")
    count = Decimal(match[1]) * UNITS[match[2] or "B"]
    if count > MAX_BYTES:
        raise ValueError(f"too large; at most {MAX_BYTES} bytes are allowed")
    return int(count)
