"""Public reports, judged as ``pytest --emulate --issue=ID`` judges them, of a planner with a seeded fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Protocol

from pytest_colibri.container.hollow import write_hollow_model
from pytest_colibri.host.emulated import emulate_host
from pytest_colibri.host.model import Host
from pytest_colibri.host.stage import Stage
from pytest_colibri.judge.issues import Issue, IssueState, issue_results, read_issues
from pytest_colibri.judge.model import Verdict
from pytest_colibri.judge.plan_rules import RULES
from pytest_colibri.judge.planning import ANSWERS, REFUSAL, PlanTrials
from pytest_colibri.profiles.loader import find_profile
from pytest_colibri.profiles.model import Profile
from pytest_colibri.subjects.planner import PlannerAnswer, PlannerRequest
from pytest_colibri.subjects.reference_planner import ReferencePlanner
from pytest_colibri.suite import registry_file

CHECK_OF_CLAIM = {
    "planner answers": ANSWERS,
    "refusal": REFUSAL,
    **{rule.title: rule.name for rule in RULES.values()},
}


class Applicable(Protocol):
    """A fault that can be applied for a while."""

    def applied(self) -> AbstractContextManager[None]:
        """Replace parts of the embedded planner."""


@dataclass
class FaultyPlanner:
    """The embedded planner, with a fault while it is asked; where a program would crash, it fails."""

    name: str = "faulty"
    origin: str = "a seeded fault"
    fault: Applicable | None = None
    _planner: ReferencePlanner = field(default_factory=ReferencePlanner)

    def ask(self, request: PlannerRequest, stage: Stage | None = None) -> PlannerAnswer:
        """Ask the embedded planner."""
        try:
            with nullcontext() if self.fault is None else self.fault.applied():
                return self._planner.ask(request, stage)
        except Exception as error:  # whatever ends a planner, it gives no answer
            return PlannerAnswer(failed=f"the planner ends with {error!r}")


@dataclass(frozen=True)
class Outcome:
    """What became of a report; ``broken`` are the (place of the question, check) that found a fault."""

    state: IssueState
    broken: frozenset[tuple[int, str]]


class IssueTrials:
    """Asks the embedded planner what decides a report; models and stages are written to ``folder`` once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._planner = FaultyPlanner()
        self._trials = PlanTrials(self._planner, folder, emulated=True)

    def outcome(self, issue: Issue, fault: Applicable | None = None) -> Outcome:
        """Return what becomes of the planner half of a report."""
        self._planner.fault = fault
        by_question = [tuple(self._judge(issue, place)) for place in range(len(issue.planner))]
        verdicts = [verdict for verdicts in by_question for verdict in verdicts]
        result = next(iter(issue_results(issue, verdicts, None, None, unasked=0, emulated=True)))
        broken = frozenset(
            (place, CHECK_OF_CLAIM[verdict.claim])
            for place, verdicts in enumerate(by_question)
            for verdict in verdicts
            if verdict.state == "broken"
        )
        return Outcome(result.state, broken)

    def _judge(self, issue: Issue, place: int) -> Iterator[Verdict]:
        question = issue.planner[place]
        profile, host = machine(question.profile)
        if issue.machine.mismatch(profile, host) is None:
            yield from self._trials.judge(question.case, profile, host, self._model(question.case.model), {})

    def _model(self, name: str) -> Path:
        folder = self._folder / "models" / name
        return folder if folder.is_dir() else write_hollow_model(folder, name)


@cache
def machine(name: str) -> tuple[Profile, Host]:
    """Return the machine that a profile recorded."""
    profile = find_profile(name)
    return profile, emulate_host(profile)


def planner_issues() -> tuple[Issue, ...]:
    """Return the reports that a planner decides, or a half of them."""
    return tuple(issue for issue in read_issues(registry_file()) if issue.planner)


def checks_of(issue: Issue) -> frozenset[tuple[int, str]]:
    """Return all that can find a report: (place of the question, check)."""
    return frozenset(
        (place, check) for place, question in enumerate(issue.planner) for check in question.case.checks or ()
    )
