"""What a check of the doctor found: one frozen value each, the same in every room."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from pytest_colibri.units import Figure

State = Literal["ok", "warning", "unknown", "failed"]

STATES: tuple[State, ...] = ("ok", "warning", "unknown", "failed")
"""From the best to the worst. Unknown is worse than a warning: nothing was shown."""


@dataclass(frozen=True)
class Finding:
    """The outcome of one check. ``check`` is its name in two parts, such as ``host.memory``.

    ``sentence`` says what was found, ``figures`` the bytes behind it with their sources, ``remedy`` what a
    person can do about it, None where nothing is to be done.
    """

    check: str
    state: State
    sentence: str
    figures: Mapping[str, Figure] = field(default_factory=dict)
    remedy: str | None = None


def few(items: Iterable[str], count: int, shown: int = 3) -> str:
    """Write the first of ``count`` items, and how many more there are."""
    first = ", ".join(islice(items, shown))
    return f"{first} and {count - shown} more" if count > shown else first
