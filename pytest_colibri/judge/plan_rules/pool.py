"""Rules about memory: the limit, the reserve, and each physical pool counted once."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_colibri.claims.plan import PlanStatement
from pytest_colibri.judge.plan_rules.rule import rule, stated
from pytest_colibri.planner.plan import PlanRequest
from pytest_colibri.units import format_bytes


def has_shared_device(request: PlanRequest) -> bool:
    """Tell whether a device may take its bytes from the RAM; where that is unknown, it may."""
    return any(device.pool != "discrete" for device in request.accelerators)


@rule("one pool is counted once", applies=has_shared_device)
def pool_is_counted_once(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """The RAM budget and what devices take from the same memory fit what is available."""
    limit = request.host.memory.limit
    if limit.bytes is None:
        return
    ram = stated(statement.ram_budget_bytes, "a RAM budget")
    vram = stated(statement.vram_budget_bytes, "a VRAM budget")
    if ram + vram > limit.bytes:
        yield (
            f"RAM {format_bytes(ram)} + VRAM {format_bytes(vram)} = {format_bytes(ram + vram)} of one pool, "
            f"of which {limit} is available"
        )
