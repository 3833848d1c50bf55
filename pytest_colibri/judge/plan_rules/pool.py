"""Rules about memory: the limit, the reserve, and each physical pool counted once."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_colibri.claims.plan import PlanStatement
from pytest_colibri.judge.plan_rules.found import share_of, shared_bytes, shared_reserve_bytes, shares_ram
from pytest_colibri.judge.plan_rules.rule import rule, stated
from pytest_colibri.planner.plan import PlanRequest
from pytest_colibri.units import format_bytes

POOL_PERCENT = 88
# The available memory of a machine that runs changes between two readings.
LIVE_PERCENT = 5


def has_shared_device(request: PlanRequest) -> bool:
    """Tell whether a device may take its bytes from the RAM; where that is unknown, it may."""
    return any(map(shares_ram, request.accelerators))


def has_known_limit(request: PlanRequest) -> bool:
    """Tell whether the available memory of the machine is known."""
    return request.host.memory.limit.bytes is not None


def available_bytes(request: PlanRequest) -> int:
    """Return the most that a plan may find available; a live machine was read at another time."""
    return _at_another_time(request, 100 + LIVE_PERCENT)


def least_available_bytes(request: PlanRequest) -> int:
    """Return the least that a plan may find available."""
    return _at_another_time(request, 100 - LIVE_PERCENT)


def _at_another_time(request: PlanRequest, percent: int) -> int:
    limit = request.host.memory.limit.bytes or 0
    return limit * percent // 100 if request.host.kind == "live" else limit


@rule("available memory is there")
def limit_is_physical(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """The limit is no more than the machine, or its control group, leaves; unknown where that is."""
    physical = request.host.memory.limit
    if physical.bytes is None:
        if statement.limit_bytes is not None:
            yield f"limit of {format_bytes(statement.limit_bytes)}, and the machine's is {physical}"
        return
    limit = stated(statement.limit_bytes, "the available memory")
    if limit > available_bytes(request):
        yield f"limit of {format_bytes(limit)} ({limit} B) exceeds {physical}, {physical.bytes} B"


@rule("reserve is kept", applies=has_known_limit)
def reserve_is_kept(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """The plan leaves 12 % of the limit; only an explicit RAM budget beside no shared tier takes of it."""
    ram = statement.ram_budget_bytes
    shared = shared_bytes(statement, request) + shared_reserve_bytes(statement, request)
    limit = available_bytes(request)
    room = limit * POOL_PERCENT // 100
    if request.ram_bytes is not None and not shared:
        room = max(room, min(request.ram_bytes, limit))
    if ram + shared > room:
        yield (
            f"RAM {format_bytes(ram)} + devices in the same memory {format_bytes(shared)} take "
            f"{ram + shared} B, more than {room} B of {request.host.memory.limit}"
        )


@rule("one pool is counted once", applies=has_known_limit)
def pool_is_counted_once(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """The RAM budget and what devices take from the same memory fit what is available."""
    ram = statement.ram_budget_bytes
    shared = shared_bytes(statement, request)
    if ram + shared > available_bytes(request):
        besides = f" + devices in the same memory {format_bytes(shared)} = {ram + shared} B of one pool"
        yield (
            f"RAM {format_bytes(ram)}{besides if shared else ''}, of which {request.host.memory.limit} is "
            "available"
        )


def has_bounded_share(request: PlanRequest) -> bool:
    """Tell whether every device that shares the RAM may take only a part of it, as on Apple."""
    shared = [device for device in request.accelerators if shares_ram(device)]
    return bool(shared) and all(device.total.bytes is not None for device in shared)


@rule("shared tiers fit the devices' share", applies=has_bounded_share)
def shared_tier_fits_its_share(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """What devices take from the RAM is within what the system lets them take (Apple: the working set)."""
    shares = [share_of(device).bytes or 0 for device in request.accelerators if shares_ram(device)]
    taken = shared_bytes(statement, request)
    if taken > sum(shares):
        yield f"devices take {taken} B of the RAM, and their share of it is {sum(shares)} B"
