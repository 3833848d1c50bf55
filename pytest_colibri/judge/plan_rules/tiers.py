"""Rules about the memory of devices: what a tier may take of it, and what else lies there."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_colibri.claims.plan import DeviceStatement, PlanStatement
from pytest_colibri.host.model import Accelerator
from pytest_colibri.judge.plan_rules.devices import has_device
from pytest_colibri.judge.plan_rules.found import (
    DEVICE_RESERVE_BYTES,
    free_memory,
    planned_devices,
    share_of,
    shares_ram,
    taken_bytes,
    usable_accelerators,
    usable_bytes,
)
from pytest_colibri.judge.plan_rules.rule import Unstated, rule, stated
from pytest_colibri.judge.plan_rules.runtime import prompt_bytes
from pytest_colibri.planner.plan import PlanRequest
from pytest_colibri.units import format_bytes

TOLERATED_PERCENT = 5


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
    if statement.vram_budget_bytes and not statement.devices:
        raise Unstated("the plan does not state which devices its VRAM budget is for")
    for device, found in planned_devices(statement, request):
        if found is None or not _memory_is_unknown(found, request):
            continue
        taken = usable_bytes(device, statement)
        if taken:
            yield f"{device.name} has {format_bytes(taken)} usable, and its free memory is {found.free}"


@rule("devices keep a reserve", applies=has_device)
def devices_keep_their_reserve(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """Usable is at most free - reserve, of one heap; a card keeps at least 2 GB, or what its prompt needs."""
    for device, found in planned_devices(statement, request):
        free = None if found is None else _free_bytes(device, found)
        if found is None or free is None:
            continue
        least = 0 if shares_ram(found) else max(DEVICE_RESERVE_BYTES, prompt_bytes(request))
        room = max(0, free - max(least, device.reserve_bytes or 0))
        usable = usable_bytes(device, statement)
        if usable > room:
            yield f"{device.name} has {usable} B usable, more than free less reserve, {room} B"


def _free_bytes(device: DeviceStatement, found: Accelerator) -> int | None:
    """Return what is free on a device: as the plan says, where that differs little from what we found."""
    bound = share_of(found).bytes
    if bound is None or device.free_bytes is None:
        return bound
    differs = device.free_bytes > bound * (100 + TOLERATED_PERCENT) // 100
    return bound if differs else device.free_bytes


@rule("free memory is within the total")
def free_is_within_total(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:  # noqa: ARG001
    """A source that gives more free memory than there is cannot be used."""
    for device in statement.devices:
        free, total = device.free_bytes, device.total_bytes
        usable = usable_bytes(device, statement)
        if usable and free is not None and total is not None and free > total:
            yield f"{device.name} has {usable} B usable, with {free} B free of {total} B"


def has_own_memory(request: PlanRequest) -> bool:
    """Tell whether an automatic tier may fill devices with memory of their own."""
    own = [device for device in usable_accelerators(request) if not shares_ram(device)]
    return bool(own) and bool(request.geometry.layers) and request.vram_bytes is None


@rule("an automatic tier uses its devices", applies=has_own_memory)
def tier_uses_devices(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """An automatic tier takes what free memory and reserves allow, up to all experts."""
    granted = statement.vram_budget_bytes + (statement.resident_bytes or 0)
    reserves = {found: device.reserve_bytes for device, found in planned_devices(statement, request) if found}
    devices = usable_accelerators(request)
    rooms = [
        max(0, (free_memory(device).bytes or 0) - max(DEVICE_RESERVE_BYTES, reserves.get(device) or 0))
        for device in devices
    ]
    possible = min(request.geometry.expert_bytes, sum(rooms))
    # Whole experts leave less than one idle on each device.
    least = possible * (100 - TOLERATED_PERCENT) // 100 - len(devices) * request.geometry.widest
    if granted < least:
        names = ", ".join(device.identity.name for device in devices)
        yield f"a tier of {format_bytes(granted)}, and {names} can hold {format_bytes(possible)}"


@rule("tiers fit their devices")
def budgets_fit_devices(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:  # noqa: ARG001
    """What devices take is at most their usable memory; their budgets together are the VRAM budget."""
    total = statement.vram_budget_bytes
    budgets = [device.budget_bytes for device in statement.devices if device.budget_bytes is not None]
    if len(budgets) == len(statement.devices) and sum(budgets) != total:
        yield f"VRAM budget of {total} B, and the devices give {sum(budgets)} B"
    for device in statement.devices:
        taken = taken_bytes(device)
        if taken is not None and device.usable_bytes is not None and taken > device.usable_bytes:
            yield f"{device.name} takes {taken} B, and has {device.usable_bytes} B usable"
    taken = total + (statement.resident_bytes or 0)
    usable = sum(
        stated(device.usable_bytes, f"what {device.name} has usable") for device in statement.devices
    )
    if taken > usable:
        yield f"the devices take {taken} B, and have {usable} B usable"


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
