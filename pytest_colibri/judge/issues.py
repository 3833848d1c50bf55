"""The registry of public reports: on which kind of machine each was made, and which checks decide it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pytest_colibri.errors import UsageError
from pytest_colibri.host.matching import matching_accelerators
from pytest_colibri.host.model import Host
from pytest_colibri.judge.model import Verdict
from pytest_colibri.judge.planning import PlanCase
from pytest_colibri.judge.status import Status
from pytest_colibri.profiles.model import Backend, Pool, Profile
from pytest_colibri.profiles.validation import nearest, schema_violations
from pytest_colibri.profiles.yaml import read_document
from pytest_colibri.units import parse_bytes

IssueState = Literal["reproduced", "not_reproduced", "inconclusive", "not_applicable"]
Part = Literal["planner", "engine"]

SIZES = ("ram_bytes", "vram_bytes")


@dataclass(frozen=True)
class MachineKind:
    """On which machines a report can be confirmed; an empty tuple or None asks for nothing."""

    backends: tuple[Backend, ...] = ()
    pool: Pool | None = None

    def mismatch(self, profile: Profile, host: Host) -> str | None:
        """Say what the machine lacks, None when the report can be confirmed on it."""
        if self.backends and profile.backend not in self.backends:
            return f"it is about {' and '.join(self.backends)}, and the profile is for {profile.backend}"
        pools = {device.pool for device in matching_accelerators(profile, host)}
        if self.pool is not None and not pools & {self.pool, None}:
            return f"it is about {self.pool} memory, which no device of this machine has"
        return None


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
    """Read the registry; UsageError with the place of whatever ``issues.schema.json`` does not allow."""
    document = read_document(path)
    schema = json.loads(Path(__file__).with_name("issues.schema.json").read_text(encoding="utf-8"))
    if found := schema_violations(document, schema):
        raise UsageError("\n".join(found))
    value: Any = document.value
    return tuple(map(_issue, value["issues"]))


def select_issues(issues: Sequence[Issue], names: Iterable[str]) -> tuple[Issue, ...]:
    """Return the reports that were asked for, each once; UsageError for a name that none of them has."""
    known = {issue.id: issue for issue in issues}
    for name in names:
        if name not in known:
            raise UsageError(f"--issue={name}: unknown{nearest(name, known)}; allowed: {', '.join(known)}")
    return tuple(known[name] for name in dict.fromkeys(names))


def issue_results(
    issue: Issue, verdicts: Collection[Verdict], mismatch: str | None, silence: str | None, *, emulated: bool
) -> Iterator[IssueResult]:
    """Say what became of each half of a report.

    ``mismatch`` is why it cannot be confirmed on the machine of this session, ``silence`` why its checks say
    nothing there. On an emulated host no engine runs: a report with a planner half is decided by that alone.
    """
    if issue.planner:
        yield IssueResult(issue.id, "planner", *_planner_state(issue, verdicts, mismatch or silence))
    if issue.engine is not None and mismatch is not None:
        yield IssueResult(issue.id, "engine", "not_applicable", mismatch)
    elif issue.engine is not None:
        missing = "no engine runs on an emulated host" if emulated else "no run of this version shows it"
        yield IssueResult(issue.id, "engine", "inconclusive", f"{missing}; it would have to: {issue.engine}")


def _planner_state(
    issue: Issue, verdicts: Collection[Verdict], not_applicable: str | None
) -> tuple[IssueState, str]:
    own = [verdict for verdict in verdicts if verdict.issue == issue.id]
    if broken := [verdict for verdict in own if verdict.state == "broken"]:
        return "reproduced", _in_words(broken)
    if unshown := [verdict for verdict in own if verdict.state != "held"]:
        return "inconclusive", _in_words(unshown)
    if own:
        return "not_reproduced", _in_words(own)
    if not_applicable is not None:
        return "not_applicable", not_applicable
    return "inconclusive", "none of its checks was run"


def _in_words(verdicts: Iterable[Verdict]) -> str:
    return "; ".join(
        f"{verdict.case}: {verdict.claim}: {verdict.reason or verdict.advertised}" for verdict in verdicts
    )


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
    machine = entry.get("machine", {})
    return Issue(
        id=str(entry["id"]),
        title=entry["title"],
        machine=MachineKind(tuple(machine.get("backends", ())), machine.get("pool")),
        planner=tuple(_planner_case(str(entry["id"]), case) for case in entry.get("planner", ())),
        engine=entry.get("engine"),
        link=entry.get("link"),
    )


def _planner_case(issue: str, entry: Mapping[str, Any]) -> PlannerCase:
    request = dict(entry.get("request", {}))
    for key in SIZES:
        if key in request:
            request[key] = parse_bytes(request[key])
    return PlannerCase(
        profile=entry["profile"],
        case=PlanCase(
            name=f"{issue}: {entry['model']}",
            model=entry["model"],
            request={
                key: tuple(value) if isinstance(value, list) else value for key, value in request.items()
            },
            checks=tuple(entry["checks"]),
            issue=issue,
        ),
    )
