"""Rules about devices: which ones plan, under which number, and what they can hold."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_colibri.claims.plan import PlanStatement
from pytest_colibri.judge.plan_rules.found import (
    CHOICES,
    engine_numbers,
    known_devices,
    mask_of,
    meant_device,
    planned_devices,
    shares_ram,
    taken_bytes,
    tier_bound,
    usable_accelerators,
    working_devices,
)
from pytest_colibri.judge.plan_rules.rule import Unstated, rule, stated
from pytest_colibri.planner.plan import PlanRequest
from pytest_colibri.units import format_bytes


def has_device(request: PlanRequest) -> bool:
    """Tell whether a device may take experts."""
    return bool(request.accelerators)


@rule("planned devices were asked for", applies=has_device)
def devices_were_asked_for(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """Only devices of the request give memory, each once."""
    asked = list(request.accelerators)
    for device in statement.devices:
        found = meant_device(device, request)
        if device.number is None and found is None:
            raise Unstated(f"the plan does not state which device {device.name} is")
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


def has_usable_device(request: PlanRequest) -> bool:
    """Tell whether a device must get work."""
    return bool(usable_accelerators(request))


@rule("usable devices are found", applies=has_usable_device)
def devices_are_found(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """Every device with memory to use is in the plan, with at least half of it, its reserve included."""
    planned = {found: device for device, found in planned_devices(statement, request) if found}
    for found in usable_accelerators(request):
        name, free = found.identity.name, tier_bound(found, request)
        device = planned.get(found)
        if device is None:
            yield f"{name} is not in the plan, and has {free}"
        elif device.usable_bytes is not None and free.bytes is not None:
            counted = device.usable_bytes + (device.reserve_bytes or 0)
            if 2 * counted < free.bytes:
                yield f"{name} has {format_bytes(device.usable_bytes)} usable in the plan, and has {free}"


@rule("pools are recognised", applies=has_device)
def pools_are_recognised(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """A device that shares the RAM is said to, and no other."""
    for device, found in planned_devices(statement, request):
        if found is None or found.pool is None or device.usable_bytes == 0:
            continue
        unified = stated(device.unified, f"whether {device.name} shares the RAM")
        if unified != (found.pool == "unified"):
            said = "unified" if unified else "discrete"
            yield f"the memory of {device.name} is said to be {said}, and is {found.pool}"


def has_both_kinds(request: PlanRequest) -> bool:
    """Tell whether some usable devices have memory of their own, and others of the machine share the RAM."""
    own = any(not shares_ram(device) for device in usable_accelerators(request))
    return own and any(map(shares_ram, known_devices(request)))


@rule("discrete comes before integrated", applies=has_both_kinds)
def discrete_comes_first(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """No device takes bytes from the RAM while one with memory of its own is idle, whatever their sizes."""
    planned = planned_devices(statement, request)
    working = {found for device, found in planned if found and device in working_devices(statement)}
    idle = [device for device in usable_accelerators(request) if device not in working]
    for device in filter(shares_ram, working):
        for better in idle:
            yield f"{device.identity.name} gets work, and {better.identity.name} with its own memory none"


def has_several_devices(request: PlanRequest) -> bool:
    """Tell whether work can be divided."""
    return len(request.accelerators) > 1


@rule("one device where one suffices", applies=has_several_devices)
def one_device_suffices(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """What fits one device with its own memory is not divided: the way between devices costs more."""
    working = [
        device
        for device, found in planned_devices(statement, request)
        if found and not shares_ram(found) and device in working_devices(statement)
    ]
    largest = max((device.usable_bytes or 0 for device in working), default=0)
    shares = [taken_bytes(device) for device in working]
    total = statement.vram_budget_bytes + (statement.resident_bytes or 0)
    taken = total if None in shares else sum(share or 0 for share in shares)
    if len(working) > 1 and taken <= largest:
        yield f"{taken} B are divided over {len(working)} devices, and one of them has {largest} B usable"


def names_cuda_devices_by_number(request: PlanRequest) -> bool:
    """Tell whether a number can mean different devices: there are several, and no UUIDs stand in a mask."""
    several = len([device for device in known_devices(request) if device.identity.api == "cuda"]) > 1
    mask = mask_of(request) or ""
    return request.backend == "cuda" and several and not mask.lower().startswith("gpu-")


@rule("numbers of CUDA devices mean one order", applies=names_cuda_devices_by_number)
def device_order_is_named(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """CUDA counts the fastest device first, and the vendor's tool by PCI address: the order must be named."""
    if not working_devices(statement):
        return
    environment = {**request.environment, **statement.environment}
    order = environment.get("CUDA_DEVICE_ORDER")
    named = [f"{name}={environment[name]}" for name in CHOICES if environment.get(name)]
    by_uuid = environment.get("CUDA_VISIBLE_DEVICES", "").lower().startswith("gpu-")
    if named and not by_uuid and order != "PCI_BUS_ID":
        yield f"{named[0]} is exported with CUDA_DEVICE_ORDER={order}, and means another device to CUDA"
