"""Rules about the RAM budget: what it must hold before it caches experts, and how many slots that leaves."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_colibri.claims.plan import PlanStatement
from pytest_colibri.judge.plan_rules.rule import rule, stated
from pytest_colibri.planner.explain import IN_FLIGHT, RUNTIME_PART
from pytest_colibri.planner.plan import PlanRequest

FIXED_RUNTIME_BYTES = 3_700_000_000
EXPERTS_IN_FLIGHT = 64


def has_sparse_layers(request: PlanRequest) -> bool:
    """Tell whether the model has experts."""
    return bool(request.geometry.layers)


@rule("RAM budget holds its parts")
def ram_budget_holds_its_parts(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:  # noqa: ARG001
    """Dense weights, runtime and cache fit the RAM budget."""
    budget = stated(statement.ram_budget_bytes, "a RAM budget")
    parts = (
        stated(statement.dense_bytes, "dense weights")
        + stated(statement.runtime_bytes, "the runtime")
        + stated(statement.cache_bytes, "the expert cache")
    )
    if parts > budget:
        yield f"dense weights, runtime and cache take {parts} B of a RAM budget of {budget} B"


@rule("dense weights are counted")
def dense_weights_are_counted(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """The dense weights are those of the container."""
    counted, dense = stated(statement.dense_bytes, "dense weights"), request.geometry.dense_bytes
    if counted != dense:
        yield f"dense weights counted as {counted} B, and the container has {dense} B"


@rule("runtime holds experts in flight")
def runtime_holds_experts_in_flight(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """The runtime has its fixed part, and buffers for 64 experts of the widest layer."""
    runtime = stated(statement.runtime_bytes, "the runtime")
    buffers = EXPERTS_IN_FLIGHT * request.geometry.widest
    if runtime < FIXED_RUNTIME_BYTES + buffers:
        yield (
            f"runtime of {runtime} B is less than {FIXED_RUNTIME_BYTES + buffers} B, its fixed "
            f"part and {EXPERTS_IN_FLIGHT} of the widest expert"
        )
    part = statement.steps.get(IN_FLIGHT)
    if part is not None and part < buffers:
        yield f"{part} B for {EXPERTS_IN_FLIGHT} experts in flight, which take {buffers} B"


@rule("parts of the runtime add up")
def runtime_parts_add_up(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:  # noqa: ARG001
    """The runtime is the sum of the parts that the plan lists."""
    runtime = stated(statement.runtime_bytes, "the runtime")
    parts = [count or 0 for name, count in statement.steps.items() if name.startswith(RUNTIME_PART)]
    total = stated(sum(parts) if parts else None, "the parts of its runtime")
    if total != runtime:
        yield f"runtime of {runtime} B, and its parts are {total} B"


@rule("slots fit the cache")
def slots_fit_cache(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """The slots of all sparse layers, each as wide as its layer, fit the cache."""
    slots = stated(statement.slots_per_layer, "slots per layer")
    cache = stated(statement.cache_bytes, "the expert cache")
    needed = slots * request.geometry.bytes_per_slot
    if needed > cache:
        yield f"{slots} slots per layer need {needed} B of a cache of {cache} B"
    most = max((len(layer.expert_bytes) for layer in request.geometry.layers), default=0)
    if slots > most:
        yield f"{slots} slots per layer, and the largest layer has {most} experts"


@rule("every sparse layer has a slot", applies=has_sparse_layers)
def every_layer_has_a_slot(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """A model with sparse layers cannot run without one slot in each."""
    slots = stated(statement.slots_per_layer, "slots per layer")
    if slots < 1:
        yield f"{slots} slots per layer, and {len(request.geometry.layers)} sparse layers need at least 1"
