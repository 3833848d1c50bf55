"""Divides RAM and device memory: what each may take before the experts are placed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_colibri.planner import budgets, environment, runtime
from pytest_colibri.planner.plan import DeviceShare, PlanRequest
from pytest_colibri.units import Figure


def offers(request: PlanRequest, limit: Figure) -> tuple[DeviceShare, ...]:
    """Return what each device could give, before any budget; those with memory of their own come first."""
    accelerators = environment.planned_accelerators(request)
    if not accelerators:
        return ()
    scratch = runtime.prompt_scratch_bytes(request.geometry, request.prompt_width)
    shares = []
    for accelerator in sorted(accelerators, key=budgets.shares_ram):
        reserve = budgets.device_reserve(accelerator, scratch)
        usable = budgets.usable_on_device(accelerator, reserve, limit)
        shares.append(DeviceShare(accelerator, reserve, usable, budget_bytes=0))
    return tuple(shares)


def divide(
    request: PlanRequest,
    limit: Figure,
    runtime_bytes: int,
    devices: Sequence[DeviceShare],
    history_bytes: int,
) -> tuple[int, tuple[DeviceShare, ...]]:
    """Return the RAM budget, and the devices with theirs.

    ``history_bytes`` are the experts that a usage history ranks: an automatic tier takes no more than that
    from the RAM, because the rest of it would stay empty while the RAM cache misses it.
    """
    geometry = request.geometry
    own = [share for share in devices if not budgets.shares_ram(share.accelerator)]
    shared = [share for share in devices if budgets.shares_ram(share.accelerator)]
    asked = geometry.expert_bytes if request.vram_bytes is None else request.vram_bytes
    own_budgets = budgets.spread(min(asked, geometry.expert_bytes), usable_bytes(own))
    wanted = min(asked, geometry.expert_bytes) - sum(own_budgets)
    if request.vram_bytes is None:
        wanted = min(wanted, max(0, history_bytes - sum(own_budgets)))

    ram_bytes = ram_budget(request, limit, in_one_pool=bool(shared))
    source = str(limit) if request.ram_bytes is None else f"asked for {request.ram_bytes} B, {limit}"
    budgets.refuse_below_floor(ram_bytes, geometry, runtime_bytes, source)
    vram_bytes = 0
    if wanted and shared and limit.bytes is not None:
        ram_bytes, vram_bytes = budgets.split_unified_pool(
            pool_bytes=budgets.automatic_ram_budget(limit.bytes),
            floor_bytes=budgets.ram_floor(geometry, runtime_bytes),
            asked_ram=request.ram_bytes,
            asked_vram=request.vram_bytes,
            tier_bytes=min(wanted, sum(usable_bytes(shared))),
            scratch=sum(share.reserve_bytes for share in shared if share.usable.bytes is not None),
        )
    shared_budgets = budgets.spread(vram_bytes, usable_bytes(shared))
    return ram_bytes, tuple(
        replace(share, budget_bytes=budget)
        for share, budget in zip((*own, *shared), (*own_budgets, *shared_budgets), strict=True)
    )


def usable_bytes(devices: Sequence[DeviceShare]) -> list[int]:
    """Return the usable bytes of each device, 0 where they are unknown: an unknown figure drives no tier."""
    return [share.usable.bytes or 0 for share in devices]


def ram_budget(request: PlanRequest, limit: Figure, *, in_one_pool: bool) -> int:
    """Return the RAM budget before a GPU tier takes its part of the same pool."""
    if limit.bytes is None:
        return budgets.stated_ram_budget(request.ram_bytes, request.host)
    automatic = budgets.automatic_ram_budget(limit.bytes)
    if request.ram_bytes is None:
        return automatic
    explicit = budgets.explicit_ram_budget(request.ram_bytes, limit.bytes)
    return min(explicit, automatic) if in_one_pool else explicit


def reserve_of(limit: Figure, ram_bytes: int) -> int:
    """Return what stays of the limit; an explicit RAM budget may take a part of the usual reserve."""
    if limit.bytes is None:
        return 0
    return limit.bytes - max(budgets.automatic_ram_budget(limit.bytes), ram_bytes)
