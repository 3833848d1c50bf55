"""What an engine needs in RAM beside its dense weights and its expert cache, by model family.

Every rule takes the parsed ``config.json``. A family without rules here is refused by name: planned with the
rules of another one it would be promised memory that it does not have, or denied memory that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pytest_colibri.container.geometry import Geometry
from pytest_colibri.errors import UsageError
from pytest_colibri.units import Figure

PROCESS_BYTES = 1_200_000_000
BUFFER_BYTES = 2_500_000_000
EXPERTS_IN_FLIGHT = 64
FLOAT_BYTES = 4

Config = Mapping[str, object]


@dataclass(frozen=True)
class FamilyRules:
    """How one family grows: each rule takes the config and a number of tokens, and returns bytes.

    ``kv_bytes`` and ``workspace_bytes`` take the context, ``prompt_scratch_bytes`` the width of a prompt.
    """

    kv_bytes: Callable[[Config, int], int]
    workspace_bytes: Callable[[Config, int], int]
    prompt_scratch_bytes: Callable[[Config, int], int]


def kv_bytes(geometry: Geometry, context: int) -> int:
    """Return the bytes of one KV slot of ``context`` tokens."""
    return rules_of(geometry).kv_bytes(geometry.config, context)


def workspace_bytes(geometry: Geometry, context: int) -> int:
    """Return the bytes of the attention workspace for ``context`` tokens."""
    return rules_of(geometry).workspace_bytes(geometry.config, context)


def prompt_scratch_bytes(geometry: Geometry, prompt_width: int) -> int:
    """Return what a device holds, beside weights, while it takes ``prompt_width`` tokens at once."""
    return rules_of(geometry).prompt_scratch_bytes(geometry.config, prompt_width)


def expert_buffer_bytes(geometry: Geometry) -> int:
    """Return the buffers for experts in flight: one size serves every layer, so the widest expert sets it."""
    return EXPERTS_IN_FLIGHT * geometry.widest


def runtime_parts(geometry: Geometry, context: int, kv_slots: int) -> Mapping[str, Figure]:
    """Return the parts of the runtime bytes by name, each with its rule as source.

    Raises UsageError for an unknown family, or a config that lacks what the family's rules need.
    """
    per_slot = kv_bytes(geometry, context)
    return {
        "process": Figure(PROCESS_BYTES, "fixed"),
        "working buffers": Figure(BUFFER_BYTES, "fixed"),
        "experts in flight": Figure(
            expert_buffer_bytes(geometry), f"{EXPERTS_IN_FLIGHT} x widest expert of {geometry.widest} B"
        ),
        "KV cache": Figure(
            kv_slots * per_slot, f"{kv_slots} x {per_slot} B, {geometry.family}, context {context}"
        ),
        "attention workspace": Figure(
            workspace_bytes(geometry, context), f"{geometry.family}, context {context}"
        ),
    }


def rules_of(geometry: Geometry) -> FamilyRules:
    """Return the rules of the model's family; UsageError names a family that has none."""
    try:
        return FAMILIES[geometry.family]
    except KeyError:
        raise UsageError(
            f"{geometry.path}: no memory rules for the model family {geometry.family!r}; "
            f"known: {', '.join(sorted(FAMILIES))}"
        ) from None


def positive(config: Config, key: str) -> int:
    """Return a positive integer of ``config.json``; UsageError names the key and what is there."""
    value = config.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    shown = repr(value)[:80] if key in config else "missing"
    raise UsageError(f"config.json: {key} must be a positive integer for a memory plan, and is {shown}")


def _glm_kv_bytes(config: Config, context: int) -> int:
    rows = positive(config, "num_hidden_layers") + 1  # the multi-token-prediction row has a cache as well
    compressed = positive(config, "kv_lora_rank") + positive(config, "qk_rope_head_dim")
    return context * FLOAT_BYTES * (rows * compressed + _glm_index_rows(config) * _index_width(config))


def _glm_index_rows(config: Config) -> int:
    """Count the rows with an index cache; a layer that shares the index of another one has none."""
    kinds = config.get("indexer_types")
    if isinstance(kinds, list):
        return len([kind for kind in kinds if kind != "shared"]) + 1
    return positive(config, "num_hidden_layers") + 1


def _index_width(config: Config) -> int:
    return positive(config, "index_head_dim") if config.get("index_head_dim") is not None else 0


def _glm_workspace_bytes(config: Config, context: int) -> int:
    per_head = positive(config, "qk_nope_head_dim") + positive(config, "v_head_dim")
    return context * positive(config, "num_attention_heads") * per_head * FLOAT_BYTES


def _glm_prompt_scratch_bytes(config: Config, prompt_width: int) -> int:
    head = sum(positive(config, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    values_per_token = (
        4 * positive(config, "hidden_size")
        + 2 * positive(config, "num_attention_heads") * head
        + 3 * positive(config, "num_experts_per_tok") * positive(config, "moe_intermediate_size")
    )
    return prompt_width * FLOAT_BYTES * values_per_token


FAMILIES: Mapping[str, FamilyRules] = {
    "glm_moe_dsa": FamilyRules(_glm_kv_bytes, _glm_workspace_bytes, _glm_prompt_scratch_bytes),
}
