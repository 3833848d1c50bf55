"""The exit statuses, one table for every command (``docs/verdicts.md``)."""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum

from pytest_colibri.judge.model import State
from pytest_colibri.profiles.model import Backend


class Status(IntEnum):
    """What a run ends with; 2, 3 and 5 keep pytest's meaning."""

    HELD = 0
    BROKEN = 1
    USAGE = 4
    NOTHING_SHOWN = 6
    HOST_MISMATCH = 7


def conclude(
    states: Collection[State], backend: Backend, tier_states: Collection[State], *, plans_only: bool
) -> tuple[Status, str]:
    """Return the status of a run and the sentence that explains it.

    ``states`` are those of all verdicts, ``tier_states`` those of the GPU tier alone: a run for a GPU backend
    that saw no tier at work has shown nothing, whatever else held. ``plans_only`` marks an emulated run,
    which speaks of plans and of nothing else.
    """
    if "broken" in states:
        return Status.BROKEN, f"{_count(states, 'broken')} broken"
    if "unwitnessed" in states:
        return Status.NOTHING_SHOWN, f"{_count(states, 'unwitnessed')} unwitnessed: never a pass"
    if "held" not in states:
        return Status.NOTHING_SHOWN, "nothing was shown: no claim was held"
    if plans_only:
        return Status.HELD, f"{_count(states, 'held')} held, on an emulated host: this speaks of plans only"
    if backend != "cpu" and "held" not in tier_states:
        return Status.NOTHING_SHOWN, f"no tier was tested: nothing was shown for the backend {backend}"
    return Status.HELD, f"{_count(states, 'held')} held"


def _count(states: Collection[State], state: State) -> str:
    number = sum(other == state for other in states)
    return f"{number} verdict{'s' if number != 1 else ''}"
