"""Verdicts: what became of a claim once the evidence was held against it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

State = Literal["held", "broken", "unwitnessed", "not_claimed"]


@dataclass(frozen=True)
class Verdict:
    """One judged claim, as a row of the report.

    ``claim`` names what is claimed, ``place`` where that was said, ``advertised`` what was said.
    ``witnessed`` says in a few words what was seen, ``witness`` who saw it. ``phase`` is the window that the
    evidence comes from. ``reason`` explains every verdict but ``held`` in one sentence. ``case`` names the
    model and the placement that were tried, ``issue`` the report that this verdict helps to decide.
    """

    state: State
    claim: str
    place: str
    advertised: str
    witnessed: str
    witness: str
    phase: str | None = None
    reason: str = ""
    case: str = ""
    issue: str = ""


class Settle(Protocol):
    """Records the verdicts of a case and gives the test that asks its outcome."""

    def __call__(self, case: object, verdicts: Iterable[Verdict]) -> None:
        """Record ``verdicts`` under the name of ``case``; a broken one fails, an unshown one skips."""
