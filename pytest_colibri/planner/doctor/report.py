"""The doctor's findings for people and for programs. ``doctor.schema.json`` describes the JSON form."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_colibri.findings import STATES, Finding, State
from pytest_colibri.host.model import Host
from pytest_colibri.planner.exchange import plan_to_json
from pytest_colibri.planner.plan import Plan

VERSION = 1

_INDENT = " " * 10


@dataclass(frozen=True)
class Diagnosis:
    """Everything that the doctor found; ``plan`` is None where no model was given, or none was planned."""

    host: Host
    findings: tuple[Finding, ...]
    plan: Plan | None = None

    @property
    def state(self) -> State:
        """The worst state of the findings."""
        return max((finding.state for finding in self.findings), key=STATES.index, default="ok")


def load_doctor_schema() -> dict[str, Any]:
    """Read the JSON Schema (2020-12) of a diagnosis."""
    text = Path(__file__).with_name("doctor.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def diagnosis_to_json(
    diagnosis: Diagnosis, shown: Callable[[object], object] = lambda value: value
) -> dict[str, object]:
    """Return the diagnosis as values that ``json.dumps`` takes; unknown figures are None.

    ``shown`` rewrites what may hold names of this machine; the words of the schema stay.
    """
    host = diagnosis.host
    return {
        "version": VERSION,
        "state": diagnosis.state,
        "host": {"kind": host.kind, "system": host.system, "architecture": host.architecture},
        "notes": shown(list(host.notes)),
        "findings": [_finding(finding, shown) for finding in diagnosis.findings],
        "plan": None if diagnosis.plan is None else shown(plan_to_json(diagnosis.plan)),
    }


def _finding(finding: Finding, shown: Callable[[object], object]) -> dict[str, object]:
    figures = {
        name: {"bytes": figure.bytes, "source": figure.source} for name, figure in finding.figures.items()
    }
    return {
        "check": finding.check,
        "state": finding.state,
        "sentence": shown(finding.sentence),
        "figures": shown(figures),
        "remedy": shown(finding.remedy),
    }


def diagnosis_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the diagnosis as lines for people."""
    host = diagnosis.host
    yield f"host: {host.kind}, {host.system} on {host.architecture}"
    width = max((len(finding.check) for finding in diagnosis.findings), default=0)
    for finding in diagnosis.findings:
        yield f"{finding.state:<9} {finding.check:<{width}}  {finding.sentence}"
        # The figures of a plan are what `plan --explain` prints.
        for name, figure in finding.figures.items() if not finding.check.startswith("placement") else ():
            yield f"{_INDENT}{'':<{width}}  {name}: {figure}"
        if finding.remedy:
            yield f"{_INDENT}{'':<{width}}  to do: {finding.remedy}"
    for note in host.notes:
        yield f"note      {note}"
    states = Counter(finding.state for finding in diagnosis.findings)
    yield ", ".join(f"{states[state]} {state}" for state in STATES)
