"""The embedded planner as a subject like any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest_colibri
from pytest_colibri.container.model import Model, read_model
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
from pytest_colibri.profiles.model import Profile
from pytest_colibri.subjects.planner import PlannerAnswer, PlannerRequest


@dataclass(frozen=True)
class ReferencePlanner:
    """The planner of this package; it reads the recordings of a stage with the parsers of its probes.

    ``profile`` gives the profile of this machine, whose devices it then plans for; without it, for GPUs.
    """

    name: str = "reference"
    origin: str = f"pytest-colibri {pytest_colibri.__version__}"
    profile: Callable[[], Profile] | None = None
    _models: dict[Path, Model] = field(default_factory=dict)

    def ask(self, request: PlannerRequest, stage: Stage | None = None) -> PlannerAnswer:
        """Plan in this process; what the planner explains in a sentence is its refusal."""
        try:
            host = emulate_host(stage.profile) if stage else probe_host(frozenset({request.backend}))
            model = self._read(request.model)
            answer = reference.plan(plan_request(request, model, host, self._devices(request, host, stage)))
        except ColibriError as error:
            return PlannerAnswer(refused=str(error))
        return PlannerAnswer(plan_to_json(answer), answer.environment, answer.hot_experts)

    def _devices(self, request: PlannerRequest, host: Host, stage: Stage | None) -> tuple[Accelerator, ...]:
        profile = stage.profile if stage else self.profile() if self.profile else None
        if profile is not None:
            return matching_accelerators(profile, host)
        return tuple(
            device
            for device in host.accelerators
            if device.identity.api == request.backend and not device.is_software
        )

    def _read(self, folder: Path) -> Model:
        if folder not in self._models:
            self._models[folder] = read_model(folder)
        return self._models[folder]


def plan_request(
    asked: PlannerRequest, model: Model, host: Host, devices: Sequence[Accelerator]
) -> PlanRequest:
    """Return what is asked together with what is known: the model, the machine, and its ``devices``.

    Of these, ``gpu_indices`` and the backend ``cpu`` leave some, or none.
    """
    if asked.physical_cores is not None:
        host = replace(host, processor=replace(host.processor, physical_cores=asked.physical_cores))
    wanted = asked.gpu_indices
    request = PlanRequest(
        geometry=model.geometry,
        host=host,
        backend=asked.backend,
        accelerators=tuple(
            device
            for device in devices
            if asked.backend != "cpu" and (wanted is None or device.identity.index in wanted)
        ),
        ram_bytes=asked.ram_bytes,
        vram_bytes=asked.vram_bytes,
        context=asked.context,
        kv_slots=asked.kv_slots,
        usage=model.usage,
        environment=asked.environment,
        disk_free=free_disk(asked.model),
    )
    chosen = {name: getattr(asked, name) for name in ("prompt_width", "kv_type", "policy")}
    return replace(request, **{name: value for name, value in chosen.items() if value is not None})
