"""Whether a planner that makes no plan is right: nothing that fits may be refused."""

from __future__ import annotations

from pytest_colibri.errors import ColibriError
from pytest_colibri.judge.plan_rules.pool import POOL_PERCENT, least_available_bytes
from pytest_colibri.judge.plan_rules.tiers import has_residents
from pytest_colibri.planner import budgets, runtime
from pytest_colibri.planner.plan import PlanRequest
from pytest_colibri.units import format_bytes


def least_ram_bytes(request: PlanRequest) -> int | None:
    """Return what a run needs at least: dense weights, runtime, one slot per sparse layer; None if unknown.

    It is unknown for a model whose family or config has no memory rules.
    """
    try:
        parts = runtime.runtime_parts(request)
    except ColibriError:
        return None
    return budgets.ram_floor(request.geometry, sum(part.bytes or 0 for part in parts.values()))


def why_refusal_is_open(request: PlanRequest) -> str | None:
    """Return why nothing tells whether refusing is right, None where something does."""
    if request.host.memory.limit.bytes is None:
        return f"what is available is unknown ({request.host.memory.limit.source})"
    if least_ram_bytes(request) is None:
        return "no rule tells what this model needs at least"
    if has_residents(request):
        return "dense weights or attention are asked for on the devices, where they may not fit"
    return None


def refusal_is_right(request: PlanRequest) -> str | None:
    """Return why a plan should have been made, None where refusing is right or nothing tells.

    A plan may use the RAM budget that is asked for, where that is available; else all but the reserve.
    """
    needed = least_ram_bytes(request)
    if needed is None or why_refusal_is_open(request):
        return None
    there, asked = least_available_bytes(request), request.ram_bytes
    room = there * POOL_PERCENT // 100 if asked is None or asked > there else asked
    if needed > room:
        return None
    return (
        f"dense weights, runtime and one slot per sparse layer need {format_bytes(needed)}, and "
        f"{format_bytes(room)} may be taken of {request.host.memory.limit}"
    )
