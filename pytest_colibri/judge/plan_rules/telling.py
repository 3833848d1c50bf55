"""Whether a person is told: warnings in which figures can be recognised, however they are worded."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pytest_colibri.units import UNITS

_AMOUNT = re.compile(rf"(?<![\w.])(\d+(?:\.\d+)?) ?({'|'.join(sorted(UNITS, key=len, reverse=True))})?(?!\w)")


def names_figures(lines: Iterable[str], *counts: int) -> bool:
    """Tell whether one line names all these byte counts: exactly, or rounded in a unit as it is written."""
    return any(all(_names(line, count) for count in counts) for line in lines)


def _names(line: str, count: int) -> bool:
    return any(_stands_for(number, unit, count) for number, unit in _AMOUNT.findall(line))


def _stands_for(number: str, unit: str, count: int) -> bool:
    """Tell whether a number is the count, to half of its last place or of a tenth; bytes are exact."""
    _, _, decimals = number.partition(".")
    size = UNITS[unit or "B"]
    if size == 1:
        return number == str(count)
    return abs(float(number) * size - count) <= size * 0.1 ** max(1, len(decimals)) / 2
