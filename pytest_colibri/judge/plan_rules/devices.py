"""Rules about devices: which ones plan, under which number, and what they can hold."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_colibri.claims.plan import PlanStatement
from pytest_colibri.host.model import Accelerator
from pytest_colibri.judge.plan_rules.found import (
    engine_numbers,
    known_devices,
    largest_own_heap,
    mask_of,
    planned_devices,
    shares_ram,
    taken_bytes,
)
from pytest_colibri.judge.plan_rules.rule import rule, stated
from pytest_colibri.judge.plan_rules.telling import names_figures
from pytest_colibri.planner.plan import PlanRequest
from pytest_colibri.units import GB, format_bytes, smallest

DEVICE_RESERVE_BYTES = 2 * GB


def has_device(request: PlanRequest) -> bool:
    """Tell whether a device may take experts."""
    return bool(request.accelerators)


def _memory_is_unknown(device: Accelerator, request: PlanRequest) -> bool:
    """Tell whether nothing says what a device can take; a chip that shares a known RAM is bounded by that."""
    if device.pool == "unified":
        return request.host.memory.limit.bytes is None
    return device.free.bytes is None


def has_unknown_memory(request: PlanRequest) -> bool:
    """Tell whether the memory of a device is unknown."""
    return any(_memory_is_unknown(device, request) for device in request.accelerators)


@rule("unknown memory drives no tier", applies=has_unknown_memory)
def unknown_drives_no_tier(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """A device of unknown memory takes nothing; nor does one in a pool of unknown size."""
    for device, found in planned_devices(statement, request):
        if found is None or not _memory_is_unknown(found, request):
            continue
        taken = taken_bytes(device) if device.usable_bytes is None else device.usable_bytes
        if taken:
            yield f"{device.name} has {format_bytes(taken)} usable, and its free memory is {found.free}"


@rule("devices keep a reserve", applies=has_device)
def devices_keep_their_reserve(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """Usable is at most free - reserve, of one heap; a device with memory of its own keeps at least 2 GB."""
    for device, found in planned_devices(statement, request):
        if found is None or not device.usable_bytes:
            continue
        least = 0 if shares_ram(found) else DEVICE_RESERVE_BYTES
        reserve = max(least, device.reserve_bytes or 0)
        free = smallest(found.free, found.total, largest_own_heap(found))
        room = None if free.bytes is None else max(0, free.bytes - reserve)
        if room is not None and device.usable_bytes > room:
            yield f"{device.name} has {device.usable_bytes} B usable, more than {free} less reserve, {room} B"


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


@rule("staging is told", applies=has_window)
def staging_is_told(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """Where a tier takes more of a card than the CPU can write, a warning names both figures."""
    for device, found in planned_devices(statement, request):
        window = None if found is None else _window(found)
        if window is None or not device.usable_bytes:
            continue
        direct, local = window
        if (taken_bytes(device) or device.usable_bytes) > direct and not names_figures(
            statement.warnings, direct, local
        ):
            yield (
                f"{device.name}: {format_bytes(direct)} of {format_bytes(local)} are host-visible, and no "
                "warning names both"
            )


@rule("planned devices were asked for", applies=has_device)
def devices_were_asked_for(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """Only devices of the request give memory, each once."""
    asked = list(request.accelerators)
    for device, found in planned_devices(statement, request):
        if found in asked:
            asked.remove(found)
        elif device.usable_bytes != 0:
            allowed = ", ".join(one.identity.name for one in request.accelerators) or "none"
            yield f"{device.name} (number {device.number}) plans, and the devices asked for are: {allowed}"


@rule("devices have the engine's numbers", applies=has_device)
def devices_are_visible(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """The number of a device stands for that device: under a mask, its place there."""
    numbers = engine_numbers(request)
    names = {device.identity.name for device in known_devices(request)}
    mask = mask_of(request)
    under = "without a mask" if mask is None else f"under the mask {mask!r}"
    for device in statement.devices:
        number = stated(device.number, f"the engine's number for {device.name}")
        meant = numbers.get(number)
        if meant is None:
            yield f"{device.name} is number {number} of the plan, and {under} no device has that number"
        elif device.name in names and device.name != meant.identity.name:
            yield f"{device.name} is number {number} of the plan, and {under} that is {meant.identity.name}"


@rule("tiers fit their devices")
def budgets_fit_devices(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:  # noqa: ARG001
    """What devices take is at most their usable memory; their budgets together are the VRAM budget."""
    total = stated(statement.vram_budget_bytes, "a VRAM budget")
    usable = 0
    for device in statement.devices:
        usable += device.usable_bytes or 0
        taken = taken_bytes(device)
        if taken is not None and device.usable_bytes is not None and taken > device.usable_bytes:
            yield f"{device.name} takes {taken} B, and has {device.usable_bytes} B usable"
    if total + (statement.resident_bytes or 0) > usable:
        yield f"the devices take {total + (statement.resident_bytes or 0)} B, and have {usable} B usable"
    budgets = [device.budget_bytes for device in statement.devices if device.budget_bytes is not None]
    if len(budgets) == len(statement.devices) and sum(budgets) != total:
        yield f"VRAM budget of {total} B, and the devices give {sum(budgets)} B"


CUDA_RESIDENTS = {"CUDA_DENSE": "dense weights", "COLI_CUDA_ATTN": "attention"}
RESIDENTS = {
    "vulkan": {"COLI_VK_DENSE": "dense weights", "COLI_VK_ATTN": "attention"},
    "cuda": CUDA_RESIDENTS,
    "rocm": CUDA_RESIDENTS,
}


def _residents(request: PlanRequest) -> frozenset[str]:
    """Return what the user puts on the devices beside experts."""
    return frozenset(
        part
        for name, part in RESIDENTS.get(request.backend, {}).items()
        if request.environment.get(name, "").strip() not in ("", "0")
    )


def has_residents(request: PlanRequest) -> bool:
    """Tell whether the user puts more than experts on the devices."""
    return bool(_residents(request)) and has_device(request)


@rule("dense weights and attention are charged", applies=has_residents)
def residents_are_charged(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """Dense weights and attention that the user puts on the devices are charged there."""
    if not statement.devices:
        return
    charged = stated(statement.resident_bytes, "what lies on the devices beside experts")
    sizes = {
        "dense weights": request.geometry.dense_bytes,
        "attention": sum(
            count or 0
            for name, count in statement.steps.items()
            if name.endswith(("KV cache", "attention workspace"))
        ),
    }
    parts = _residents(request)
    needed = sum(sizes[part] for part in parts)
    if charged < needed:
        yield f"{' and '.join(sorted(parts))} take {needed} B of the devices, and {charged} B are charged"
