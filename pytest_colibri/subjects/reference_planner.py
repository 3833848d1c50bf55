"""The embedded planner as a subject like any other."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pytest_colibri.container.scan import read_geometry
from pytest_colibri.container.usage import USAGE_FILE, read_usage
from pytest_colibri.errors import ColibriError
from pytest_colibri.host.disk import free_disk
from pytest_colibri.host.emulated import emulate_host
from pytest_colibri.host.live import probe_host
from pytest_colibri.host.matching import matching_accelerators
from pytest_colibri.host.model import Accelerator, Host
from pytest_colibri.host.stage import Stage
from pytest_colibri.planner import reference
from pytest_colibri.planner.exchange import plan_to_json
from pytest_colibri.planner.plan import PlanRequest
from pytest_colibri.subjects.planner import PlannerAnswer, PlannerRequest


@dataclass(frozen=True)
class ReferencePlanner:
    """The planner of this package; it reads the recordings of a stage with the parsers of its probes."""

    name: str = "reference"

    def ask(self, request: PlannerRequest, stage: Stage | None = None) -> PlannerAnswer:
        """Plan in this process; what the planner explains in a sentence is its refusal."""
        try:
            answer = reference.plan(_plan_request(request, stage))
        except ColibriError as error:
            return PlannerAnswer(refused=str(error))
        return PlannerAnswer(plan_to_json(answer), answer.environment)


def _plan_request(request: PlannerRequest, stage: Stage | None) -> PlanRequest:
    host = emulate_host(stage.profile) if stage else probe_host(frozenset({request.backend}))
    if request.physical_cores is not None:
        host = replace(host, processor=replace(host.processor, physical_cores=request.physical_cores))
    usage = request.model / USAGE_FILE
    asked = PlanRequest(
        geometry=read_geometry(request.model),
        host=host,
        backend=request.backend,
        accelerators=_accelerators(request, host, stage),
        ram_bytes=request.ram_bytes,
        vram_bytes=request.vram_bytes,
        context=request.context,
        kv_slots=request.kv_slots,
        usage=read_usage(usage) if usage.is_file() else {},
        environment=request.environment,
        disk_free=free_disk(request.model),
    )
    if request.prompt_width is not None:
        asked = replace(asked, prompt_width=request.prompt_width)
    return asked if request.policy is None else replace(asked, policy=request.policy)


def _accelerators(request: PlannerRequest, host: Host, stage: Stage | None) -> tuple[Accelerator, ...]:
    if request.backend == "cpu":
        return ()
    if stage is not None:
        devices = matching_accelerators(stage.profile, host)
    else:
        devices = tuple(
            device
            for device in host.accelerators
            if device.identity.api == request.backend and not device.is_software
        )
    wanted = request.gpu_indices
    return tuple(device for device in devices if wanted is None or device.identity.index in wanted)
