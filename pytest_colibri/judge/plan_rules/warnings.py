"""Rules about what a person must be told, in whatever words."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pytest_colibri.claims.plan import PlanStatement
from pytest_colibri.container.families import BY_MODEL_TYPE
from pytest_colibri.host.devices import physical_devices
from pytest_colibri.host.model import Accelerator
from pytest_colibri.judge.plan_rules.found import (
    asks_for_gpu,
    known_devices,
    lacks_code,
    largest_own_heap,
    planned_devices,
    taken_bytes,
    usable_bytes,
)
from pytest_colibri.judge.plan_rules.rule import rule, stated
from pytest_colibri.judge.plan_rules.telling import names_figures
from pytest_colibri.planner.plan import PlanRequest
from pytest_colibri.units import format_bytes

_GPU = re.compile(r"\b(GPUs?|devices?|accelerators?|cards?)\b", re.IGNORECASE)
_CPU = re.compile(r"\b(CPUs?|processors?|software)\b", re.IGNORECASE)
_DISK = re.compile(r"\b(disks?|SSDs?|NVMe|storage|drives?)\b", re.IGNORECASE)
_VENDOR = re.compile(r"\b(NVIDIA|AMD|Intel|Apple)\b", re.IGNORECASE)


def has_window(request: PlanRequest) -> bool:
    """Tell whether the CPU can write only a part of the memory of a card."""
    return any(_window(device) is not None for device in request.accelerators)


def _window(device: Accelerator) -> tuple[int, int] | None:
    """Return (directly writable bytes, bytes of the heap) where the CPU can write only a part of it."""
    local = largest_own_heap(device).bytes
    if local is None or not device.memory_types:
        return None
    windows = {kind.heap for kind in device.memory_types if kind.device_local and kind.host_visible}
    direct = max((heap.size_bytes for heap in device.heaps if heap.index in windows), default=0)
    return (direct, local) if direct < local else None


def _contradictions(request: PlanRequest) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each device of the request of which interfaces name different processors, with these names."""
    asked = {device.identity for device in request.accelerators}
    for physical in physical_devices(request.host.accelerators):
        names = dict.fromkeys(view.processor for view in physical.views if view.processor)
        if len(names) > 1 and any(view.identity in asked for view in physical.views):
            yield physical.views[0].identity.name, tuple(names)


def has_contradiction(request: PlanRequest) -> bool:
    """Tell whether interfaces contradict each other on a device of the request."""
    return any(_contradictions(request))


@rule("contradictions are told", applies=has_contradiction)
def contradictions_are_told(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """Where interfaces name different processors of one device, a warning names both."""
    for device, names in _contradictions(request):
        told = (line.casefold() for line in statement.warnings)
        if not any(all(name.casefold() in line for name in names) for line in told):
            yield f"{device}: {' and '.join(names)} are names of one processor, and no warning has both"


def has_cpu_device(request: PlanRequest) -> bool:
    """Tell whether a CPU that passes for a device may take experts."""
    return any(device.is_software for device in request.accelerators)


@rule("CPU devices are told", applies=has_cpu_device)
def cpu_devices_are_told(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """A device whose work a CPU does is called a CPU device where it plans."""
    for device, found in planned_devices(statement, request):
        if found is None or not found.is_software:
            continue
        name = device.name.partition("(")[0].strip()  # drivers add their version
        if not any(name in line and _CPU.search(line) for line in statement.warnings):
            yield f"{device.name} plans, and no warning says that a CPU does its work"


@rule("staging is told", applies=has_window)
def staging_is_told(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """Where a tier takes more of a card than the CPU can write, a warning names both figures."""
    for device, found in planned_devices(statement, request):
        window = None if found is None else _window(found)
        if window is None:
            continue
        direct, local = window
        taken = taken_bytes(device) or usable_bytes(device, statement)
        if taken > direct and not names_figures(statement.warnings, direct, local):
            yield (
                f"{device.name}: {format_bytes(direct)} of {format_bytes(local)} are host-visible, and no "
                "warning names both"
            )


@rule("cold misses are told")
def cold_misses_are_told(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:  # noqa: ARG001
    """A plan with experts on the disk says that misses may reach it."""
    cold = stated(statement.cold_bytes, "the bytes of cold experts")
    if cold > 0 and not any(map(_DISK.search, statement.warnings)):
        yield f"{format_bytes(cold)} of experts stay on the disk, and no warning says so"


def lacks_gpu(request: PlanRequest) -> bool:
    """Tell whether a GPU is to work, and none was found."""
    return asks_for_gpu(request) and not request.accelerators


@rule("a missing GPU is told", applies=lacks_gpu)
def missing_gpu_is_told(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """A GPU that is asked for and not found is told, without a vendor's name: others are supported too."""
    lines = [line for line in statement.warnings if _GPU.search(line)]
    if not lines:
        others = ", ".join(device.identity.name for device in known_devices(request)) or "none"
        yield f"a GPU is asked for, those found are: {others}, and no warning says that it is missing"
    elif all(_VENDOR.search(line) for line in lines):
        yield f"the missing GPU is told by a vendor's name: {lines[0]}"


@rule("a backend without code is told", applies=lacks_code)
def missing_code_is_told(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """A device is not promised silently to a family whose engine has no code for the backend."""
    family = BY_MODEL_TYPE[request.geometry.family]
    names = [_letters(name) for name in (family.name, *family.model_types)]
    told = any(name in _letters(line) for line in statement.warnings for name in names)
    if not told and any(device.usable_bytes for device in statement.devices):
        what = f"the engine of {family.name} has no code for {request.backend}"
        yield f"a device plans, {what}, and no warning says so"


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
