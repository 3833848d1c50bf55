"""Rules about the RAM budget: what it must hold before it caches experts, and how many slots that leaves."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_colibri.claims.plan import PlanStatement
from pytest_colibri.judge.plan_rules.pool import available_bytes, has_known_limit
from pytest_colibri.judge.plan_rules.rule import rule, stated
from pytest_colibri.judge.plan_rules.runtime import least_runtime_bytes
from pytest_colibri.planner.plan import PlanRequest


def has_sparse_layers(request: PlanRequest) -> bool:
    """Tell whether the model has experts."""
    return bool(request.geometry.layers)


@rule("RAM budget holds its parts")
def ram_budget_holds_its_parts(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:  # noqa: ARG001
    """Dense weights, runtime and cache fit the RAM budget."""
    budget = statement.ram_budget_bytes
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


@rule("the cache is used", applies=has_sparse_layers)
def cache_is_used(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """The cache gives all the slots that it has room for, and no expert stays on the disk beside idle RAM."""
    slots = stated(statement.slots_per_layer, "slots per layer")
    cache = stated(statement.cache_bytes, "the expert cache")
    geometry = request.geometry
    most = max(len(layer.expert_bytes) for layer in geometry.layers)
    possible = min(most, cache // geometry.bytes_per_slot, request.slots_per_layer or most)
    if slots < possible:
        yield f"{slots} slots per layer, and a cache of {cache} B has room for {possible}"
    warm = stated(statement.warm_bytes, "the bytes of warm experts")
    cold = stated(statement.cold_bytes, "the bytes of cold experts")
    idle = cache - warm
    if cold > 0 and idle >= geometry.bytes_per_slot:
        yield f"{cold} B of experts on the disk, and {idle} B of the cache are idle"


@rule("slots are as wide as their layers", applies=has_sparse_layers)
def slot_bytes_are_layer_widths(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """One more slot in every sparse layer costs the sum of the widths of the layers."""
    per_slot = stated(statement.bytes_per_slot, "the bytes of one slot in every layer")
    widths = request.geometry.bytes_per_slot
    if per_slot != widths:
        yield f"one slot in every layer counted as {per_slot} B, and the layers' widths are {widths} B"


@rule("what cannot fit is refused")
def least_ram_is_planned(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """A plan is made only where dense weights, runtime and one slot per sparse layer fit."""
    geometry = request.geometry
    needed = geometry.dense_bytes + least_runtime_bytes(request) + geometry.bytes_per_slot
    budget = statement.ram_budget_bytes
    room = min(budget, available_bytes(request)) if has_known_limit(request) else budget
    if room < needed:
        yield (
            f"dense weights, runtime and one slot per sparse layer need {needed} B, and {room} B are there "
            f"for them (RAM budget {budget} B, available {request.host.memory.limit})"
        )


@rule("every sparse layer has a slot", applies=has_sparse_layers)
def every_layer_has_a_slot(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """A model with sparse layers cannot run without one slot in each."""
    slots = stated(statement.slots_per_layer, "slots per layer")
    if slots < 1:
        yield f"{slots} slots per layer, and {len(request.geometry.layers)} sparse layers need at least 1"
