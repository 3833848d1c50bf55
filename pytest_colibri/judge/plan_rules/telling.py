"""Whether a person is told: warnings in which figures can be recognised, however they are worded."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pytest_colibri.units import UNITS

_UNITS = {**UNITS, "bytes": 1}
_NUMBER = r"\d{1,3}(?:[,_]\d{3})+|\d+(?:\.\d+)?"
_UNIT = "|".join(sorted(_UNITS, key=len, reverse=True))
_AMOUNT = re.compile(rf"(?<![\w.])({_NUMBER}) ?({_UNIT})?(?!\w)")
# A whole number of a large unit may be far from the count: 1 GB is no word for 1.9 GB.
_ROUNDED_PERCENT = 2


def names_figures(lines: Iterable[str], *counts: int) -> bool:
    """Tell whether one line names all these byte counts: exactly, or rounded or cut off as written."""
    return any(all(_names(line, count) for count in counts) for line in lines)


def _names(line: str, count: int) -> bool:
    return any(_stands_for(number, unit, count) for number, unit in _AMOUNT.findall(line))


def _stands_for(number: str, unit: str, count: int) -> bool:
    """Tell whether a number is the count, rounded or cut off at its last place; bytes are exact."""
    digits = re.sub("[,_]", "", number)
    size = _UNITS[unit or "B"]
    if size == 1:
        return digits == str(count)
    _, _, decimals = digits.partition(".")
    place = size * 0.1 ** len(decimals)
    missing = count - float(digits) * size
    near = decimals != "" or 100 * abs(missing) <= _ROUNDED_PERCENT * count
    return near and -place / 2 <= missing < place
