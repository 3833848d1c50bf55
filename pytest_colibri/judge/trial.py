"""One case from plan to evidence: planned, run, watched, and put beside the routing of a run on the CPU."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Literal

from pytest_colibri.claims.engine import Statement, read_statement
from pytest_colibri.container.geometry import Geometry
from pytest_colibri.container.model import Model, read_model
from pytest_colibri.container.route_trace import RouteBatch, read_route_trace
from pytest_colibri.container.usage import write_usage
from pytest_colibri.errors import ColibriError
from pytest_colibri.host.disk import free_disk
from pytest_colibri.host.matching import matching_accelerators
from pytest_colibri.host.memory import AvailableMemory
from pytest_colibri.host.model import Accelerator, Host
from pytest_colibri.judge.dispatch import Due, Sighting
from pytest_colibri.judge.ending import out_of_time
from pytest_colibri.judge.memory import judge_plan
from pytest_colibri.judge.tokens import TokenReference
from pytest_colibri.planner import reference as planner
from pytest_colibri.planner.environment import engine_variables
from pytest_colibri.planner.plan import Plan, PlanRequest
from pytest_colibri.profiles.model import Backend, Profile
from pytest_colibri.subjects.program import reference_engine
from pytest_colibri.subjects.protocol import EngineRequest, EngineSubject
from pytest_colibri.units import format_bytes
from pytest_colibri.witness.dispatch import WITNESS, DispatchTracer
from pytest_colibri.witness.evidence import MemoryEvidence, Output, Reach
from pytest_colibri.witness.memory import MemoryGuard
from pytest_colibri.witness.run import watch

Placement = Literal["full", "part", "empty"]
Mode = Literal["generate", "score"]

DEFAULT_NEW_TOKENS = 16
SLOTS: Mapping[Placement, int | None] = {"full": None, "part": 2, "empty": 1}
LOCK_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Case:
    """What is tried: a model, how much of it goes to the fast tiers, and what the engine is asked for.

    ``full`` leaves every expert a place on the device and in RAM; ``part`` gives half of the expert bytes to
    the device and two slots per layer to the RAM; ``empty`` nothing to the device and one slot to the RAM.
    ``reference`` holds the prompt and, where another program computed them, the right tokens.
    """

    name: str
    model: Path
    reference: TokenReference
    placement: Placement
    mode: Mode = "generate"

    def __str__(self) -> str:
        return f"{self.name}-{self.placement}" + ("-score" if self.mode == "score" else "")


@dataclass(frozen=True)
class ReferenceRun:
    """What the embedded engine says of a case on the CPU, and how it routed: one batch per layer and step."""

    statement: Statement
    output: Output
    memory: MemoryEvidence
    routing: tuple[RouteBatch, ...]


@dataclass(frozen=True)
class Trial:
    """A case that was run: the plan, what the engine said, what was seen, and what had to be seen.

    ``model_changes`` names the files of the model folder that came, went or changed during the run.
    """

    case: Case
    plan: Plan
    statement: Statement
    output: Output
    sighting: Sighting
    memory: MemoryEvidence
    reference: ReferenceRun
    model_changes: tuple[str, ...]

    @property
    def routed(self) -> Mapping[str, tuple[RouteBatch, ...]]:
        """The reference routing by phase; the first pass over the layers is the prefill."""
        routing = self.reference.routing
        if self.case.mode == "score":
            return {"score": routing}
        layers = len(self.plan.request.geometry.layers)
        return {"prefill": routing[:layers], "decode": routing[layers:]}

    @property
    def due(self) -> Mapping[str, Due]:
        """For each phase, what the experts were due that the engine says are resident.

        An engine that does not say which experts it holds is taken to hold those that were planned.
        """
        claim = self.statement.claim("resident")
        resident = frozenset(claim.experts if claim else self.plan.hot_experts)
        return {phase: _due(resident, batches) for phase, batches in self.routed.items()}

    @property
    def tokens_wanted(self) -> tuple[tuple[int, ...], str]:
        """The right tokens and who says so: the case's reference, else the embedded engine on the CPU."""
        reference = self.case.reference
        if self.case.mode == "score":
            return reference.best, reference.source
        if reference.generated:
            return reference.generated, reference.source
        return self.reference.statement.tokens, "embedded engine on the CPU"


def _due(resident: frozenset[tuple[int, int]], batches: tuple[RouteBatch, ...]) -> Due:
    routed = [len(resident & experts_of(batch)) for batch in batches]
    return Due(batches=sum(count > 0 for count in routed), experts=sum(routed))


def experts_of(batch: RouteBatch) -> frozenset[tuple[int, int]]:
    """Return the (layer, expert) pairs that a batch needs, each once however many rows chose it."""
    return frozenset((batch.layer, expert) for row in batch.rows for expert, _ in row)


class PlanBroken(ColibriError):
    """The plan breaks its own rules or the machine's, so that no engine is started on it."""


def dispatch_reach(backend: Backend) -> Reach:
    """Say what the dispatch witness can see of a backend on this machine."""
    if backend == "cpu":
        return Reach(WITNESS, False, "not asked: the backend cpu dispatches nothing")
    if backend == "vulkan":
        return DispatchTracer().reach()
    return Reach(
        WITNESS, False, f"counts Vulkan calls only: what is dispatched through {backend} is not seen"
    )


class Trials:
    """Plans and runs the cases of one session; each is run once.

    ``reach`` is what the dispatch witness can see here. ``directory`` receives the files of the runs.
    ``floor_bytes`` replaces the plan's reserve as the availability at which an engine is stopped.
    ``timeout_s`` bounds each run, in seconds.
    """

    def __init__(
        self,
        profile: Profile,
        host: Host,
        subject: EngineSubject,
        directory: Path,
        *,
        reach: Reach,
        floor_bytes: int | None = None,
        timeout_s: float,
    ) -> None:
        self.profile = profile
        self.host = host
        self.subject = subject
        self.accelerators: tuple[Accelerator, ...] = matching_accelerators(profile, host)[:1]
        self.done: list[Trial] = []
        self._directory = directory
        self._reach = reach
        self._floor_bytes = floor_bytes
        self._timeout_s = timeout_s
        self._reference_runs: dict[tuple[Path, Mode], ReferenceRun] = {}
        self._models: dict[Path, Model] = {}

    def plan(self, case: Case) -> Plan:
        """Plan a case for the profile's backend."""
        model = self._model(case.model)
        usage = model.usage
        if not usage:
            routing = self.reference_run(case).routing
            usage = Counter(expert for batch in routing for expert in experts_of(batch))
        user = {**engine_variables(os.environ), **self.profile.environment}
        return self._plan(case, self.profile.backend, usage, user)

    def run(self, case: Case) -> Trial:
        """Run a case, or return its trial if it was run before.

        :class:`PlanBroken` when the plan does not respect the machine: then nothing is started.
        """
        for trial in self.done:
            if trial.case == case:
                return trial
        plan = self.plan(case)
        verdict = judge_plan(plan)
        if verdict.state == "broken":
            raise PlanBroken(f"the engine was not started, since its plan is broken: {verdict.reason}")
        reference = self.reference_run(case)
        before = _files_of(case.model)
        with self._device_lock():
            statement, output, sighting, memory = self._watch(case, plan, self.subject, self._reach)
        changes = sorted(name for name, _ in before ^ _files_of(case.model))
        trial = Trial(
            case, plan, statement, output, sighting, memory, reference, tuple(dict.fromkeys(changes))
        )
        self.done.append(trial)
        return trial

    def reference_run(self, case: Case) -> ReferenceRun:
        """Run the embedded engine on the CPU for a case, once for each model and mode."""
        key = (case.model, case.mode)
        if key not in self._reference_runs:
            self._reference_runs[key] = self._run_reference(replace(case, placement="full"))
        return self._reference_runs[key]

    def _run_reference(self, case: Case) -> ReferenceRun:
        trace = self._new_directory() / "routing.txt"
        plan = self._plan(case, "cpu", usage={}, user={})
        statement, output, _, memory = self._watch(
            case, plan, reference_engine(), dispatch_reach("cpu"), trace
        )
        if output.status != 0:
            last = output.stderr[-1] if output.stderr else f"status {output.status}"
            reason = out_of_time(output) if output.ended == "timeout" else statement.refused or last
            raise ColibriError(
                f"{case.model}: the embedded engine cannot run this model on the CPU: {reason}"
            )
        return ReferenceRun(statement, output, memory, tuple(read_route_trace(trace)))

    def _plan(
        self, case: Case, backend: Backend, usage: Mapping[tuple[int, int], int], user: Mapping[str, str]
    ) -> Plan:
        geometry = self._model(case.model).geometry
        return planner.plan(
            PlanRequest(
                geometry=geometry,
                host=self.host,
                backend=backend,
                accelerators=() if backend == "cpu" else self.accelerators,
                vram_bytes=None if backend == "cpu" else _vram_bytes(case.placement, geometry),
                slots_per_layer=SLOTS[case.placement],
                prompt_width=len(case.reference.full),
                usage=usage,
                environment=user,
                disk_free=free_disk(case.model),
            )
        )

    def _watch(
        self,
        case: Case,
        plan: Plan,
        subject: EngineSubject,
        reach: Reach,
        route_trace: Path | None = None,
    ) -> tuple[Statement, Output, Sighting, MemoryEvidence]:
        directory = self._new_directory()
        request = self._request(case, plan, route_trace, directory)
        launch = replace(subject.launch(request, plan, directory), timeout_s=self._timeout_s)
        tracer = DispatchTracer() if reach.able else None
        floor = plan.reserve_bytes if self._floor_bytes is None else self._floor_bytes
        _check_floor(floor)
        run = watch(launch, tracer=tracer, guard=MemoryGuard(floor_bytes=floor))
        if run.unwitnessed is not None:
            reach = Reach(reach.witness, False, run.unwitnessed)
        statement = read_statement(run.output.stdout, subject.name)
        return statement, run.output, Sighting(reach, run.dispatch), run.memory

    def _request(self, case: Case, plan: Plan, route_trace: Path | None, directory: Path) -> EngineRequest:
        scoring = case.mode == "score"
        usage = directory / "usage"
        write_usage(usage, plan.request.usage)
        return EngineRequest(
            model=case.model,
            prompt=case.reference.prompt,
            new_tokens=0 if scoring else len(case.reference.generated) or DEFAULT_NEW_TOKENS,
            score=case.reference.generated if scoring else (),
            device=_device_name(plan),
            slots_per_layer=plan.slots_per_layer,
            vram_bytes=plan.vram_budget_bytes,
            usage=usage if plan.request.usage else None,
            route_trace=route_trace,
        )

    def _model(self, folder: Path) -> Model:
        """Read a model's headers and history once, before anything can have changed them."""
        if folder not in self._models:
            self._models[folder] = read_model(folder)
        return self._models[folder]

    @contextmanager
    def _device_lock(self) -> Iterator[None]:
        """Let one run at a time use the device, whichever process starts it."""
        if not self.accelerators:
            yield
            return
        from filelock import FileLock, Timeout

        name = sha256(repr(self.accelerators[0].identity).encode()).hexdigest()[:16]
        path = Path(tempfile.gettempdir()) / f"pytest-colibri-{name}.lock"
        # Other users of the machine take turns on the device as well: the file is theirs, too.
        lock = FileLock(path, timeout=LOCK_TIMEOUT_S, mode=0o666)
        try:
            lock.acquire()
        except (OSError, Timeout) as error:
            raise ColibriError(f"the device cannot be locked for this run: {path}: {error}") from None
        try:
            yield
        finally:
            lock.release()

    def _new_directory(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self._directory))


def _files_of(folder: Path) -> frozenset[tuple[str, tuple[int, int]]]:
    """Return the files of a model folder with size and time of change, to see whether a run touches them."""
    found = ((entry.name, entry.stat(follow_symlinks=False)) for entry in os.scandir(folder))
    return frozenset((name, (status.st_size, status.st_mtime_ns)) for name, status in found)


def _check_floor(floor_bytes: int) -> None:
    """Start nothing that would be stopped at once, for want of memory that others have taken."""
    with AvailableMemory() as memory:
        available = memory.read()
    if available is not None and available < floor_bytes:
        raise ColibriError(
            f"no engine was started: {format_bytes(available)} is available, less than the memory floor of "
            f"{format_bytes(floor_bytes)}"
        )


def _vram_bytes(placement: Placement, geometry: Geometry) -> int | None:
    return {"full": None, "part": geometry.expert_bytes // 2, "empty": 0}[placement]


def _device_name(plan: Plan) -> str | None:
    """Name the device by the strongest identity it has, so that no other can be taken for it."""
    if not plan.devices:
        return None
    identity = plan.devices[0].accelerator.identity
    if identity.uuid is not None:
        return f"uuid:{identity.uuid}"
    return f"pci:{identity.pci}" if identity.pci is not None else f"name:{identity.name}"
