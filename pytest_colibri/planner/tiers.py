"""Which experts live where: the hot set in rank order, the slots of the RAM cache, and what is left on disk.

Layers differ in width, so each consumer of a width counts row by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_colibri.container.geometry import Geometry
from pytest_colibri.planner.plan import Bottleneck

ExpertId = tuple[int, int]


def bytes_of_experts(geometry: Geometry) -> Mapping[ExpertId, int]:
    """Map each (layer, expert) to its bytes."""
    return {
        (layer.index, expert): size
        for layer in geometry.layers
        for expert, size in layer.expert_bytes.items()
    }


def rank_hot_experts(geometry: Geometry, usage: Mapping[ExpertId, int]) -> tuple[ExpertId, ...]:
    """Return the experts that were ever used, most used first, ties by layer and expert.

    An engine fills its tier from the usage history, so an expert without one never becomes resident.
    """
    used = [expert for expert in bytes_of_experts(geometry) if usage.get(expert, 0) > 0]
    return tuple(sorted(used, key=lambda expert: (-usage[expert], expert)))


def fill_devices(
    ranked: Sequence[ExpertId], sizes: Mapping[ExpertId, int], budgets: Sequence[int]
) -> tuple[ExpertId, ...]:
    """Return the ranked experts, while one fits whole into what is left of a device's budget."""
    left = list(budgets)
    placed: list[ExpertId] = []
    for expert in ranked:
        device = next((place for place, room in enumerate(left) if sizes[expert] <= room), None)
        if device is None:
            break
        left[device] -= sizes[expert]
        placed.append(expert)
    return tuple(placed)


def cache_bytes(ram_budget_bytes: int, dense_bytes: int, runtime_bytes: int) -> int:
    """Return what the RAM budget leaves for expert slots."""
    return max(0, ram_budget_bytes - dense_bytes - runtime_bytes)


def cap_for_cache(geometry: Geometry, cache: int) -> int:
    """Return the slots per sparse layer that ``cache`` bytes hold, at most one for each expert of a layer."""
    if not geometry.layers:
        return 0
    most_experts = max(len(layer.expert_bytes) for layer in geometry.layers)
    return min(cache // geometry.bytes_per_slot, most_experts)


def hit_rate(hot_bytes: int, warm_bytes: int, expert_bytes: int) -> float:
    """Return the share of expert bytes that need no disk, 4 digits; 1.0 without experts."""
    return round((hot_bytes + warm_bytes) / expert_bytes, 4) if expert_bytes else 1.0


def bottleneck_of(warm_bytes: int, cold_bytes: int, gpu_plans: bool) -> Bottleneck:
    """Return what bounds the run: the disk, the mix of GPU and CPU work, or computing."""
    if cold_bytes > 0:
        return "disk"
    return "mixed" if warm_bytes > 0 and gpu_plans else "compute"
