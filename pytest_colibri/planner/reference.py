"""The reference planner: composes the rules of this package into a plan.

Rules are called through their modules, so that one of them can be replaced from outside: this is how the
checks are shown to catch a planner that breaks it.
"""

from __future__ import annotations

from dataclasses import replace

from pytest_colibri.errors import UsageError
from pytest_colibri.planner import budgets, division, environment, explain, notes, runtime, tiers, tuning
from pytest_colibri.planner.plan import Plan, PlanRequest


def plan(request: PlanRequest) -> Plan:
    """Place a model on a host.

    Raises DoesNotFit when the model cannot run within the limit or within an explicit budget, HostMismatch
    when no source gives the available memory and no budget is stated, UsageError for a request or a config
    that cannot be planned.
    """
    refuse_bad_figures(request)
    geometry = request.geometry
    limit = budgets.limit_of(request.host)
    runtime_parts = runtime.runtime_parts(request)
    runtime_bytes = sum(part.bytes or 0 for part in runtime_parts.values())
    sizes = tiers.bytes_of_experts(geometry)
    ranked = tiers.rank_hot_experts(geometry, request.usage)
    ram_bytes, devices = division.divide(
        request,
        limit,
        runtime_bytes,
        division.offers(request, limit),
        history_bytes=sum(sizes[expert] for expert in ranked),
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
        reserve_bytes=division.reserve_of(limit, ram_bytes),
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
        warnings=(),
        steps=(),
    )
    return replace(
        bare, warnings=notes.warnings_of(bare, planned), steps=explain.steps_of(bare, runtime_parts)
    )


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


def ram_cache(request: PlanRequest, cache_bytes: int) -> tuple[int, int]:
    """Return (cache bytes, slots per layer), less than the RAM allows where the request asks for less."""
    slots = tiers.cap_for_cache(request.geometry, cache_bytes)
    if request.slots_per_layer is None:
        return cache_bytes, slots
    slots = min(slots, request.slots_per_layer)
    return min(cache_bytes, slots * request.geometry.bytes_per_slot), slots
