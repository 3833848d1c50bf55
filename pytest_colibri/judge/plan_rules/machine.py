"""Rules about what a machine has: none of it is overlooked, and what others use of it is said."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pytest_colibri.claims.plan import PlanStatement
from pytest_colibri.host.model import Accelerator
from pytest_colibri.judge.plan_rules.found import planned_devices, shares_ram, visible_accelerators
from pytest_colibri.judge.plan_rules.pool import POOL_PERCENT, has_known_limit
from pytest_colibri.judge.plan_rules.rule import rule, stated
from pytest_colibri.judge.plan_rules.telling import names_figures
from pytest_colibri.planner.plan import PlanRequest
from pytest_colibri.units import format_bytes

IN_USE_PERCENT = 25


@rule("available memory is found", applies=has_known_limit)
def available_memory_is_found(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """What the plan takes for available is, but for a reserve, what the machine leaves."""
    limit = stated(statement.limit_bytes, "the available memory")
    least = (request.host.memory.limit.bytes or 0) * POOL_PERCENT // 100
    if limit < least:
        yield f"limit of {format_bytes(limit)}, and the machine leaves {request.host.memory.limit}"


def has_visible_device(request: PlanRequest) -> bool:
    """Tell whether the engine can see a GPU."""
    return bool(visible_accelerators(request))


@rule("visible devices are named", applies=has_visible_device)
def devices_are_named(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """Every GPU that the engine can see is in the plan or in a warning, even if it gets no work."""
    planned = {found for _, found in planned_devices(statement, request)}
    for device in visible_accelerators(request):
        name = device.identity.name
        if device not in planned and not any(name in line for line in statement.warnings):
            yield f"{name} is neither in the plan nor in a warning"


def _used_and_total(devices: Iterable[Accelerator]) -> tuple[tuple[int, int], ...]:
    """Return (bytes in use, bytes) of each device with memory of its own of which both are known."""
    return tuple(
        (device.total.bytes - device.free.bytes, device.total.bytes)
        for device in devices
        if not shares_ram(device) and device.total.bytes is not None and device.free.bytes is not None
    )


def _is_much(used_and_total: Iterable[tuple[int, int]]) -> bool:
    return sum(100 * used - IN_USE_PERCENT * total for used, total in used_and_total) > 0


def has_used_devices(request: PlanRequest) -> bool:
    """Tell whether others use a quarter of the devices' own memory, or more."""
    return _is_much(_used_and_total(request.accelerators))


@rule("used device memory is told", applies=has_used_devices)
def used_memory_is_told(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """Where others use a quarter of the memory of the planned devices, warnings say how much.

    Such a plan is one for the rest, and not for what the machine can do.
    """
    found = _used_and_total(device for _, device in planned_devices(statement, request) if device is not None)
    used = [count for count, _ in found]
    each_told = all(names_figures(statement.warnings, count) for count in used)
    if _is_much(found) and not each_told and not names_figures(statement.warnings, sum(used)):
        yield f"{format_bytes(sum(used))} of device memory are in use, and no warning says so"


def has_sockets(request: PlanRequest) -> bool:
    """Tell whether the machine has several sockets, and the user left their memory to the planner."""
    return request.host.processor.sockets > 1 and "COLI_NUMA" not in request.environment


@rule("memory of all sockets is used", applies=has_sockets)
def sockets_share_the_load(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """With several sockets, weights are spread over the memory of all."""
    value = statement.environment.get("COLI_NUMA")
    if value != "1":
        yield f"COLI_NUMA={value or 'unset'}, and the machine has {request.host.processor.sockets} sockets"
