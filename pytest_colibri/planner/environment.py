"""The environment that makes an engine follow a plan; what the user set always wins.

Thread affinity (``OMP_PROC_BIND``, ``OMP_PLACES``) is never exported: it put all threads on one core.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pytest_colibri.planner import masks
from pytest_colibri.planner.plan import DeviceShare, PlanRequest
from pytest_colibri.profiles.model import Backend

Part = Literal["dense weights", "attention"]

RESIDENT_PARTS: Mapping[Backend, Mapping[str, Part]] = {
    "vulkan": {"COLI_VK_DENSE": "dense weights", "COLI_VK_ATTN": "attention"},
    "cuda": {"CUDA_DENSE": "dense weights", "COLI_CUDA_ATTN": "attention"},
    "rocm": {"CUDA_DENSE": "dense weights", "COLI_CUDA_ATTN": "attention"},
}

SWITCHES: Mapping[Backend, str] = {
    "cuda": "COLI_CUDA",
    "rocm": "COLI_CUDA",
    "vulkan": "COLI_VULKAN",
    "metal": "COLI_METAL",
}


ENGINE_VARIABLES = (
    "COLI_",
    "CUDA_",
    "HIP_VISIBLE_DEVICES",
    "RAM_GB",
    "PIN",
    "REPIN",
    "DRAFT",
    "PIPE",
    "OMP_NUM_THREADS",
)


def engine_variables(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables of a process that speak to an engine: the user's own values, which win."""
    return {name: value for name, value in environment.items() if name.startswith(ENGINE_VARIABLES)}


def planned_accelerators(request: PlanRequest) -> masks.Numbered:
    """Return the devices to plan for, in the order of the request, each with the engine's number for it.

    None where the user switched the backend off; else those that masks and choices leave.
    """
    if switched_off(request):
        return ()
    asked = [pair for pair in visible(request).devices if pair[1] in request.accelerators]
    return tuple(sorted(asked, key=lambda pair: request.accelerators.index(pair[1])))


def visible(request: PlanRequest) -> masks.Visible:
    """Return what masks and choices in the request's environment leave of all devices that are known."""
    asked = [device.identity for device in request.accelerators]
    others = [
        device
        for device in request.host.accelerators
        if device.identity.api == request.backend and device.identity not in asked
    ]
    return masks.visible_devices(request.backend, (*request.accelerators, *others), request.environment)


def switched_off(request: PlanRequest) -> bool:
    """Tell whether the user's own environment turns the backend off."""
    return request.environment.get(SWITCHES.get(request.backend, "")) == "0"


def resident_parts(request: PlanRequest) -> Mapping[str, Part]:
    """Map each variable of the user that puts more than experts on the devices to what it puts there."""
    return {
        name: part
        for name, part in RESIDENT_PARTS.get(request.backend, {}).items()
        if request.environment.get(name, "").strip() not in ("", "0")
    }


def working_devices(devices: Sequence[DeviceShare]) -> tuple[DeviceShare, ...]:
    """Return the devices that the engine is told about.

    Those with a budget; where none has one, the first with usable memory, whose tier starts empty.
    """
    with_budget = tuple(share for share in devices if share.taken_bytes > 0)
    return with_budget or tuple(share for share in devices if share.usable.bytes)[:1]


def planned_environment(
    request: PlanRequest,
    ram_budget_bytes: int,
    devices: Sequence[DeviceShare],
    hot_count: int,
    tune: Mapping[str, tuple[str, str]],
) -> Mapping[str, str]:
    """Return what the plan asks for, before the user's own values."""
    planned = {
        "COLI_POLICY": request.policy,
        "OMP_NUM_THREADS": str(request.host.processor.physical_cores),
        "RAM_GB": gigabytes(ram_budget_bytes),
    }
    if request.policy == "balanced":
        planned["REPIN"] = "64"
    planned.update((name, value) for name, (value, _) in tune.items() if not name.startswith("_"))
    planned.update(gpu_environment(request, working_devices(devices), hot_count))
    return planned


def gpu_environment(
    request: PlanRequest, devices: Sequence[DeviceShare], hot_count: int
) -> Mapping[str, str]:
    """Return the variables of the backend; none without a device to work on."""
    if not devices:
        return {}
    switch = {SWITCHES[request.backend]: "1"}
    if request.backend == "vulkan":
        return {**switch, "COLI_VK_EXPERTS": str(hot_count)}
    if request.backend in ("cuda", "rocm"):
        return {**switch, **cuda_environment(request.environment, devices)}
    return switch


def cuda_environment(user: Mapping[str, str], devices: Sequence[DeviceShare]) -> Mapping[str, str]:
    """Return the variables that CUDA and HIP builds read beside their switch."""
    budget = gigabytes(sum(share.budget_bytes for share in devices))
    planned = {"CUDA_EXPERT_GB": budget, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if not {"COLI_GPU", "COLI_GPUS"} & user.keys():
        indices = [str(share.number) for share in devices]
        planned["COLI_GPU" if len(indices) == 1 else "COLI_GPUS"] = ",".join(indices)
    if "PIN" in user:
        planned["PIN_GB"] = budget
    return planned


def with_user_values(planned: Mapping[str, str], user: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment of the engine: the planned values, replaced and joined by the user's own."""
    return {**planned, **user}


def gigabytes(count: int) -> str:
    """Write a budget in GB with three decimals, rounded down so that no budget grows on export."""
    thousandths = count // 10**6
    return f"{thousandths // 1000}.{thousandths % 1000:03d}"
