"""What the forward pass needs of ``config.json``, and the refusal of everything it does not compute."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pytest_colibri.errors import UsageError

FAMILY = "glm_moe_dsa"
MAX_DIMENSION = 2**24
MAX_LAYERS = 1024


@dataclass(frozen=True)
class RouterConfig:
    """How experts are chosen: ``groups_per_token`` of ``groups`` first, then experts within them."""

    experts: int
    experts_per_token: int
    groups: int
    groups_per_token: int
    normalise: bool
    scaling_factor: float


@dataclass(frozen=True)
class AttentionConfig:
    """Multi-head latent attention; all figures are widths, except ``heads`` and ``rope_theta``."""

    heads: int
    query_rank: int
    latent_rank: int
    nope_width: int
    rope_width: int
    value_width: int
    rope_theta: float


@dataclass(frozen=True)
class ModelConfig:
    """A ``glm_moe_dsa`` model. ``sparse_layers`` are the layers with routed experts."""

    layers: int
    sparse_layers: frozenset[int]
    vocabulary: int
    hidden: int
    dense_width: int
    expert_width: int
    shared_experts: int
    norm_epsilon: float
    tied_embeddings: bool
    longest_context: int
    attention: AttentionConfig
    router: RouterConfig


def parse_config(document: Mapping[str, object]) -> ModelConfig:
    """Read ``config.json``. Raises UsageError for a wrong value, and for a variant that is not computed."""
    _refuse_other_variants(document)
    layers = _integer(document, "num_hidden_layers", largest=MAX_LAYERS)
    return ModelConfig(
        layers=layers,
        sparse_layers=_sparse_layers(document, layers),
        vocabulary=_integer(document, "vocab_size"),
        hidden=_integer(document, "hidden_size"),
        dense_width=_integer(document, "intermediate_size"),
        expert_width=_integer(document, "moe_intermediate_size"),
        shared_experts=_integer(document, "n_shared_experts"),
        norm_epsilon=_real(document, "rms_norm_eps"),
        tied_embeddings=_flag(document, "tie_word_embeddings"),
        longest_context=_longest_context(document),
        attention=_attention(document),
        router=_router(document),
    )


def _refuse_other_variants(document: Mapping[str, object]) -> None:
    family = document.get("model_type")
    if family != FAMILY:
        raise UsageError(f"model_type {family!r} is not computed by this engine; it computes {FAMILY}")
    expected: Mapping[str, object] = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for key, value in expected.items():
        if document.get(key, value) != value:
            raise UsageError(f"config.json: {key} {document[key]!r} is not computed; only {value!r} is")
    heads = document.get("num_attention_heads")
    if document.get("num_key_value_heads", heads) != heads:
        raise UsageError(
            "config.json: num_key_value_heads must equal num_attention_heads in latent attention"
        )


def _sparse_layers(document: Mapping[str, object], layers: int) -> frozenset[int]:
    kinds = document.get("mlp_layer_types")
    if kinds is None:
        return frozenset(
            range(_integer(document, "first_k_dense_replace", smallest=0, largest=layers), layers)
        )
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}:
        raise UsageError(
            f"config.json: mlp_layer_types must name dense or sparse for each of {layers} layers"
        )
    return frozenset(index for index, kind in enumerate(kinds) if kind == "sparse")


def _longest_context(document: Mapping[str, object]) -> int:
    """The indexer may be left out only while it would select every key."""
    return min(_integer(document, "max_position_embeddings"), _integer(document, "index_topk"))


def _attention(document: Mapping[str, object]) -> AttentionConfig:
    rope_width = _integer(document, "qk_rope_head_dim")
    if rope_width % 2:
        raise UsageError("config.json: qk_rope_head_dim must be even")
    return AttentionConfig(
        heads=_integer(document, "num_attention_heads"),
        query_rank=_integer(document, "q_lora_rank"),
        latent_rank=_integer(document, "kv_lora_rank"),
        nope_width=_integer(document, "qk_nope_head_dim"),
        rope_width=rope_width,
        value_width=_integer(document, "v_head_dim"),
        rope_theta=_rope_theta(document),
    )


def _rope_theta(document: Mapping[str, object]) -> float:
    parameters = document.get("rope_parameters", document.get("rope_scaling"))
    if parameters is None:
        return _real(document, "rope_theta")
    if not isinstance(parameters, dict) or parameters.get("rope_type", "default") != "default":
        raise UsageError("config.json: only the default rope_type is computed, without scaling")
    if parameters.get("partial_rotary_factor", 1) != 1:
        raise UsageError("config.json: partial_rotary_factor other than 1 is not computed")
    return _real(parameters if "rope_theta" in parameters else document, "rope_theta")


def _router(document: Mapping[str, object]) -> RouterConfig:
    experts = _integer(document, "n_routed_experts", largest=2**16)
    groups = _integer(document, "n_group", largest=experts)
    kept_groups = _integer(document, "topk_group", largest=groups)
    if experts % groups or (kept_groups < groups and experts // groups < 2):
        raise UsageError(
            f"config.json: n_group {groups} does not divide {experts} experts into groups of two or more"
        )
    return RouterConfig(
        experts=experts,
        experts_per_token=_integer(document, "num_experts_per_tok", largest=experts // groups * kept_groups),
        groups=groups,
        groups_per_token=kept_groups,
        normalise=_flag(document, "norm_topk_prob"),
        scaling_factor=_real(document, "routed_scaling_factor"),
    )


def _integer(
    document: Mapping[str, object], key: str, smallest: int = 1, largest: int = MAX_DIMENSION
) -> int:
    value = document.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not smallest <= value <= largest:
        raise UsageError(
            f"config.json: {key} must be an integer from {smallest} to {largest}, not {value!r:.40}"
        )
    return value


def _real(document: Mapping[str, object], key: str) -> float:
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UsageError(f"config.json: {key} must be a number above 0, not {value!r:.40}")
    return float(value)


def _flag(document: Mapping[str, object], key: str) -> bool:
    value = document.get(key)
    if not isinstance(value, bool):
        raise UsageError(f"config.json: {key} must be true or false, not {value!r:.40}")
    return value
