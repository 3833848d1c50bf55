"""Write tiny ``glm_moe_dsa`` models whose bytes are the same on every platform and numpy version.

Five layers; the last two are sparse, with eight routed experts each and one shared expert. Dense weights
are f32; routed experts take the format that is asked for. ``down_proj`` has 80 inputs, so that groups of 32
and of 64 end in a shorter group. 80 and not 96: at 96 inputs the bytes of int4-grouped-64 and int3-g64 agree.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pytest_colibri.container.families import MLP_EXPERT
from pytest_colibri.container.formats import WeightFormat, quantise
from pytest_colibri.container.usage import USAGE_FILE, write_usage
from pytest_colibri.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TinyFormat = Literal["f32", "int8-row", "int4-row", "int4-grouped"]

TINY_MODELS: Mapping[str, tuple[TinyFormat, int]] = {
    "f32": ("f32", 64),
    "int8-row": ("int8-row", 64),
    "int4-row": ("int4-row", 64),
    "int4-grouped-32": ("int4-grouped", 32),
    "int4-grouped-64": ("int4-grouped", 64),
}
"""The tiny models of the suite by name: format and group size."""

HIDDEN, INTERMEDIATE, MOE_INTERMEDIATE, VOCABULARY = 128, 64, 80, 256
LAYERS, FIRST_SPARSE, EXPERTS, EXPERTS_PER_TOKEN = 5, 3, 8, 2
HEADS, Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 4, 64, 32, 24, 8, 32
INDEX_HEADS, INDEX_DIM = 2, 16

CONFIG: Mapping[str, object] = {
    "model_type": "glm_moe_dsa",
    "architectures": ["GlmMoeDsaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "moe_intermediate_size": MOE_INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": FIRST_SPARSE,
    "mlp_layer_types": ["dense"] * FIRST_SPARSE + ["sparse"] * (LAYERS - FIRST_SPARSE),
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": EXPERTS_PER_TOKEN,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": Q_RANK,
    "kv_lora_rank": KV_RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "qk_head_dim": NOPE + ROPE,
    "v_head_dim": VALUE,
    "head_dim": ROPE,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 4096,
    "index_topk": 4096,
    "index_head_dim": INDEX_DIM,
    "index_n_heads": INDEX_HEADS,
    "indexer_types": ["full"] * LAYERS,
    "layer_types": ["indexed_attention"] * LAYERS,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "initializer_range": 0.02,
    "use_cache": True,
}


def write_tiny_model(
    directory: Path, format: TinyFormat, *, group_size: int = 64, seed: int = 0, usage: bool = True
) -> Path:
    """Write ``config.json``, ``model.safetensors`` and, with ``usage``, ``.coli_usage``; return the folder.

    ``group_size`` (16, 32 or 64) is the inputs per scale of ``int4-grouped``. The usage history lists every
    routed expert with a count of its own. Equal arguments give equal bytes.
    """
    expert_format = _expert_format(format, group_size)
    directory.mkdir(parents=True, exist_ok=True)
    stored: dict[str, NDArray[np.float32] | NDArray[np.uint8]] = {}
    for name, shape in _shapes():
        weights = _weights(name, shape, seed)
        if expert_format.kind == "f32" or MLP_EXPERT.numbers(name) is None:
            stored[name] = weights
            continue
        payload, scales = quantise(weights, expert_format)
        assert scales is not None
        stored[name], stored[f"{name}.qs"] = payload, scales
    (directory / "config.json").write_bytes(json.dumps(dict(CONFIG), indent=2).encode("ascii"))
    _write_safetensors(directory / "model.safetensors", stored)
    if usage:
        write_usage(directory / USAGE_FILE, _usage())
    return directory


def _expert_format(format: TinyFormat, group_size: int) -> WeightFormat:
    if format != "int4-grouped":
        return WeightFormat(format)
    if group_size not in (16, 32, 64):
        raise UsageError(f"a tiny model has groups of 16, 32 or 64 inputs, not {group_size}")
    return WeightFormat(format, group_size)


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
        yield from _attention_shapes(f"{prefix}.self_attn")
        if layer < FIRST_SPARSE:
            yield from _mlp_shapes(f"{prefix}.mlp", INTERMEDIATE)
            continue
        yield f"{prefix}.mlp.gate.weight", (EXPERTS, HIDDEN)
        yield f"{prefix}.mlp.gate.e_score_correction_bias", (EXPERTS,)
        yield from _mlp_shapes(f"{prefix}.mlp.shared_experts", MOE_INTERMEDIATE)
        for expert in range(EXPERTS):
            yield from _mlp_shapes(f"{prefix}.mlp.experts.{expert}", MOE_INTERMEDIATE)


def _attention_shapes(prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.q_a_proj.weight", (Q_RANK, HIDDEN)
    yield f"{prefix}.q_a_layernorm.weight", (Q_RANK,)
    yield f"{prefix}.q_b_proj.weight", (HEADS * (NOPE + ROPE), Q_RANK)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (KV_RANK + ROPE, HIDDEN)
    yield f"{prefix}.kv_a_layernorm.weight", (KV_RANK,)
    yield f"{prefix}.kv_b_proj.weight", (HEADS * (NOPE + VALUE), KV_RANK)
    yield f"{prefix}.o_proj.weight", (HIDDEN, HEADS * VALUE)
    yield f"{prefix}.indexer.wq_b.weight", (INDEX_HEADS * INDEX_DIM, Q_RANK)
    yield f"{prefix}.indexer.wk.weight", (INDEX_DIM, HIDDEN)
    yield f"{prefix}.indexer.k_norm.weight", (INDEX_DIM,)
    yield f"{prefix}.indexer.k_norm.bias", (INDEX_DIM,)
    yield f"{prefix}.indexer.weights_proj.weight", (INDEX_HEADS, HIDDEN)


def _mlp_shapes(prefix: str, intermediate: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (intermediate, HIDDEN)
    yield f"{prefix}.up_proj.weight", (intermediate, HIDDEN)
    yield f"{prefix}.down_proj.weight", (HIDDEN, intermediate)


def _weights(name: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    """Return the f32 weights of a tensor: as a trained model has them, not as an initialised one.

    A matrix keeps the variance of its input. ``lm_head`` and the router spread theirs, so that the best token
    and the chosen experts stand clear of rounding. Norms are near 1, biases near 0.
    """
    import numpy as np

    uniform = _uniform(f"{seed}/{name}", math.prod(shape)).reshape(shape)
    if name.endswith("norm.weight"):
        return np.float32(1) + uniform * np.float32(0.125)
    if len(shape) == 1:
        return uniform * np.float32(0.0625)
    gain = {"lm_head.weight": 4.0, "model.embed_tokens.weight": math.sqrt(shape[1])}.get(name, 1.0)
    if name.endswith("mlp.gate.weight"):
        gain = 2.0
    return uniform * np.float32(gain * math.sqrt(3 / shape[1]))


def _uniform(stream: str, count: int) -> NDArray[np.float32]:
    """Return f32 values in [-1, 1): splitmix64 of a counter, keyed by the stream's name.

    Source of the constants: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    Every step is exact in integers or in f32, so that no platform rounds differently.
    """
    import numpy as np

    key = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "little")
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return ((state >> np.uint64(40)).astype(np.int32) - np.int32(2**23)).astype(np.float32) * np.float32(
        2**-23
    )


def _usage() -> dict[tuple[int, int], int]:
    pairs = [(layer, expert) for layer in range(FIRST_SPARSE, LAYERS) for expert in range(EXPERTS)]
    # 7 has no factor in common with the number of pairs: every count comes once, hot experts in no order.
    return {pair: 1 + (7 * rank + 3) % len(pairs) for rank, pair in enumerate(pairs)}


def _write_safetensors(path: Path, tensors: Mapping[str, NDArray[np.float32] | NDArray[np.uint8]]) -> None:
    header: dict[str, object] = {}
    position = 0
    for name, values in sorted(tensors.items()):
        dtype = "U8" if values.dtype.itemsize == 1 else "F32"
        end = position + values.nbytes
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, values in sorted(tensors.items()):
            file.write(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes())
