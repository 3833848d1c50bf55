"""Any planner under test, asked about a machine and held against what is known of it without that planner."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pytest_colibri.claims.plan import LONGEST_LINE, BadPlan, PlanStatement, read_plan
from pytest_colibri.container.model import Model, read_model
from pytest_colibri.errors import Unavailable
from pytest_colibri.host.matching import matching_accelerators
from pytest_colibri.host.model import Host
from pytest_colibri.host.stage import Stage
from pytest_colibri.host.tools import printable
from pytest_colibri.judge.model import State, Verdict
from pytest_colibri.judge.plan_rules import RULES, refusal_is_right, why_refusal_is_open
from pytest_colibri.judge.plan_rules.rule import Rule, Unstated
from pytest_colibri.planner.plan import PlanRequest
from pytest_colibri.profiles.model import Profile
from pytest_colibri.subjects.planner import PlannerAnswer, PlannerRequest, PlannerSubject
from pytest_colibri.subjects.reference_planner import plan_request
from pytest_colibri.units import format_bytes

# What is judged of an answer before its plan is: whether there is one, and whether it is right to give none.
ANSWERS, REFUSAL = "planner_answers", "refusal_is_right"
CHECKS = (ANSWERS, REFUSAL, *RULES)
CLAIMS = frozenset(("planner answers", "refusal", *(rule.title for rule in RULES.values())))


@dataclass(frozen=True)
class PlanCase:
    """One question to a planner: a model by its name, and a request; ``request`` has no machine in it.

    ``checks`` are the names of the checks that the answer must pass, None for all that say something here.
    ``issue`` names the report that they decide: where the first of them, or one of ``given``, says nothing
    about a machine, nor do the others; where one of ``given`` is broken, they are not judged.
    """

    name: str
    model: str
    request: Mapping[str, object] = field(default_factory=dict)
    checks: tuple[str, ...] | None = None
    given: tuple[str, ...] = ()
    issue: str = ""


@dataclass(frozen=True)
class PlanTrial:
    """A case that was put to a planner: what was asked about which machine, and what it answered."""

    case: PlanCase
    profile: Profile
    request: PlannerRequest
    answer: PlannerAnswer

    def __str__(self) -> str:
        return f"{self.profile.name}: {self.case.name}"


class PlanTrials:
    """Puts cases to one planner, and judges its answers.

    ``emulated`` shows it the machines that profiles recorded, else it sees this one. ``directory`` receives
    the files of their stages.
    """

    def __init__(self, subject: PlannerSubject, directory: Path, *, emulated: bool) -> None:
        self.subject = subject
        self.done: list[PlanTrial] = []
        self._directory = directory
        self._emulated = emulated
        self._stages: dict[str, Stage] = {}
        self._models: dict[Path, Model] = {}

    def judge(
        self, case: PlanCase, profile: Profile, host: Host, model: Path, environment: Mapping[str, str]
    ) -> tuple[Verdict, ...]:
        """Return a verdict for each check of the case that says something about this machine.

        ``environment`` holds the user's own variables.
        """
        asked = _planner_request(case, profile, model, environment)
        known = plan_request(asked, self._read(model), host, matching_accelerators(profile, host))
        checks = [name for name in case.checks or CHECKS if _says_something(name, known)]
        if case.checks and not all(_says_something(name, known) for name in (case.checks[0], *case.given)):
            return ()
        answer = self._ask(asked, profile)
        verdicts = _judge_answer(answer, known, checks, case.given)
        # The names of hot experts are megabytes, and follow from the history and the figures of the plan.
        trial = PlanTrial(case, profile, asked, replace(answer, hot_experts=None))
        self.done.append(trial)
        return tuple(replace(verdict, case=str(trial), issue=case.issue) for verdict in verdicts)

    def _ask(self, request: PlannerRequest, profile: Profile) -> PlannerAnswer:
        try:
            return self.subject.ask(request, self._stage(profile) if self._emulated else None)
        except Unavailable as error:
            return PlannerAnswer(unsupported=str(error))

    def _stage(self, profile: Profile) -> Stage:
        if profile.name not in self._stages:
            folder = Path(tempfile.mkdtemp(prefix=f"{profile.name}-", dir=self._directory))
            self._stages[profile.name] = Stage(profile, folder)
        return self._stages[profile.name]

    def _read(self, model: Path) -> Model:
        if model not in self._models:
            self._models[model] = read_model(model)
        return self._models[model]


def _planner_request(
    case: PlanCase, profile: Profile, model: Path, environment: Mapping[str, str]
) -> PlannerRequest:
    request = PlannerRequest(model=model, backend=profile.backend)
    request = replace(request, **case.request)  # type: ignore[arg-type]  # the registry checks the kinds
    return replace(request, environment={**environment, **profile.environment, **request.environment})


def _says_something(check: str, request: PlanRequest) -> bool:
    return check not in RULES or RULES[check].applies(request)


def _judge_answer(
    answer: PlannerAnswer, request: PlanRequest, checks: Sequence[str], given: Sequence[str]
) -> list[Verdict]:
    """Judge that there is an answer; then a refusal, or else the plan by its rules."""
    witness = f"{request.host.kind} host"
    if answer.unsupported is not None:
        return [
            Verdict("unwitnessed", "planner answers", "answer", "", "", witness, reason=answer.unsupported)
        ]
    statement, failed = _statement(answer)
    if failed is not None:
        state = _broken_if(ANSWERS in checks)
        return [Verdict(state, "planner answers", "answer", "", "", witness, reason=failed)]
    advertised = f"refuses: {answer.refused}" if statement is None else _in_figures(statement)
    verdicts = []
    if ANSWERS in checks:
        verdicts.append(Verdict("held", "planner answers", "answer", advertised, "an answer", witness))
    if statement is None:
        return [*verdicts, _judge_refusal(advertised, request, counts=REFUSAL in checks)]
    premises = [_judge_rule(RULES[name], statement, request, advertised) for name in given]
    if lacking := [verdict for verdict in premises if verdict.state != "held"]:
        return [replace(verdict, state="unwitnessed") for verdict in lacking]
    rules = [RULES[name] for name in checks if name in RULES]
    return [*verdicts, *(_judge_rule(rule, statement, request, advertised) for rule in rules)]


def _statement(answer: PlannerAnswer) -> tuple[PlanStatement | None, str | None]:
    """Return what the plan states, None for a refusal; and what failed, None where there is an answer."""
    if answer.plan is None:
        return None, answer.failed
    try:
        return replace(read_plan(answer.plan, answer.environment), hot_experts=answer.hot_experts), None
    except BadPlan as error:
        return None, f"the planner gives a plan that cannot be read: {error}"


def _judge_refusal(advertised: str, request: PlanRequest, *, counts: bool) -> Verdict:
    """Judge a refusal; where it is not asked about, it says nothing about a check that needs a plan."""
    would_fit, is_open = refusal_is_right(request), why_refusal_is_open(request)
    state: State = "unwitnessed" if is_open or not counts else "held" if would_fit is None else "broken"
    reason = is_open or would_fit or ("" if counts else "nothing is planned, since the model does not fit")
    witnessed = f"available {request.host.memory.limit}"
    witness = f"{request.host.kind} host"
    return Verdict(state, "refusal", "answer", advertised, witnessed, witness, reason=reason)


def _judge_rule(rule: Rule, statement: PlanStatement, request: PlanRequest, advertised: str) -> Verdict:
    witnessed = f"available {request.host.memory.limit}"
    state: State
    try:
        faults = rule.broken_by(statement, request)
    except Unstated as lack:
        state, reason = "not_claimed", str(lack)
    else:
        # Variables that a planner exports stand in the sentences, and must not write to the terminal.
        lines = [printable(fault, LONGEST_LINE) for fault in faults]
        state, reason = ("broken" if faults else "held"), "; ".join(lines)
    witness = f"{request.host.kind} host"
    return Verdict(state, rule.title, "plan", advertised, witnessed, witness, reason=reason)


def _broken_if(counts: bool) -> State:
    return "broken" if counts else "unwitnessed"


def _in_figures(statement: PlanStatement) -> str:
    ram, vram = format_bytes(statement.ram_budget_bytes), format_bytes(statement.vram_budget_bytes)
    slots = "unknown" if statement.slots_per_layer is None else statement.slots_per_layer
    return f"RAM {ram} + VRAM {vram}, {slots} slots per layer"
