"""Rules about the experts: each on one tier, counted with its real bytes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from pytest_colibri.claims.plan import PlanStatement
from pytest_colibri.judge.plan_rules.ram import has_sparse_layers
from pytest_colibri.judge.plan_rules.rule import rule, stated
from pytest_colibri.planner.plan import PlanRequest

HIT_RATE_STEP = 0.0001


@rule("hot experts exist", applies=has_sparse_layers)
def hot_experts_exist(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """Hot experts are experts of the model, each once, with exactly the bytes that the plan counts."""
    hot = stated(statement.hot_experts, "which experts are hot")
    sizes = {
        (layer.index, expert): size
        for layer in request.geometry.layers
        for expert, size in layer.expert_bytes.items()
    }
    known = set(hot) & sizes.keys()
    if len(known) != len(hot):
        yield f"{len(hot)} hot experts, of which {len(known)} are different ones of the model"
    total = sum(sizes[expert] for expert in known)
    if total != stated(statement.hot_bytes, "the bytes of hot experts"):
        yield f"hot experts counted as {statement.hot_bytes} B, and they have {total} B"


@rule("hot experts are ranked", applies=has_sparse_layers)
def hot_experts_are_ranked(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """The tier holds the most used experts, in rank order."""
    hot = stated(statement.hot_experts, "which experts are hot")
    keys = [(-request.usage.get(expert, 0), expert) for expert in hot]
    for earlier, later in pairwise(keys):
        if earlier > later:
            yield (
                f"expert {later[1]} with {-later[0]} uses is ranked after "
                f"{earlier[1]} with {-earlier[0]} uses"
            )
            return


@rule("hot experts have their own widths", applies=has_sparse_layers)
def hot_bytes_are_real_widths(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """So many experts take no less than the narrowest, and no more than the widest of the model do."""
    count = stated(statement.hot_count, "the number of hot experts")
    hot = stated(statement.hot_bytes, "the bytes of hot experts")
    sizes = sorted(size for layer in request.geometry.layers for size in layer.expert_bytes.values())
    if count > len(sizes):
        yield f"{count} hot experts, and the model has {len(sizes)}"
        return
    least, most = sum(sizes[:count]), sum(sizes[len(sizes) - count :])
    if not least <= hot <= most:
        yield f"{count} hot experts of {hot} B, and so many take from {least} to {most} B"


@rule("all experts are counted")
def experts_are_counted(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """The expert bytes are those of the container."""
    counted, experts = stated(statement.expert_bytes, "the bytes of experts"), request.geometry.expert_bytes
    if counted != experts:
        yield f"experts counted as {counted} B, and the container has {experts} B"


@rule("hot experts fit their tier")
def hot_experts_fit(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:  # noqa: ARG001
    """The hot experts fit the VRAM budget."""
    hot = stated(statement.hot_bytes, "the bytes of hot experts")
    budget = statement.vram_budget_bytes
    if hot > budget:
        yield f"hot experts of {hot} B exceed the VRAM budget of {budget} B"


@rule("tiers add up to the experts")
def residency_is_complete(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """Hot, warm and cold bytes are the expert bytes; warm ones fit the cache; none is negative."""
    parts = {
        "hot": stated(statement.hot_bytes, "the bytes of hot experts"),
        "warm": stated(statement.warm_bytes, "the bytes of warm experts"),
        "cold": stated(statement.cold_bytes, "the bytes of cold experts"),
    }
    total, experts = sum(parts.values()), request.geometry.expert_bytes
    if total != experts:
        yield f"hot, warm and cold experts are {total} B, and the model has {experts} B"
    cache = stated(statement.cache_bytes, "the expert cache")
    if parts["warm"] > cache:
        yield f"warm experts of {parts['warm']} B exceed the cache of {cache} B"
    for name, count in parts.items():
        if count < 0:
            yield f"{name} experts are {count} B, less than 0 B"


@rule("hit rate follows from the tiers")
def hit_rate_matches(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """The hit rate is the share of hot and warm bytes, 1.0 without experts."""
    rate = stated(statement.hit_rate, "a hit rate")
    held = stated(statement.hot_bytes, "the bytes of hot experts") + stated(
        statement.warm_bytes, "the bytes of warm experts"
    )
    experts = request.geometry.expert_bytes
    expected = held / experts if experts else 1.0
    if not 0.0 <= rate <= 1.0 or abs(rate - expected) > HIT_RATE_STEP:
        yield f"hit rate of {rate}, and hot and warm experts are {expected:.4f} of all"


@rule("bottleneck follows from the tiers")
def bottleneck_matches(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:  # noqa: ARG001
    """A plan with cold experts is bound by the disk, and no other is."""
    cold = stated(statement.cold_bytes, "the bytes of cold experts")
    bottleneck = stated(statement.bottleneck, "what bounds the run")
    if (cold > 0) != (bottleneck == "disk"):
        yield f"limited by {bottleneck}, with {cold} B of experts on the disk"
