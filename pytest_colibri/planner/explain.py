"""A plan as the sum that led to it: every figure with its source, line by line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pytest_colibri.planner.plan import DeviceShare, Plan, Step
from pytest_colibri.units import Figure, format_bytes

RUNTIME_PART = "runtime: "
IN_FLIGHT = f"{RUNTIME_PART}experts in flight"


def explain(plan: Plan) -> str:
    """Write the plan as plain text: the sum, the reasons of the tuning, the environment, the warnings."""
    width = max((len(step.name) for step in plan.steps), default=0)
    figures = [f"{step.name:<{width}}  {step.figure}" for step in plan.steps]
    outcome = [
        f"slots per sparse layer: {plan.slots_per_layer}",
        f"experts on devices: {len(plan.hot_experts)}",
        f"projected hit rate: {plan.hit_rate}",
        f"limited by: {plan.bottleneck}",
    ]
    tuning = [f"{name}={value}: {reason}" for name, (value, reason) in plan.tune.items()]
    environment = [f"{name}={value}" for name, value in plan.environment.items()]
    sections = {
        "Memory": figures,
        "Outcome": outcome,
        "Tuning": tuning,
        "Environment": environment,
        "Warnings": list(plan.warnings),
    }
    return "\n\n".join(
        "\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections.items() if lines
    )


def steps_of(plan: Plan, runtime_parts: Mapping[str, Figure]) -> tuple[Step, ...]:
    """Return every figure of the sum in the order in which one leads to the next."""
    memory = plan.request.host.memory
    geometry = plan.request.geometry
    return (
        Step("RAM available", memory.available),
        Step("RAM left by the control group", memory.cgroup_available),
        Step("limit", plan.limit),
        Step("reserve", Figure(plan.reserve_bytes, "stays free of the limit")),
        Step(
            "RAM budget",
            Figure(plan.ram_budget_bytes, _origin(plan.request.ram_bytes, plan.ram_budget_bytes)),
        ),
        Step("dense weights", Figure(plan.dense_bytes, "container headers")),
        *(Step(f"{RUNTIME_PART}{name}", part) for name, part in runtime_parts.items()),
        Step("runtime", Figure(plan.runtime_bytes, "sum of its parts")),
        Step("expert cache", Figure(plan.cache_bytes, _cache_origin(plan.request.slots_per_layer))),
        Step(
            "one slot in every layer",
            Figure(geometry.bytes_per_slot, f"{len(geometry.layers)} sparse layers"),
        ),
        *(step for share in plan.devices for step in _device_steps(share)),
        Step(
            "VRAM budget",
            Figure(plan.vram_budget_bytes, _vram_origin(plan)),
        ),
        Step("experts", Figure(geometry.expert_bytes, "container headers")),
        Step("hot experts, VRAM", Figure(plan.hot_bytes, "in rank order of the usage history")),
        Step("warm experts, RAM", Figure(plan.warm_bytes, "what is left of the experts, up to the cache")),
        Step("cold experts, disk", Figure(plan.cold_bytes, "experts less hot less warm")),
        Step("free disk space", plan.request.disk_free),
    )


def _device_steps(share: DeviceShare) -> Iterator[Step]:
    name = share.accelerator.identity.name
    yield Step(f"{name}: free", share.accelerator.free)
    yield Step(f"{name}: reserve", Figure(share.reserve_bytes, "scratch of a prompt, or the least reserve"))
    yield Step(f"{name}: usable", share.usable)
    if share.resident_bytes:
        yield Step(
            f"{name}: dense weights and attention", Figure(share.resident_bytes, "set in the environment")
        )
    yield Step(f"{name}: budget", Figure(share.budget_bytes, "its part of the VRAM budget"))


def _origin(asked_bytes: int | None, granted_bytes: int) -> str:
    if asked_bytes is None:
        return "automatic"
    return "as asked for" if asked_bytes == granted_bytes else f"clamped from {format_bytes(asked_bytes)}"


def _vram_origin(plan: Plan) -> str:
    origin = _origin(plan.request.vram_bytes, plan.vram_budget_bytes + plan.resident_bytes)
    return f"{origin}, less dense weights and attention" if plan.resident_bytes else origin


def _cache_origin(asked_slots: int | None) -> str:
    left = "RAM budget less dense weights less runtime"
    return left if asked_slots is None else f"{left}, for at most {asked_slots} slots per layer"
