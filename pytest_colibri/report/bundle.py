"""The evidence of a session as one JSON file: everything that a verdict was reached from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest_colibri
from pytest_colibri.errors import UsageError
from pytest_colibri.host.model import Host
from pytest_colibri.judge.issues import IssueResult
from pytest_colibri.judge.model import Verdict
from pytest_colibri.judge.planning import PlanTrial
from pytest_colibri.judge.trial import Trial
from pytest_colibri.planner.exchange import plan_to_json
from pytest_colibri.profiles.model import Profile
from pytest_colibri.subjects.planner import PlannerSubject
from pytest_colibri.witness.evidence import Reach

VERSION = 1


def trial_to_json(trial: Trial) -> dict[str, object]:
    """Return all of a trial as JSON values, but for the memory samples, of which the extremes are kept."""
    memory = trial.memory
    return {
        "case": str(trial.case),
        "plan": plan_to_json(trial.plan),
        "output": to_json(trial.output),
        "claims": to_json(trial.statement.claims),
        "telemetry": to_json(trial.statement.telemetry),
        "unparsed": to_json(trial.statement.unparsed),
        "reach": to_json(trial.sighting.reach),
        "dispatch": to_json(trial.sighting.evidence),
        "memory": {
            "witness": memory.witness,
            "samples": len(memory.samples),
            "peak_tree_bytes": memory.peak_tree_bytes,
            "peak_proportional_bytes": memory.peak_proportional_bytes,
            "least_available_bytes": memory.least_available_bytes,
            "floor_bytes": memory.floor_bytes,
            "stopped_at_floor": memory.stopped_at_floor,
        },
        "due": to_json(trial.due),
        "model_changes": list(trial.model_changes),
    }


def plan_trial_to_json(trial: PlanTrial) -> dict[str, object]:
    """Return what was asked of a planner and what it answered, as JSON values."""
    return {
        "case": str(trial),
        "profile": trial.profile.name,
        "request": to_json(trial.request),
        "answer": to_json(trial.answer),
    }


def write_bundle(
    path: Path,
    options: Sequence[str],
    planner: PlannerSubject,
    machines: Iterable[tuple[Profile, Host]],
    reaches: Iterable[Reach],
    verdicts: Iterable[Verdict],
    trials: Iterable[Mapping[str, object]],
    plans: Iterable[Mapping[str, object]],
    issues: Iterable[IssueResult],
    conclusion: tuple[int, str],
    redact: Callable[[object], object],
) -> None:
    """Write the evidence file; :class:`UsageError` when it cannot be written.

    ``options`` are those that were set, ``planner`` is the one that was judged, ``conclusion`` is the exit
    status and its sentence. Everything passes through ``redact`` first.
    """
    status, sentence = conclusion
    bundle: object = {
        "version": VERSION,
        "pytest_colibri": pytest_colibri.__version__,
        "status": int(status),
        "conclusion": sentence,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "options": list(options),
        "planner": {"name": planner.name, "origin": planner.origin},
        "machines": [_machine(profile, host) for profile, host in machines],
        "witnesses": to_json(tuple(reaches)),
        "verdicts": to_json(tuple(verdicts)),
        "trials": list(trials),
        "plans": list(plans),
        "issues": to_json(tuple(issues)),
    }
    try:
        path.write_text(json.dumps(redact(bundle), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: the evidence cannot be written: {error.strerror}") from None


def _machine(profile: Profile, host: Host) -> dict[str, object]:
    return {
        "profile": {"name": profile.name, "file": str(profile.path), "backend": profile.backend},
        "host": to_json(host),
    }


def to_json(value: object) -> object:
    """Turn frozen values into JSON values: dataclasses to objects, tuples to lists, keys to strings."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value
