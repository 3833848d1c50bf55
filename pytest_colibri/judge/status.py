"""The exit statuses, one table for every command (``docs/verdicts.md``)."""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum

from pytest_colibri.judge.model import State, Verdict
from pytest_colibri.profiles.model import Backend


class Status(IntEnum):
    """What a run ends with; 2, 3 and 5 keep pytest's meaning."""

    HELD = 0
    BROKEN = 1
    USAGE = 4
    NOTHING_SHOWN = 6
    HOST_MISMATCH = 7


# What must be held in every case that was asked for; not to claim it is no pass.
ASKED_FOR = (
    "device",
    "expert tier",
    "run completes",
    "available memory is there",
    "one pool is counted once",
)


def conclude(
    verdicts: Collection[Verdict], backend: Backend, *, plans_only: bool, emulated: bool
) -> tuple[Status, str]:
    """Return the status of a run and the sentence that explains it.

    A run for a GPU backend that saw no tier at work has shown nothing, whatever else held. ``plans_only``
    marks a run without an engine, such as one on an ``emulated`` host: it speaks of plans and nothing else.
    """
    broken, unwitnessed, held = (_of(verdicts, "broken"), _of(verdicts, "unwitnessed"), _of(verdicts, "held"))
    withheld = [verdict for verdict in _of(verdicts, "not_claimed") if verdict.claim in ASKED_FOR]
    scope = f"{', on an emulated host' if emulated else ''}: this speaks of plans only" if plans_only else ""
    if broken:
        return Status.BROKEN, f"{_count(broken, 'broken')}, {len(held)} held{scope}"
    if unwitnessed:
        return Status.NOTHING_SHOWN, f"{_count(unwitnessed, 'unwitnessed')}: never a pass"
    if not held:
        return Status.NOTHING_SHOWN, "nothing was shown: no claim was held"
    if not plans_only and backend != "cpu" and not any(verdict.claim == "expert tier" for verdict in held):
        return Status.NOTHING_SHOWN, f"no tier was tested: nothing was shown for the backend {backend}"
    if withheld:
        return Status.NOTHING_SHOWN, f"not claimed, and so not shown, for {_cases(withheld)}"
    if plans_only:
        return Status.HELD, f"{_count(held, 'held')}{scope}"
    alone = ", on the CPU alone: no GPU was tested" if backend == "cpu" else ""
    return Status.HELD, f"{_count(held, 'held')}{alone}"


def _of(verdicts: Collection[Verdict], state: State) -> list[Verdict]:
    return [verdict for verdict in verdicts if verdict.state == state]


def _count(verdicts: Collection[Verdict], state: State) -> str:
    return f"{len(verdicts)} verdict{'s' if len(verdicts) != 1 else ''} {state}"


def _cases(verdicts: Collection[Verdict]) -> str:
    first, *others = dict.fromkeys(verdict.case for verdict in verdicts)
    return f"{first} and {len(others)} other cases" if others else first
