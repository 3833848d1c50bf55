"""A plan in the JSON form that planners of this engine exchange (version 2), with the sum and environment."""

from __future__ import annotations

from statistics import median_low

from pytest_colibri.container.geometry import Geometry
from pytest_colibri.planner.plan import DeviceShare, Plan

VERSION = 2

BOTTLENECKS = {
    "disk": "reads of cold experts from the disk",
    "mixed": "work divided between GPU and CPU",
    "compute": "computing",
}


def plan_to_json(plan: Plan) -> dict[str, object]:
    """Return the plan as values that ``json.dumps`` takes: bytes as integers, unknown figures as None.

    No device UUID is written, and the model's path is the one that the user gave.
    """
    return {
        "version": VERSION,
        "policy": {
            "name": plan.request.policy,
            "quality_preserving": plan.request.policy != "experimental-fast",
        },
        "model": _model(plan.request.geometry),
        "cpu": {
            "physical_cores": plan.request.host.processor.physical_cores,
            "sockets": plan.request.host.processor.sockets,
        },
        "memory": {"unified": plan.unified, "available_bytes": plan.limit.bytes},
        "tiers": {"disk": _disk(plan), "ram": _ram(plan), "vram": _vram(plan)},
        "expected_bottleneck": BOTTLENECKS[plan.bottleneck],
        "bottleneck_class": plan.bottleneck,
        "projected_hit_rate": plan.hit_rate,
        "tune": {name: {"value": value, "reason": reason} for name, (value, reason) in plan.tune.items()},
        "warnings": list(plan.warnings),
        "environment": dict(plan.environment),
        "steps": [
            {"name": step.name, "bytes": step.figure.bytes, "source": step.figure.source}
            for step in plan.steps
        ],
    }


def _model(geometry: Geometry) -> dict[str, object]:
    sizes = [size for layer in geometry.layers for size in layer.expert_bytes.values()]
    return {
        "path": str(geometry.path),
        "family_id": geometry.family,
        "shards": geometry.shards,
        "model_bytes": geometry.total_bytes,
        "dense_bytes": geometry.dense_bytes,
        "expert_bytes": geometry.expert_bytes,
        "expert_count": geometry.expert_count,
        "expert_layers": len(geometry.layers),
        "typical_expert_bytes": median_low(sizes) if sizes else 0,
        "max_expert_bytes": geometry.widest,
        "expert_bytes_by_layer": {str(layer.index): layer.width for layer in geometry.layers},
        "per_cap_bytes": geometry.bytes_per_slot,
    }


def _disk(plan: Plan) -> dict[str, object]:
    return {
        "model_bytes": plan.request.geometry.total_bytes,
        "available_bytes": plan.request.disk_free.bytes,
        "cold_expert_bytes": plan.cold_bytes,
    }


def _ram(plan: Plan) -> dict[str, object]:
    return {
        "available_bytes": plan.limit.bytes,
        "budget_bytes": plan.ram_budget_bytes,
        "dense_bytes": plan.dense_bytes,
        "runtime_bytes": plan.runtime_bytes,
        "expert_cache_bytes": plan.cache_bytes,
        "warm_expert_bytes": plan.warm_bytes,
        "cache_slots_per_layer": plan.slots_per_layer,
    }


def _vram(plan: Plan) -> dict[str, object]:
    return {
        "devices": [_device(share) for share in plan.devices],
        "budget_bytes": plan.vram_budget_bytes,
        "resident_bytes": plan.resident_bytes,
        "hot_expert_bytes": plan.hot_bytes,
        "expert_capacity": len(plan.hot_experts),
    }


def _device(share: DeviceShare) -> dict[str, object]:
    accelerator = share.accelerator
    return {
        "index": share.number,
        "name": accelerator.identity.name,
        "unified_memory": None if accelerator.pool is None else accelerator.pool == "unified",
        "total_bytes": accelerator.total.bytes,
        "free_bytes": accelerator.free.bytes,
        "reserve_bytes": share.reserve_bytes,
        "usable_bytes": share.usable.bytes,
        "resident_bytes": share.resident_bytes,
        "budget_bytes": share.budget_bytes,
    }
