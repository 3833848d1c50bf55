"""Checks of byte figures that tools report."""

from __future__ import annotations

from pytest_colibri.units import Figure, smallest

_TOLERATED_PERCENT = 5


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


def less(total: Figure, used: Figure) -> Figure:
    """Return what the use leaves of a total; unknown where either is, or where more is used than there is."""
    used = within(total, used)
    if total.bytes is None or used.bytes is None:
        return total if total.bytes is None else used
    return Figure(total.bytes - used.bytes, f"{total.source} less used")


def agreed(first: Figure, second: Figure) -> tuple[Figure, str | None]:
    """Return the smaller of what two sources say, and a sentence where they differ by more than 5 %.

    A figure that only one of them gives is taken.
    """
    if first.bytes is None or second.bytes is None:
        return (second if first.bytes is None and second.bytes is not None else first), None
    difference, larger = abs(first.bytes - second.bytes), max(first.bytes, second.bytes)
    if difference * 100 <= larger * _TOLERATED_PERCENT:
        return smallest(first, second), None
    return smallest(first, second), f"{first} and {second} differ; the smaller is used"
