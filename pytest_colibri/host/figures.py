"""Checks of byte figures that tools report."""

from __future__ import annotations

from pytest_colibri.units import Figure


def within(total: Figure, part: Figure) -> Figure:
    """Return the part, or an unknown figure when it exceeds its total: such a source is wrong somewhere."""
    if total.bytes is not None and part.bytes is not None and part.bytes > total.bytes:
        return Figure(None, f"refused: {part} exceeds the total, {total}")
    return part


def bound(total: Figure) -> Figure:
    """Return a total as the upper bound of what is free, and say that it is no more than that."""
    if total.bytes is None:
        return total
    return Figure(total.bytes, f"upper bound, not measured as free: {total.source}")
