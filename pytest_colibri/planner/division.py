"""Divides RAM and device memory: what each may take before the experts are placed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_colibri.planner import budgets, environment, runtime
from pytest_colibri.planner.plan import DeviceShare, DoesNotFit, PlanRequest
from pytest_colibri.units import Figure, format_bytes


def offers(request: PlanRequest, limit: Figure) -> tuple[DeviceShare, ...]:
    """Return what each device could give, before any budget; those with memory of their own come first."""
    accelerators = environment.planned_accelerators(request)
    if not accelerators:
        return ()
    scratch = runtime.prompt_scratch_bytes(request.geometry, request.prompt_width)
    shares = []
    for number, accelerator in sorted(accelerators, key=lambda pair: budgets.shares_ram(pair[1])):
        reserve = budgets.device_reserve(accelerator, scratch)
        usable = budgets.usable_on_device(accelerator, reserve, limit)
        shares.append(DeviceShare(accelerator, number, reserve, usable, budget_bytes=0, resident_bytes=0))
    return tuple(shares)


def resident_bytes(request: PlanRequest, devices: Sequence[DeviceShare]) -> int:
    """Return what the user puts on the devices beside experts.

    Raises DoesNotFit where an explicit VRAM budget, or what is usable, cannot hold it.
    """
    parts = environment.resident_parts(request)
    if not devices or not parts:
        return 0
    needed = sum(runtime.resident_bytes(request, part) for part in parts.values())
    usable = sum(usable_bytes(devices))
    room = usable if request.vram_bytes is None else min(usable, request.vram_bytes)
    if needed > room:
        raise DoesNotFit(
            needed - room,
            f"{' and '.join(parts.values())} on the devices, asked for by {' and '.join(parts)}, need "
            f"{format_bytes(needed)}, and there are {format_bytes(room)} for them "
            f"(usable {format_bytes(usable)}, VRAM budget asked for {format_bytes(request.vram_bytes)})",
        )
    return needed


def divide(
    request: PlanRequest,
    limit: Figure,
    runtime_bytes: int,
    devices: Sequence[DeviceShare],
    history_bytes: int,
) -> tuple[int, tuple[DeviceShare, ...]]:
    """Return the RAM budget, and the devices with what they take.

    What the user puts on devices beside experts comes first. ``history_bytes`` are the experts that a usage
    history ranks: an automatic tier takes no more than that from the RAM, because the rest of it would stay
    empty while the RAM cache misses it.
    """
    geometry = request.geometry
    own = [share for share in devices if not budgets.shares_ram(share.accelerator)]
    shared = [share for share in devices if budgets.shares_ram(share.accelerator)]
    residents = resident_bytes(request, devices)
    asked = geometry.expert_bytes if request.vram_bytes is None else request.vram_bytes - residents
    tier = min(asked, geometry.expert_bytes)
    own_taken = budgets.spread(residents + tier, usable_bytes(own))
    own_tier = max(0, sum(own_taken) - residents)
    shared_residents = max(0, residents - sum(own_taken))
    shared_tier = tier - own_tier
    if request.vram_bytes is None:
        shared_tier = min(shared_tier, max(0, history_bytes - own_tier))

    ram_bytes = ram_budget(request, limit, in_one_pool=bool(shared))
    source = str(limit) if request.ram_bytes is None else f"asked for {request.ram_bytes} B, {limit}"
    budgets.refuse_below_floor(ram_bytes, geometry, runtime_bytes, source)
    vram_bytes = 0
    if shared_residents + shared_tier and shared and limit.bytes is not None:
        ram_bytes, vram_bytes = budgets.split_unified_pool(
            pool_bytes=budgets.automatic_ram_budget(limit.bytes),
            floor_bytes=budgets.ram_floor(geometry, runtime_bytes),
            asked_ram=request.ram_bytes,
            asked_vram=request.vram_bytes,
            tier_bytes=min(shared_tier, sum(usable_bytes(shared)) - shared_residents),
            resident_bytes=shared_residents,
            scratch=sum(share.reserve_bytes for share in shared if share.usable.bytes is not None),
        )
    shared_taken = budgets.spread(vram_bytes, usable_bytes(shared))
    return ram_bytes, with_parts((*own, *shared), (*own_taken, *shared_taken), residents)


def with_parts(
    devices: Sequence[DeviceShare], taken: Sequence[int], residents: int
) -> tuple[DeviceShare, ...]:
    """Divide what each device takes: the first of it holds what the user put there, the rest experts."""
    resident_parts = budgets.spread(residents, taken)
    return tuple(
        replace(share, budget_bytes=total - resident, resident_bytes=resident)
        for share, total, resident in zip(devices, taken, resident_parts, strict=True)
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
