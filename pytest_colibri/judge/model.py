"""Verdicts: what became of a claim once the evidence was held against it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["held", "broken", "unwitnessed", "not_claimed"]


@dataclass(frozen=True)
class Verdict:
    """One judged claim, as a row of the report.

    ``witnessed`` says in a few words what was seen, ``witness`` who saw it. ``phase`` is the window that the
    evidence comes from. ``reason`` explains every verdict but ``held`` in one sentence.
    """

    state: State
    claim: str
    place: str
    advertised: str
    witnessed: str
    witness: str
    phase: str | None = None
    reason: str = ""
