"""Hollow models for planners: real headers and ``config.json``, and holes in sparse files for the weights.

A planner reads headers only, so that a model of 400 GB takes a few megabytes here. Nothing can run one. The
GLM models are those of the public reports on planners; the others have the public geometry of their family.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pytest_colibri.container import tiny
from pytest_colibri.container.families import BY_MODEL_TYPE, FamilyName
from pytest_colibri.container.formats import WeightFormat
from pytest_colibri.container.usage import USAGE_FILE, write_usage
from pytest_colibri.errors import Unavailable, UsageError
from pytest_colibri.units import GB, MIB

PROBE_BYTES = 16 * MIB
STAT_BLOCK_BYTES = 512  # of st_blocks, whatever the file system's own blocks are
INDEXER_BYTES = 10**6  # its layer is what planners count; the bytes belong to the dense weights

EXPERT_TENSORS: Mapping[FamilyName, str] = {
    "glm": "model.layers.{layer}.mlp.experts.{expert}.weight",
    "deepseek_v4": "layers.{layer}.ffn.experts.{expert}.weight",
    "kimi_k3": "language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.weight",
    "inkling": "model.layers.{layer}.mlp.experts.gate_up_proj",
    "olmoe": "model.layers.{layer}.mlp.experts.{expert}.weight",
    "qwen36": "model.layers.{layer}.mlp.experts.{expert}.weight",
}
"""One tensor an expert, or for Inkling one a layer: planners add up the tensors of an expert anyway."""

INT4, INT8, G64, MXFP4 = (
    WeightFormat("int4-row"),
    WeightFormat("int8-row"),
    WeightFormat("int4-grouped", 64),
    WeightFormat("mxfp4", 32),
)


@dataclass(frozen=True)
class HollowModel:
    """What the headers of a hollow model say.

    ``config`` is its ``config.json``. ``widths`` maps each sparse layer to the bytes of one of its
    ``experts``; ``dense_bytes`` are all other weights, those of ``indexers`` sparse-attention indexers among
    them. ``files`` maps the names of further files to what they hold.
    """

    title: str
    config: Mapping[str, object]
    dense_bytes: int
    experts: int
    widths: Mapping[int, int]
    indexers: int = 0
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Bytes of all weights."""
        return self.dense_bytes + self.experts * sum(self.widths.values())


def write_hollow_model(folder: Path, name: str) -> Path:
    """Write ``config.json``, shards (one for each sparse layer) and ``.coli_usage``; return the folder.

    The usage history lists every routed expert, those with low numbers as used most.
    Raises UsageError for an unknown name and where the files cannot be written, and Unavailable where the
    file system would allocate the weights.
    """
    model = HOLLOW_MODELS.get(name)
    if model is None:
        raise UsageError(f"unknown hollow model {name!r}; allowed: {', '.join(HOLLOW_MODELS)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_holes(folder)
        shards = [_dense_tensors(model), *(_expert_tensors(model, layer) for layer in model.widths)]
        for number, tensors in enumerate(shards, start=1):
            _write_shard(folder / f"model-{number:05}-of-{len(shards):05}.safetensors", tensors)
        config = json.dumps(model.config, indent=2, ensure_ascii=False)
        for file, content in {"config.json": config.encode("utf-8"), **model.files}.items():
            (folder / file).write_bytes(content)
        write_usage(folder / USAGE_FILE, _usage(model))
    except OSError as error:
        raise UsageError(f"{folder}: the model cannot be written: {error.strerror}") from None
    return folder


def _check_holes(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.truncate(PROBE_BYTES)
        blocks: int | None = getattr(os.fstat(probe.fileno()), "st_blocks", None)
    if blocks is None or blocks * STAT_BLOCK_BYTES >= PROBE_BYTES:
        raise Unavailable(
            f"{folder}: this file system keeps no holes in files, or does not say so, and a hollow model "
            "would take the space of its weights; choose a folder on ext4, xfs, btrfs, tmpfs or APFS"
        )


def _dense_tensors(model: HollowModel) -> dict[str, tuple[int, ...]]:
    indexers = {
        f"model.layers.{layer}.self_attn.indexer.wq_b.weight": (INDEXER_BYTES,)
        for layer in range(model.indexers)
    }
    rest = model.dense_bytes - INDEXER_BYTES * len(indexers)
    return {"model.embed_tokens.weight": (rest,), **indexers}


def _expert_tensors(model: HollowModel, layer: int) -> dict[str, tuple[int, ...]]:
    family = BY_MODEL_TYPE[str(model.config["model_type"])]
    name, width = EXPERT_TENSORS[family.name], model.widths[layer]
    if family.fused:
        return {name.format(layer=layer): (model.experts, width)}
    return {name.format(layer=layer, expert=expert): (width,) for expert in range(model.experts)}


def _write_shard(path: Path, tensors: Mapping[str, tuple[int, ...]]) -> None:
    """Write the header of a shard of U8 tensors, and a hole where their bytes would be."""
    header: dict[str, object] = {}
    position = 0
    for name, shape in tensors.items():
        end = position + math.prod(shape)
        header[name] = {"dtype": "U8", "shape": shape, "data_offsets": (position, end)}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + position)


def _usage(model: HollowModel) -> dict[tuple[int, int], int]:
    return {
        (layer, expert): model.experts - expert for layer in model.widths for expert in range(model.experts)
    }


def _expert_bytes(hidden: int, inner: int, weight_format: WeightFormat) -> int:
    """Return the bytes of a gated expert: gate and up of [inner, hidden], down of [hidden, inner]."""
    scale_bytes = 1 if weight_format.kind == "mxfp4" else 4
    return sum(
        weight_format.payload_bytes(outputs, inputs)
        + scale_bytes * (weight_format.scales_count(outputs, inputs) or 0)
        for outputs, inputs in ((inner, hidden), (inner, hidden), (hidden, inner))
    )


def _glm(
    title: str, weight_format: WeightFormat, dense_bytes: int, *, mtp: WeightFormat | None = None
) -> HollowModel:
    """Return GLM-5.2 with its routed experts in one format, and the multi-token-prediction row in another."""
    hidden, inner, layers, dense_layers, experts = 6144, 2048, 78, 3, 256
    widths = dict.fromkeys(range(dense_layers, layers), _expert_bytes(hidden, inner, weight_format))
    if mtp is not None:
        widths[layers] = _expert_bytes(hidden, inner, mtp)
    config = {
        **_glm_config(layers, dense_layers),
        "vocab_size": 154_880,
        "hidden_size": hidden,
        "intermediate_size": 12_288,
        "moe_intermediate_size": inner,
        "n_routed_experts": experts,
        "num_experts_per_tok": 8,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "qk_head_dim": 256,
        "v_head_dim": 256,
        "head_dim": 64,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "num_nextn_predict_layers": 0 if mtp is None else 1,
    }
    return HollowModel(title, config, dense_bytes, experts, widths, indexers=layers)


def _glm_small() -> HollowModel:
    hidden, inner, layers, dense_layers, experts = 2048, 1024, 8, 2, 64
    config = {
        **_glm_config(layers, dense_layers),
        "hidden_size": hidden,
        "moe_intermediate_size": inner,
        "n_routed_experts": experts,
    }
    widths = dict.fromkeys(range(dense_layers, layers), _expert_bytes(hidden, inner, INT4))
    return HollowModel(
        "GLM with 8 small layers, for machines of 6 GB and more", config, GB // 2, experts, widths, layers
    )


def _glm_config(layers: int, dense_layers: int) -> dict[str, object]:
    return {
        **tiny.CONFIG,
        "num_hidden_layers": layers,
        "first_k_dense_replace": dense_layers,
        "mlp_layer_types": ["dense"] * dense_layers + ["sparse"] * (layers - dense_layers),
        "indexer_types": ["full"] * layers,
        "layer_types": ["indexed_attention"] * layers,
        "max_position_embeddings": 131_072,
    }


def _deepseek_v4() -> HollowModel:
    hidden, inner, layers, experts = 4096, 2048, 43, 256
    config: dict[str, object] = {
        "model_type": "deepseek_v4",
        "vocab_size": 129_280,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "head_dim": 512,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "sliding_window": 128,
        "index_head_dim": 128,
        "compress_ratios": [0, 0, *(4 if layer % 2 else 128 for layer in range(3, layers + 1))],
        "n_routed_experts": experts,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": inner,
    }
    widths = dict.fromkeys(range(layers), _expert_bytes(hidden, inner, MXFP4))
    return HollowModel("DeepSeek V4 Flash, experts in fp4", config, 7_800_000_000, experts, widths)


def _kimi_k3() -> HollowModel:
    inner, latent, layers, experts = 3072, 3584, 93, 896
    mla_layers = {*range(4, layers, 4), layers}  # counted from 1, as in the list of the others
    config: dict[str, object] = {
        "model_type": "kimi_k3",
        "text_config": {
            "vocab_size": 163_840,
            "hidden_size": 7168,
            "num_hidden_layers": layers,
            "first_k_dense_replace": 1,
            "num_attention_heads": 96,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "num_experts": experts,
            "num_experts_per_token": 16,
            "moe_intermediate_size": inner,
            "routed_expert_hidden_size": latent,
            "linear_attn_config": {
                "num_heads": 96,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
                "kda_layers": [layer for layer in range(1, layers + 1) if layer not in mla_layers],
            },
        },
    }
    widths = dict.fromkeys(range(1, layers), _expert_bytes(latent, inner, MXFP4))
    return HollowModel("Kimi K3, experts in fp4", config, 33_800_000_000, experts, widths)


def _inkling() -> HollowModel:
    hidden, inner, layers, dense_layers, experts = 6144, 3072, 66, 2, 256
    config: dict[str, object] = {
        "model_type": "inkling_mm_model",
        "text_config": {
            "vocab_size": 201_024,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "swa_num_key_value_heads": 16,
            "sliding_window_size": 512,
            "d_rel": 16,
            "sconv_kernel_size": 4,
            "n_routed_experts": experts,
            "num_experts_per_tok": 6,
            "intermediate_size": inner,
            "dense_intermediate_size": 24_576,
        },
    }
    widths = dict.fromkeys(range(dense_layers, layers), _expert_bytes(hidden, inner, INT4))
    return HollowModel("Inkling, int4 experts fused by layer", config, 15_300_000_000, experts, widths)


def _olmoe() -> HollowModel:
    hidden, inner, layers, experts = 2048, 1024, 16, 64
    config: dict[str, object] = {
        "model_type": "olmoe",
        "vocab_size": 50_304,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": experts,
        "num_experts_per_tok": 8,
    }
    widths = dict.fromkeys(range(layers), _expert_bytes(hidden, inner, INT8))
    return HollowModel("OLMoE, int8 experts", config, 1_900_000_000, experts, widths)


def _olmoe_with_key(key: str, value: object) -> HollowModel:
    model = _olmoe()
    return replace(
        model, title=f"OLMoE, {key}: {value or 'null'} in its config", config={**model.config, key: value}
    )


def _olmoe_with_file(name: str, content: bytes) -> HollowModel:
    return replace(_olmoe(), title=f"OLMoE, {content!r} in {name}", files={name: content})


def _qwen36() -> HollowModel:
    hidden, inner, layers, experts = 2048, 512, 40, 256
    config: dict[str, object] = {
        "model_type": "qwen3_5_moe",
        "text_config": {
            "vocab_size": 248_320,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * (layers // 4),
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_experts": experts,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": inner,
        },
    }
    widths = dict.fromkeys(range(layers), _expert_bytes(hidden, inner, G64))
    return HollowModel("Qwen3.6-35B-A3B, int4 experts in groups of 64", config, 2 * GB, experts, widths)


HOLLOW_MODELS: Mapping[str, HollowModel] = {
    "glm-mixed": _glm("GLM-5.2, int4 rows and an int8 MTP row", INT4, 10_700_000_000, mtp=INT8),
    "glm-mixed-without-mtp": _glm("GLM-5.2, int4 rows alone", INT4, 10_700_000_000),
    "glm-g64": _glm("GLM-5.2, int4 in groups of 64", G64, 11_900_000_000),
    "glm-g64-int8-mtp": _glm(
        "GLM-5.2, int4 in groups of 64 and an int8 MTP row", G64, 11_900_000_000, mtp=INT8
    ),
    "glm-small": _glm_small(),
    "deepseek-v4": _deepseek_v4(),
    "kimi-k3": _kimi_k3(),
    "inkling": _inkling(),
    "olmoe": _olmoe(),
    # A null key of another family, a name that is valid in UTF-8 and not in the code pages of Windows,
    # and a record of the speed of the disk that no engine writes.
    "olmoe-null-key": _olmoe_with_key("kv_lora_rank", None),
    "olmoe-chinese-name": _olmoe_with_key("_name_or_path", "量化"),
    "olmoe-damaged-record": _olmoe_with_file(".coli_ssd", b"inf\n"),
    "qwen36": _qwen36(),
}
