"""How the memory of each model family grows: one set of rules a family, read from its ``config.json``.

Every rule counts values, not bytes. Sources: what the engines of these families allocate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pytest_colibri.container.families import BY_MODEL_TYPE, FamilyName, known_model_types
from pytest_colibri.container.geometry import Geometry
from pytest_colibri.errors import UsageError
from pytest_colibri.profiles.model import Backend

Config = Mapping[str, object]

MAX_DIMENSION = 2**31


@dataclass(frozen=True)
class FamilyRules:
    """How one family grows.

    ``cache`` and ``workspace`` take a context in tokens: what one KV slot caches, in the type of the cache,
    and the f32 temporaries of the widest layer. ``state`` is the f32 state of one slot, whatever the context.
    ``attention`` is what query and value of a token take in the widest layer, ``chosen`` the outputs of one
    projection of the experts that a token is routed to.
    """

    cache: Callable[[Geometry, int], int]
    workspace: Callable[[Config, int], int]
    state: Callable[[Config], int]
    attention: Callable[[Config], int]
    chosen: Callable[[Config], int]


def rules_of(geometry: Geometry) -> FamilyRules:
    """Return the rules of the model's family; UsageError names a family that has none."""
    return RULES[family_of(geometry)]


def family_of(geometry: Geometry) -> FamilyName:
    """Return the family of the model; UsageError names one that has no rules."""
    family = BY_MODEL_TYPE.get(geometry.family)
    if family is None:
        raise UsageError(
            f"{geometry.path}: no memory rules for the model family {geometry.family!r}; "
            f"known: {known_model_types()}"
        )
    return family.name


def positive(config: Config, key: str, default: int | None = None) -> int:
    """Return a positive integer of ``config.json``; UsageError names the key and what is there."""
    value = config.get(key, default)
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < MAX_DIMENSION:
        return value
    shown = repr(value)[:80] if key in config else "missing"
    raise UsageError(
        f"config.json: {key} must be a positive integer below {MAX_DIMENSION} for a memory plan, "
        f"and is {shown}"
    )


def one_per_layer(config: Config, key: str) -> list[object]:
    """Return a list of ``config.json`` with an entry for each layer; more may stand for prediction layers."""
    value, layers = config.get(key), positive(config, "num_hidden_layers")
    if isinstance(value, list) and len(value) >= layers:
        return value
    shown = f"has {len(value)}" if isinstance(value, list) else f"is {type(value).__name__}"
    raise UsageError(
        f"config.json: {key} must be a list with an entry for each of {layers} layers, and {shown}"
    )


def no_state(_: Config) -> int:
    """Count the state of a family whose slots hold a cache only."""
    return 0


def no_workspace(_: Config, __: int) -> int:
    """Count the temporaries of a family whose working buffers do not grow with the context."""
    return 0


def _chosen(config: Config) -> int:
    return positive(config, "num_experts_per_tok") * positive(config, "moe_intermediate_size")


def _glm_cache(geometry: Geometry, context: int) -> int:
    config = geometry.config
    rows = positive(config, "num_hidden_layers") + 1  # the multi-token-prediction row has a cache as well
    values = rows * (positive(config, "kv_lora_rank") + positive(config, "qk_rope_head_dim"))
    if geometry.index_layers:
        values += geometry.index_layers * positive(config, "index_head_dim")
    return context * values


def _glm_workspace(config: Config, context: int) -> int:
    per_head = positive(config, "qk_nope_head_dim") + positive(config, "v_head_dim")
    return context * positive(config, "num_attention_heads") * per_head


def _mla_attention(config: Config) -> int:
    head = sum(positive(config, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return positive(config, "num_attention_heads") * head


def _olmoe_head_dim(config: Config) -> int:
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    if hidden < heads:
        raise UsageError(f"config.json: hidden_size = {hidden} is less than num_attention_heads = {heads}")
    return hidden // heads


def _olmoe_cache(geometry: Geometry, context: int) -> int:
    # Key and value are cached for every query head, however few heads they have.
    config = geometry.config
    heads = positive(config, "num_attention_heads")
    return positive(config, "num_hidden_layers") * context * heads * _olmoe_head_dim(config) * 2


def _olmoe_chosen(config: Config) -> int:
    return positive(config, "num_experts_per_tok") * positive(config, "intermediate_size")


def _olmoe_attention(config: Config) -> int:
    return positive(config, "num_attention_heads") * 2 * _olmoe_head_dim(config)


def _qwen_layers(config: Config) -> tuple[int, int]:
    """Return how many layers attend to the whole context, and how many hold a state instead."""
    kinds = one_per_layer(config, "layer_types")
    full = kinds.count("full_attention")
    return full, len(kinds) - full


def _qwen_cache(geometry: Geometry, context: int) -> int:
    config = geometry.config
    return (
        _qwen_layers(config)[0]
        * context
        * positive(config, "num_key_value_heads")
        * positive(config, "head_dim")
        * 2
    )


def _qwen_state(config: Config) -> int:
    keys, values = _qwen_linear_widths(config)
    recurrent = values * positive(config, "linear_key_head_dim")
    convolved = (2 * keys + values) * (positive(config, "linear_conv_kernel_dim") - 1)
    return _qwen_layers(config)[1] * (recurrent + convolved)


def _qwen_linear_widths(config: Config) -> tuple[int, int]:
    keys = positive(config, "linear_num_key_heads") * positive(config, "linear_key_head_dim")
    values = positive(config, "linear_num_value_heads") * positive(config, "linear_value_head_dim")
    return keys, values


def _qwen_attention(config: Config) -> int:
    keys, values = _qwen_linear_widths(config)
    full = positive(config, "num_attention_heads") * positive(config, "head_dim") * 2
    return max(full, keys + values)


def _kimi_linear(config: Config) -> tuple[Config, int, int]:
    """Return the part of the config on KDA layers, and how many layers are KDA and how many are MLA."""
    part, layers = config.get("linear_attn_config"), positive(config, "num_hidden_layers")
    indices = part.get("kda_layers") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(indices, list):
        raise UsageError("config.json: linear_attn_config must have a list kda_layers, counted from 1")
    kda = len({index for index in indices if type(index) is int and 1 <= index <= layers})
    return part, kda, layers - kda


def _kimi_cache(geometry: Geometry, context: int) -> int:
    config = geometry.config
    values = positive(config, "kv_lora_rank") + positive(config, "qk_rope_head_dim")
    if config.get("index_head_dim") is not None:
        values += positive(config, "index_head_dim")
    return _kimi_linear(config)[2] * context * values


def _kimi_state(config: Config) -> int:
    part, kda, _ = _kimi_linear(config)
    heads, head_dim = positive(part, "num_heads"), positive(part, "head_dim")
    convolved = 3 * (positive(part, "short_conv_kernel_size") - 1)
    return kda * heads * head_dim * (head_dim + convolved)


def _kimi_workspace(config: Config, context: int) -> int:
    part, _, _ = _kimi_linear(config)
    head_dim = positive(part, "head_dim")
    kda = 6 * positive(part, "num_heads") * head_dim + head_dim + positive(config, "hidden_size")
    heads = positive(config, "num_attention_heads")
    query = positive(config, "qk_nope_head_dim") + positive(config, "qk_rope_head_dim")
    compressed = positive(config, "kv_lora_rank") + positive(config, "qk_rope_head_dim")
    mla = positive(config, "q_lora_rank") + compressed + heads * (query + 2 * positive(config, "v_head_dim"))
    return context * max(kda, mla)


def _kimi_attention(config: Config) -> int:
    part, _, _ = _kimi_linear(config)
    return max(_mla_attention(config), 2 * positive(part, "num_heads") * positive(part, "head_dim"))


def _kimi_chosen(config: Config) -> int:
    return positive(config, "num_experts_per_token") * positive(config, "moe_intermediate_size")


@dataclass(frozen=True)
class _Heads:
    """The attention of one kind of Inkling layer, and how many layers are of it."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int


def _inkling_heads(config: Config) -> tuple[_Heads, _Heads]:
    """Return the layers that attend to the whole context, and those that attend to a window of it."""
    layers = positive(config, "num_hidden_layers")
    local = _inkling_local_layers(config, layers)
    heads, kv_heads, head_dim = (
        positive(config, key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    return _Heads(layers - local, heads, kv_heads, head_dim), _Heads(
        local,
        positive(config, "swa_num_attention_heads", heads),
        positive(config, "swa_num_key_value_heads", 16),
        positive(config, "swa_head_dim", head_dim),
    )


def _inkling_local_layers(config: Config, layers: int) -> int:
    """Count the layers with a window: as the config says, else all but every sixth."""
    if config.get("layer_types") is not None:
        return one_per_layer(config, "layer_types")[:layers].count("hybrid_sliding")
    indices = config.get("local_layer_ids")
    if isinstance(indices, list):
        return len({index for index in indices if type(index) is int and 0 <= index < layers})
    return layers - layers // 6


def _inkling_cache(geometry: Geometry, context: int) -> int:
    full, local = _inkling_heads(geometry.config)
    window = min(context, positive(geometry.config, "sliding_window_size", 512))
    return 2 * sum(
        kind.layers * rows * kind.kv_heads * kind.head_dim
        for kind, rows in ((full, context), (local, window))
    )


def _inkling_state(config: Config) -> int:
    kernel = positive(config, "sconv_kernel_size", positive(config, "conv_kernel_size", 4))
    return sum(
        kind.layers * 2 * (kind.kv_heads * kind.head_dim + positive(config, "hidden_size")) * (kernel - 1)
        for kind in _inkling_heads(config)
    )


def _inkling_workspace(config: Config, context: int) -> int:
    relative = positive(config, "d_rel", 16)
    return context * max(
        2 * (kind.query_heads + kind.kv_heads) * kind.head_dim + kind.query_heads * relative
        for kind in _inkling_heads(config)
    )


def _inkling_attention(config: Config) -> int:
    return max(kind.query_heads * 2 * kind.head_dim for kind in _inkling_heads(config))


def _inkling_chosen(config: Config) -> int:
    # Where dense layers have a key of their own, the common one is the width of an expert.
    own_key = config.get("dense_intermediate_size") is not None
    width = positive(config, "intermediate_size" if own_key else "moe_intermediate_size")
    return positive(config, "num_experts_per_tok") * width


def _deepseek_ratios(config: Config) -> list[int]:
    """Return by how much each layer compresses its cache, 0 for a window only."""
    ratios = one_per_layer(config, "compress_ratios")
    if not all(type(ratio) is int and ratio >= 0 for ratio in ratios):
        raise UsageError("config.json: compress_ratios must be integers, 0 or more")
    return [ratio for ratio in ratios if type(ratio) is int]


def _deepseek_cache(geometry: Geometry, context: int) -> int:
    config = geometry.config
    head_dim, index = positive(config, "head_dim"), positive(config, "index_head_dim")
    ratios = _deepseek_ratios(config)
    # Layers that compress by 4 hold an index beside what they compress.
    compressed = sum(
        -(-context // ratio) * (head_dim + (index if ratio == 4 else 0)) for ratio in ratios if ratio
    )
    return compressed + len(ratios) * positive(config, "sliding_window") * head_dim


def _deepseek_workspace(config: Config, context: int) -> int:
    rank, head_dim = positive(config, "q_lora_rank"), positive(config, "head_dim")
    query = positive(config, "num_attention_heads") * head_dim
    output = positive(config, "o_groups") * positive(config, "o_lora_rank")
    return context * (rank + 2 * query + head_dim + output) + max(rank, head_dim)


def _deepseek_attention(config: Config) -> int:
    return positive(config, "num_attention_heads") * 2 * positive(config, "head_dim")


WITHOUT_CODE: Mapping[FamilyName, tuple[Backend, ...]] = {
    "olmoe": ("cuda", "rocm", "vulkan", "metal"),
    "qwen36": ("vulkan", "metal"),
    "inkling": ("vulkan",),
    "deepseek_v4": ("vulkan", "metal"),
}
"""Backends that the public engine of a family has no code for, at its version 1.7.0."""

RULES: Mapping[FamilyName, FamilyRules] = {
    "glm": FamilyRules(_glm_cache, _glm_workspace, no_state, _mla_attention, _chosen),
    "deepseek_v4": FamilyRules(_deepseek_cache, _deepseek_workspace, no_state, _deepseek_attention, _chosen),
    "kimi_k3": FamilyRules(_kimi_cache, _kimi_workspace, _kimi_state, _kimi_attention, _kimi_chosen),
    "inkling": FamilyRules(
        _inkling_cache, _inkling_workspace, _inkling_state, _inkling_attention, _inkling_chosen
    ),
    "olmoe": FamilyRules(_olmoe_cache, no_workspace, no_state, _olmoe_attention, _olmoe_chosen),
    "qwen36": FamilyRules(_qwen_cache, no_workspace, _qwen_state, _qwen_attention, _chosen),
}
