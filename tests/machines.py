"""Machines and models of the tests, built from the figures of public reports."""

from __future__ import annotations

from pathlib import Path

from pytest_colibri.container.geometry import Geometry, SparseLayer
from pytest_colibri.host.model import Accelerator, DeviceIdentity, Heap, Host, Memory, MemoryType, Processor
from pytest_colibri.profiles.model import DeviceType, Pool
from pytest_colibri.units import GB, Figure

UNKNOWN = Figure(None, "no source")

GLM_CONFIG = {
    "hidden_size": 6144,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "index_head_dim": 128,
}


FAMILY_CONFIGS: dict[str, dict[str, object]] = {
    "glm_moe_dsa": {**GLM_CONFIG, "num_hidden_layers": 5, "hidden_size": 256, "num_attention_heads": 4},
    "olmoe": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "intermediate_size": 96,
    },
    "qwen3_5_moe": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 16,
        "linear_num_value_heads": 8,
        "linear_value_head_dim": 24,
        "linear_conv_kernel_dim": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
    },
    "kimi_k3": {
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "q_lora_rank": 64,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 48,
        "qk_rope_head_dim": 32,
        "v_head_dim": 40,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 96,
        "linear_attn_config": {
            "num_heads": 8,
            "head_dim": 64,
            "short_conv_kernel_size": 4,
            "kda_layers": [1, 2, 3, 5, 6],
        },
    },
    "inkling_mm_model": {
        "hidden_size": 256,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "swa_num_key_value_heads": 8,
        "sliding_window_size": 100,
        "d_rel": 16,
        "sconv_kernel_size": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
    },
    "deepseek_v4": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "head_dim": 32,
        "q_lora_rank": 48,
        "o_groups": 4,
        "o_lora_rank": 64,
        "sliding_window": 8,
        "index_head_dim": 24,
        "compress_ratios": [0, 2, 4, 4],
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
    },
}


def glm_mixed(*, mtp_row: bool = True) -> Geometry:
    """GLM-5.2: 75 rows of 256 int4 experts, and one int8 row of multi-token prediction, twice as wide."""
    widths = {**dict.fromkeys(range(3, 78), 18_915_328), **({78: 37_789_696} if mtp_row else {})}
    return Geometry(
        path=Path("models/glm"),
        family="glm_moe_dsa",
        config=GLM_CONFIG,
        shards=142,
        dense_bytes=10_700_000_000,
        layers=tuple(SparseLayer(index, dict.fromkeys(range(256), width)) for index, width in widths.items()),
        index_layers=79,
    )


def small_model(
    widths: tuple[int, ...] = (6_000_000, 6_000_000), experts: int = 8, family: str = "glm_moe_dsa"
) -> Geometry:
    """A model with few experts, whose whole cache takes some megabytes."""
    return Geometry(
        path=Path("models/small"),
        family=family,
        config=FAMILY_CONFIGS[family],
        shards=1,
        dense_bytes=50_000_000,
        layers=tuple(
            SparseLayer(index, dict.fromkeys(range(experts), width)) for index, width in enumerate(widths, 3)
        ),
        index_layers=6 if family == "glm_moe_dsa" else 0,
    )


def full_usage(geometry: Geometry) -> dict[tuple[int, int], int]:
    """A usage history in which every expert occurs."""
    return {(layer.index, expert): 1 for layer in geometry.layers for expert in layer.expert_bytes}


def machine(
    available: int | None,
    *,
    cgroup: int | None = None,
    total: int | None = None,
    cores: int = 8,
    sockets: int = 1,
) -> Host:
    """A Linux host with these bytes of memory."""
    return Host(
        kind="emulated",
        system="linux",
        architecture="x86_64",
        memory=Memory(
            total=Figure(total, "MemTotal"),
            available=Figure(available, "MemAvailable"),
            cgroup_available=Figure(cgroup, "memory.max" if cgroup is not None else "no cgroup limit"),
        ),
        processor=Processor(cores, sockets, "lscpu"),
        accelerators=(),
    )


def device(
    name: str,
    free: int | None,
    *,
    total: int | None = None,
    pool: Pool | None = "discrete",
    kind: DeviceType = "discrete",
    api: str = "cuda",
    index: int = 0,
    heaps: tuple[Heap, ...] = (),
    memory_types: tuple[MemoryType, ...] = (),
) -> Accelerator:
    """A device with these bytes of memory."""
    return Accelerator(
        identity=DeviceIdentity(api, index, name),
        vendor="nvidia",
        type=kind,
        driver="1.0",
        pool=pool,
        total=Figure(total, "tool"),
        free=Figure(free, "tool"),
        heaps=heaps,
        memory_types=memory_types,
    )


def windowed(name: str, size: int, window: int, free: int | None = None) -> Accelerator:
    """A Vulkan card of ``size`` bytes, of which the CPU can write a ``window``."""
    heaps = (Heap(0, size, True), Heap(1, 4 * GB, False), Heap(2, window, True))
    kinds = (
        MemoryType(0, 0, True, False, False, False),
        MemoryType(1, 1, False, True, True, False),
        MemoryType(2, 2, True, True, True, False),
    )
    free = size if free is None else free
    return device(name, free, total=size, api="vulkan", heaps=heaps, memory_types=kinds)


GB10 = device("NVIDIA GB10", None, pool="unified", kind="integrated")
LAVAPIPE = device("llvmpipe", 20 * GB, total=24 * GB, pool="unified", kind="cpu", api="vulkan")
