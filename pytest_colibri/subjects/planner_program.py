"""Any program that speaks the planner protocol: a request on standard input, an answer on standard output.

See ``docs/planner-protocol.md``.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_colibri.errors import Unavailable
from pytest_colibri.host.stage import Stage
from pytest_colibri.host.tools import MAX_OUTPUT_BYTES, Output, printable, run_tool
from pytest_colibri.planner.environment import engine_variables
from pytest_colibri.planner.exchange import VERSION
from pytest_colibri.subjects.command import parse_command
from pytest_colibri.subjects.planner import PlannerAnswer, PlannerRequest
from pytest_colibri.units import MIB

STDERR_TAIL = 4000
MOST_NESTING = 32

_OUTCOMES = ("plan", "refused", "unsupported")
# They choose among the devices of this machine; those of an emulated one come with the request.
_DEVICE_MASKS = frozenset({"ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"})


@dataclass(frozen=True)
class ProgramPlanner:
    """A planner started as ``command`` for each request, and ended after ``timeout_s`` seconds.

    ``origin`` tells reports where it comes from. ``follows_stage`` tells that it does what a stage describes
    and cannot do for any program.
    """

    name: str
    origin: str
    command: tuple[str, ...]
    follows_stage: bool = False
    timeout_s: float = 60.0

    def ask(self, request: PlannerRequest, stage: Stage | None = None) -> PlannerAnswer:
        """Run the program once, in an empty folder; see :class:`PlannerSubject`."""
        if stage is not None and not (stage.is_complete or self.follows_stage):
            raise Unavailable(f"{self.name} would see a mix of two machines: {stage.reach}")
        with tempfile.TemporaryDirectory(prefix="colibri-planner-") as folder:
            output = run_tool(
                stage.command(self.command) if stage else self.command,
                timeout_s=self.timeout_s,
                environment=_environment(request, stage),
                folder=Path(folder),
                stdin=json.dumps(request_to_json(request)),
            )
        return _read_answer(output, self.timeout_s)


def planner_program(command_line: str, option: str = "--planner") -> ProgramPlanner:
    """Return the program that ``option`` names as a subject; UsageError when it is not there."""
    name, command = parse_command(option, command_line, "docs/planner-protocol.md")
    return ProgramPlanner(name=name, origin=command_line, command=command)


def request_to_json(request: PlannerRequest) -> dict[str, object]:
    """Return the request as values that ``json.dumps`` takes; None is "choose"."""
    return {
        "model": str(request.model.absolute()),
        "backend": request.backend,
        "ram_bytes": request.ram_bytes,
        "vram_bytes": request.vram_bytes,
        "context": request.context,
        "kv_slots": request.kv_slots,
        "kv_type": request.kv_type,
        "prompt_width": request.prompt_width,
        "gpu_indices": None if request.gpu_indices is None else list(request.gpu_indices),
        "physical_cores": request.physical_cores,
        "policy": request.policy,
        "environment": dict(request.environment),
    }


def _environment(request: PlannerRequest, stage: Stage | None) -> Mapping[str, str]:
    """Return this process' variables with those of the user in the request instead of its own."""
    masks = _DEVICE_MASKS if stage else frozenset()
    left_out = engine_variables(os.environ).keys() | masks
    inherited = {
        name: value
        for name, value in os.environ.items()
        # pytest tells in variables which question is being asked; a planner must not answer to that.
        if name not in left_out and not name.startswith("PYTEST_")
    }
    environment = inherited | dict(request.environment)
    return stage.environment(environment) if stage else environment


def _read_answer(output: Output, timeout_s: float) -> PlannerAnswer:
    stderr = output.errors[-STDERR_TAIL:]
    try:
        return _answer(_document(output, timeout_s), stderr)
    except _NoAnswer as error:
        return PlannerAnswer(failed=f"the planner {error}", stderr=stderr)


class _NoAnswer(Exception):
    """What the planner did instead of answering."""


def _document(output: Output, timeout_s: float) -> dict[str, object]:
    """Return the answer of the program; only a refusal may come with a status other than 0."""
    if output.status is None:
        raise _NoAnswer(f"gave no answer within {timeout_s:g} seconds")
    try:
        document = _parsed(output.text)
    except _NoAnswer:
        if output.status == 0:
            raise
        raise _NoAnswer(_ending(output)) from None
    if output.status != 0 and "refused" not in document:
        raise _NoAnswer(_ending(output))
    return document


def _ending(output: Output) -> str:
    lines = output.errors.strip().splitlines()
    said = printable(lines[-1]) if lines else "nothing on standard error"
    status = output.status or 0
    return f"ended by signal {-status}: {said}" if status < 0 else f"ended with status {status}: {said}"


def _parsed(text: str) -> dict[str, object]:
    if not text.strip():
        raise _NoAnswer("wrote nothing to standard output")
    if len(text.encode()) >= MAX_OUTPUT_BYTES:
        raise _NoAnswer(f"wrote more than {MAX_OUTPUT_BYTES // MIB} MiB to standard output")
    shown = repr(printable(text.strip(), 80))
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise _NoAnswer(f"wrote no JSON: {shown}") from None
    if not isinstance(document, dict):
        raise _NoAnswer(f"wrote no JSON object: {shown}")
    if _nests_deeper(document, MOST_NESTING):
        raise _NoAnswer(f"wrote JSON that nests deeper than {MOST_NESTING}: {shown}")
    return document


def _nests_deeper(value: object, allowed: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return allowed < 0 or any(_nests_deeper(item, allowed - 1) for item in inner)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _answer(document: Mapping[str, object], stderr: str) -> PlannerAnswer:
    given = [key for key in _OUTCOMES if document.get(key) is not None]
    if len(given) != 1:
        raise _NoAnswer(f"answered with {' and '.join(given) or 'none'} of {', '.join(_OUTCOMES)}, not one")
    if given == ["plan"]:
        return PlannerAnswer(_plan(document["plan"]), _variables(document.get("environment")), stderr=stderr)
    reason = document[given[0]]
    if not isinstance(reason, str) or not reason.strip():
        raise _NoAnswer(f"gives no sentence as {given[0]!r}")
    sentence = printable(reason, STDERR_TAIL)
    if given == ["refused"]:
        return PlannerAnswer(refused=sentence, stderr=stderr)
    return PlannerAnswer(unsupported=sentence, stderr=stderr)


def _plan(plan: object) -> Mapping[str, object]:
    if not isinstance(plan, dict):
        raise _NoAnswer("gives a plan that is no object")
    if plan.get("version") != VERSION:
        raise _NoAnswer(f"gives a plan of version {plan.get('version')!r}; {VERSION} is understood")
    return plan


def _variables(environment: object) -> Mapping[str, str]:
    if not isinstance(environment, dict) or not all(isinstance(value, str) for value in environment.values()):
        raise _NoAnswer("gives no environment of names and texts")
    return environment
