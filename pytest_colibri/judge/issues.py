"""The registry of public reports: on which kind of machine each was made, and which checks decide it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from pytest_colibri.container.hollow import HOLLOW_MODELS
from pytest_colibri.container.tiny import TINY_MODELS
from pytest_colibri.errors import UsageError
from pytest_colibri.host.matching import matching_accelerators
from pytest_colibri.host.model import Accelerator, Host
from pytest_colibri.judge.model import Verdict
from pytest_colibri.judge.planning import CHECKS, PlanCase
from pytest_colibri.judge.status import Status
from pytest_colibri.profiles.loader import profile_names
from pytest_colibri.profiles.model import Backend, Pool, Profile
from pytest_colibri.profiles.validation import nearest, schema_violations
from pytest_colibri.profiles.yaml import Document, Location, describe_error, read_document
from pytest_colibri.units import format_bytes, parse_bytes

IssueState = Literal["reproduced", "not_reproduced", "inconclusive", "not_applicable"]
Part = Literal["planner", "engine"]

MODELS = (*HOLLOW_MODELS, *TINY_MODELS)
SIZES = ("ram_bytes", "vram_bytes", "available_at_most")


@dataclass(frozen=True)
class MachineKind:
    """On which machines a report can be confirmed; an empty tuple, None or False asks for nothing.

    ``devices`` are shell patterns, one of which must match the name of a device of the profile;
    ``available_at_most`` bounds the available memory (bytes), ``sockets`` is the least number of them.
    ``control_group`` asks for one that limits the memory.
    """

    backends: tuple[Backend, ...] = ()
    pool: Pool | None = None
    systems: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    available_at_most: int | None = None
    sockets: int = 1
    control_group: bool = False

    def mismatch(self, profile: Profile, host: Host) -> str | None:
        """Say what the machine lacks, None when the report can be confirmed on it."""
        return next(self._mismatches(profile, host), None)

    def _mismatches(self, profile: Profile, host: Host) -> Iterator[str]:
        devices = matching_accelerators(profile, host)
        limit = host.memory.limit
        if self.backends and profile.backend not in self.backends:
            yield f"it is about {_either(self.backends)}, and the profile is for {profile.backend}"
        if self.systems and host.system not in self.systems:
            yield f"it is about {_either(self.systems)}, and this machine runs {host.system}"
        if self.devices and not any(_is_named(device, self.devices) for device in devices):
            yield f"it is about devices named {_either(self.devices)}, and this machine has none"
        if self.pool is not None and not {device.pool for device in devices} & {self.pool, None}:
            yield f"it is about {self.pool} memory, which no device of this machine has"
        if self.available_at_most is not None and (limit.bytes or 0) > self.available_at_most:
            most = format_bytes(self.available_at_most)
            yield f"it is about at most {most} of available memory, and this machine has {limit}"
        if host.processor.sockets < self.sockets:
            yield f"it is about {self.sockets} sockets, and this machine has {host.processor.sockets}"
        if self.control_group and host.memory.cgroup_available.bytes is None:
            yield "it is about a control group that limits the memory, and here none does"


def _is_named(device: Accelerator, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(device.identity.name.lower(), pattern.lower()) for pattern in patterns)


def _either(words: Iterable[str]) -> str:
    return " or ".join(words)


@dataclass(frozen=True)
class PlannerCase:
    """One question that decides a report, and the profile of a machine like the reporter's."""

    profile: str
    case: PlanCase


@dataclass(frozen=True)
class Issue:
    """A public report: ``planner`` are the questions that decide its planner half, none where it has none.

    ``engine`` says what a run of the engine must show for its other half, None where it has none. ``link``
    leads to the report, where it is known.
    """

    id: str
    title: str
    machine: MachineKind
    planner: tuple[PlannerCase, ...]
    engine: str | None
    link: str | None


@dataclass(frozen=True)
class IssueResult:
    """What became of one half of a report here, and why."""

    issue: str
    part: Part
    state: IssueState
    reason: str

    def __str__(self) -> str:
        return f"issue {self.issue}, {self.part}: {self.state}: {self.reason}"


def read_issues(path: Path) -> tuple[Issue, ...]:
    """Read the registry.

    Raises UsageError with the place of whatever ``issues.schema.json`` does not allow, of a name that stands
    for no check, model or profile, and of a second report of one name.
    """
    document = read_document(path)
    schema = json.loads(Path(__file__).with_name("issues.schema.json").read_text(encoding="utf-8"))
    if found := schema_violations(document, schema) or list(_unknown_names(document)):
        raise UsageError("\n".join(found))
    value: Any = document.value
    return tuple(map(_issue, value["issues"]))


def _unknown_names(document: Document) -> Iterator[str]:
    value: Any = document.value
    ids = [entry["id"] for entry in value["issues"]]
    profiles = profile_names()
    for number, entry in enumerate(value["issues"]):
        here: Location = ("issues", number)
        if entry["id"] in ids[:number]:
            yield _describe(document, (*here, "id"), f"a second report {entry['id']}", "each once")
        for question, case in enumerate(entry.get("planner", ())):
            there = (*here, "planner", question)
            if case["profile"] not in profiles:
                what = f"unknown profile {case['profile']}{nearest(case['profile'], profiles)}"
                yield _describe(document, (*there, "profile"), what, "see pytest-colibri profiles")
            if case["model"] not in MODELS:
                what = f"unknown model {case['model']}{nearest(case['model'], MODELS)}"
                yield _describe(document, (*there, "model"), what, "see pytest-colibri model")
            for key in ("checks", "given"):
                for place, check in enumerate(case.get(key, ())):
                    if check not in CHECKS:
                        what = f"unknown check {check}{nearest(check, CHECKS)}"
                        yield _describe(document, (*there, key, place), what, "see docs/plan-checks.md")


def _describe(document: Document, location: Location, what: str, allowed: str) -> str:
    return describe_error(document.path, document.value_marks[location], what, allowed)


def select_issues(issues: Sequence[Issue], names: Iterable[str]) -> tuple[Issue, ...]:
    """Return the reports that were asked for, each once; UsageError for a name that none of them has."""
    known = {issue.id: issue for issue in issues}
    for name in names:
        if name not in known:
            raise UsageError(f"--issue={name}: unknown{nearest(name, known)}; allowed: {', '.join(known)}")
    return tuple(known[name] for name in dict.fromkeys(names))


def issue_results(
    issue: Issue,
    verdicts: Collection[Verdict],
    mismatch: str | None,
    silence: str | None,
    *,
    unasked: int,
    emulated: bool,
) -> Iterator[IssueResult]:
    """Say what became of each half of a report.

    ``mismatch`` is why it cannot be confirmed on the machine of this session, ``silence`` why its checks say
    nothing there, ``unasked`` how many of its questions were left out. On an emulated host no engine runs: a
    report with a planner half is decided by that alone.
    """
    if issue.planner:
        yield IssueResult(issue.id, "planner", *_planner_state(issue, verdicts, mismatch or silence, unasked))
    if issue.engine is not None and mismatch is not None:
        yield IssueResult(issue.id, "engine", "not_applicable", mismatch)
    elif issue.engine is not None:
        missing = "no engine runs on an emulated host" if emulated else "no run of this version shows it"
        yield IssueResult(issue.id, "engine", "inconclusive", f"{missing}; it would have to: {issue.engine}")


def _planner_state(
    issue: Issue, verdicts: Collection[Verdict], not_applicable: str | None, unasked: int
) -> tuple[IssueState, str]:
    own = [verdict for verdict in verdicts if verdict.issue == issue.id]
    if broken := [verdict for verdict in own if verdict.state == "broken"]:
        return "reproduced", _in_words(broken)
    if unshown := [verdict for verdict in own if verdict.state != "held"]:
        return "inconclusive", _in_words(unshown)
    if own and unasked:
        return "inconclusive", f"questions left out: {unasked}; of the others: {_in_words(own)}"
    if own:
        return "not_reproduced", _in_words(own)
    if not_applicable is not None:
        return "not_applicable", not_applicable
    return "inconclusive", "none of its checks was run"


def _in_words(verdicts: Iterable[Verdict]) -> str:
    """Name the checks of each case together where they have one reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for verdict in verdicts:
        groups.setdefault((verdict.case, verdict.reason or verdict.advertised), []).append(verdict.claim)
    return "; ".join(f"{case}: {', '.join(claims)}: {reason}" for (case, reason), claims in groups.items())


STATUSES: Mapping[IssueState, Status] = {
    "reproduced": Status.BROKEN,
    "inconclusive": Status.NOTHING_SHOWN,
    "not_applicable": Status.HOST_MISMATCH,
    "not_reproduced": Status.HELD,
}


def conclude_issues(results: Sequence[IssueResult], *, emulated: bool) -> tuple[Status, str]:
    """Return the status of a run that asked for reports: the worst result, in the order of STATUSES.

    An emulated run speaks of plans only, so that the engine half of a report with two halves does not count.
    """
    planned = {result.issue for result in results if result.part == "planner"}
    counting = [
        result for result in results if not (emulated and result.part == "engine" and result.issue in planned)
    ]
    states = [result.state for result in counting]
    worst = min(states, key=list(STATUSES).index)
    counts = ", ".join(f"{states.count(state)} {state}" for state in STATUSES if state in states)
    alone = ", on an emulated host: this speaks of plans only" if emulated else ""
    return STATUSES[worst], f"issues: {counts}{alone}"


def _issue(entry: Mapping[str, Any]) -> Issue:
    name = entry["id"]
    return Issue(
        id=name,
        title=entry["title"],
        machine=MachineKind(**_values(entry.get("machine", {}))),
        planner=tuple(
            PlannerCase(case["profile"], _plan_case(name, case)) for case in entry.get("planner", ())
        ),
        engine=entry.get("engine"),
        link=entry.get("link"),
    )


def _plan_case(issue: str, entry: Mapping[str, Any]) -> PlanCase:
    return PlanCase(
        name=f"{issue}: {entry['model']}",
        model=entry["model"],
        request=_values(entry.get("request", {})),
        checks=tuple(entry["checks"]),
        given=tuple(entry.get("given", ())),
        issue=issue,
    )


def _values(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a section with sizes in bytes, and lists as tuples."""
    return {
        key: parse_bytes(value) if key in SIZES else tuple(value) if isinstance(value, list) else value
        for key, value in section.items()
    }
