"""The reference planner: composes the rules of this package into a plan.

Rules are called through their modules, so that one of them can be replaced from outside: this is how the
checks are shown to catch a planner that breaks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_colibri.errors import UsageError
from pytest_colibri.planner import budgets, environment, explain, notes, runtime, tiers, tuning
from pytest_colibri.planner.plan import DeviceShare, Plan, PlanRequest
from pytest_colibri.units import Figure, format_bytes


def plan(request: PlanRequest) -> Plan:
    """Place a model on a host.

    Raises DoesNotFit when the model cannot run within the limit or within an explicit budget, HostMismatch
    when no source gives the available memory and no budget is stated, UsageError for a request or a config
    that cannot be planned.
    """
    refuse_bad_figures(request)
    geometry = request.geometry
    limit = budgets.limit_of(request.host)
    runtime_parts = runtime.runtime_parts(geometry, request.context, request.kv_slots)
    runtime_bytes = sum(part.bytes or 0 for part in runtime_parts.values())
    sizes = tiers.bytes_of_experts(geometry)
    ranked = tiers.rank_hot_experts(geometry, request.usage)
    ram_bytes, devices = divide(
        request, limit, runtime_bytes, offers(request, limit), sum(sizes[expert] for expert in ranked)
    )

    hot = tiers.fill_devices(ranked, sizes, [share.budget_bytes for share in devices])
    hot_bytes = sum(sizes[expert] for expert in hot)
    cache, slots = ram_cache(request, tiers.cache_bytes(ram_bytes, geometry.dense_bytes, runtime_bytes))
    warm_bytes = min(geometry.expert_bytes - hot_bytes, cache)
    cold_bytes = geometry.expert_bytes - hot_bytes - warm_bytes
    hit_rate = tiers.hit_rate(hot_bytes, warm_bytes, geometry.expert_bytes)

    working = environment.working_devices(devices)
    bottleneck = tiers.bottleneck_of(warm_bytes, cold_bytes, gpu_plans=bool(working))
    tune = tuning.tune(
        tuning.Situation(
            backend=request.backend,
            gpus=len(working),
            sockets=request.host.processor.sockets,
            bottleneck=bottleneck,
            hit_rate=hit_rate,
            cold_bytes=cold_bytes,
            user=request.environment,
        )
    )
    planned = environment.planned_environment(request, ram_bytes, devices, len(hot), tune)
    bare = Plan(
        request=request,
        unified=any(budgets.shares_ram(share.accelerator) for share in devices),
        limit=limit,
        reserve_bytes=reserve_of(limit, ram_bytes),
        ram_budget_bytes=ram_bytes,
        dense_bytes=geometry.dense_bytes,
        runtime_bytes=runtime_bytes,
        cache_bytes=cache,
        warm_bytes=warm_bytes,
        slots_per_layer=slots,
        devices=devices,
        vram_budget_bytes=sum(share.budget_bytes for share in devices),
        hot_bytes=hot_bytes,
        hot_experts=hot,
        cold_bytes=cold_bytes,
        hit_rate=hit_rate,
        bottleneck=bottleneck,
        tune=tune,
        environment=environment.with_user_values(planned, request.environment),
        warnings=(
            *notes.memory_notes(limit, ram_bytes),
            *clamp_notes(request, limit, ram_bytes, slots, devices),
            *notes.request_notes(request),
            *(note for share in devices for note in notes.device_notes(share)),
            *notes.history_notes(request, devices, hot_bytes),
            *notes.disk_notes(cold_bytes),
            *notes.override_notes(planned, request.environment),
        ),
        steps=(),
    )
    return replace(bare, steps=explain.steps_of(bare, runtime_parts))


def refuse_bad_figures(request: PlanRequest) -> None:
    """Raise UsageError for a request that no planner could answer."""
    least = {
        "ram_bytes": 1,
        "vram_bytes": 0,
        "slots_per_layer": 1,
        "context": 1,
        "kv_slots": 1,
        "prompt_width": 1,
    }
    for name, minimum in least.items():
        value = getattr(request, name)
        if value is not None and value < minimum:
            raise UsageError(f"{name} must be at least {minimum}, and is {value}")
    if request.backend == "cpu" and request.accelerators:
        named = ", ".join(device.identity.name for device in request.accelerators)
        raise UsageError(f"the cpu backend takes no device, and {named} is asked for; name another backend")


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


def ram_cache(request: PlanRequest, cache_bytes: int) -> tuple[int, int]:
    """Return (cache bytes, slots per layer), less than the RAM allows where the request asks for less."""
    slots = tiers.cap_for_cache(request.geometry, cache_bytes)
    if request.slots_per_layer is None:
        return cache_bytes, slots
    slots = min(slots, request.slots_per_layer)
    return min(cache_bytes, slots * request.geometry.bytes_per_slot), slots


def reserve_of(limit: Figure, ram_bytes: int) -> int:
    """Return what stays of the limit; an explicit RAM budget may take a part of the usual reserve."""
    if limit.bytes is None:
        return 0
    return limit.bytes - max(budgets.automatic_ram_budget(limit.bytes), ram_bytes)


def clamp_notes(
    request: PlanRequest, limit: Figure, ram_bytes: int, slots: int, devices: Sequence[DeviceShare]
) -> tuple[str, ...]:
    """Return a line for each explicit figure that could not be kept."""
    in_pool = sum(share.budget_bytes for share in devices if budgets.shares_ram(share.accelerator))
    besides = f", beside the VRAM tier of {format_bytes(in_pool)} in the same memory" if in_pool else ""
    lines = [
        *budgets.clamp_warning(
            "RAM", request.ram_bytes, ram_bytes, f"{budgets.POOL_PERCENT} % may be taken of {limit}{besides}"
        ),
        *budgets.clamp_warning(
            "VRAM",
            request.vram_bytes,
            sum(share.budget_bytes for share in devices),
            f"the experts take {format_bytes(request.geometry.expert_bytes)}, the devices can hold "
            f"{format_bytes(sum(usable_bytes(devices)))}, and memory shared with the RAM is counted once",
        ),
    ]
    if request.slots_per_layer is not None and slots < request.slots_per_layer:
        lines.append(
            f"slots per layer clamped from {request.slots_per_layer} to {slots}: no more fit the cache"
        )
    return tuple(lines)
