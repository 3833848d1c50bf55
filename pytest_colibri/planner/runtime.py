"""What an engine needs in RAM beside its dense weights and its expert cache, by model family.

A family without rules is refused by name: planned with the rules of another one it would be promised memory
that it does not have, or denied memory that it has.
"""

from __future__ import annotations

from collections.abc import Mapping

from pytest_colibri.container.geometry import Geometry
from pytest_colibri.planner.environment import Part
from pytest_colibri.planner.families import positive, rules_of
from pytest_colibri.planner.plan import KvType, PlanRequest
from pytest_colibri.units import Figure

PROCESS_BYTES = 1_200_000_000
BUFFER_BYTES = 2_500_000_000
EXPERTS_IN_FLIGHT = 64
FLOAT_BYTES = 4
KV_BLOCK_VALUES = 32
KV_BLOCK_BYTES: Mapping[KvType, int] = {"f32": 128, "f16": 64, "bf16": 64, "q8_0": 34, "q4_0": 18}


def kv_bytes(geometry: Geometry, context: int, kv_type: KvType = "f32") -> int:
    """Return the bytes of one KV slot of ``context`` tokens, with the state that does not grow with it."""
    rules = rules_of(geometry)
    cached = -(-rules.cache(geometry, context) * KV_BLOCK_BYTES[kv_type] // KV_BLOCK_VALUES)
    return cached + rules.state(geometry.config) * FLOAT_BYTES


def workspace_bytes(geometry: Geometry, context: int) -> int:
    """Return the bytes of the attention workspace for ``context`` tokens."""
    return rules_of(geometry).workspace(geometry.config, context) * FLOAT_BYTES


def prompt_scratch_bytes(geometry: Geometry, prompt_width: int) -> int:
    """Return what a device holds, beside weights, while it takes ``prompt_width`` tokens at once."""
    config, rules = geometry.config, rules_of(geometry)
    values_per_token = (
        4 * positive(config, "hidden_size") + 2 * rules.attention(config) + 3 * rules.chosen(config)
    )
    return prompt_width * FLOAT_BYTES * values_per_token


def resident_bytes(request: PlanRequest, part: Part) -> int:
    """Return what a device holds when the user puts this part of the model there.

    Attention takes a mirror of every KV slot and its workspace.
    """
    geometry = request.geometry
    if part == "dense weights":
        return geometry.dense_bytes
    cached = request.kv_slots * kv_bytes(geometry, request.context, request.kv_type)
    return cached + workspace_bytes(geometry, request.context)


def expert_buffer_bytes(geometry: Geometry) -> int:
    """Return the buffers for experts in flight: one size serves every layer, so the widest expert sets it."""
    return EXPERTS_IN_FLIGHT * geometry.widest


def runtime_parts(request: PlanRequest) -> Mapping[str, Figure]:
    """Return the parts of the runtime bytes by name, each with its rule as source.

    Raises UsageError for an unknown family, or a config that lacks what the family's rules need.
    """
    geometry, context, slots = request.geometry, request.context, request.kv_slots
    per_slot = kv_bytes(geometry, context, request.kv_type)
    return {
        "process": Figure(PROCESS_BYTES, "fixed"),
        "working buffers": Figure(BUFFER_BYTES, "fixed"),
        "experts in flight": Figure(
            expert_buffer_bytes(geometry), f"{EXPERTS_IN_FLIGHT} x widest expert of {geometry.widest} B"
        ),
        "KV cache": Figure(
            slots * per_slot,
            f"{slots} x {per_slot} B, {geometry.family}, context {context}, {request.kv_type}",
        ),
        "attention workspace": Figure(
            workspace_bytes(geometry, context), f"{geometry.family}, context {context}"
        ),
    }
