"""Each rule of the planner by itself, against figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machines import GB10, GLM_CONFIG, LAVAPIPE, device, full_usage, glm_mixed, machine, small_model

from pytest_colibri.errors import UsageError
from pytest_colibri.planner import budgets, environment, runtime, tiers, tuning
from pytest_colibri.planner.plan import PlanRequest
from pytest_colibri.planner.reference import plan
from pytest_colibri.units import GB

GLM = glm_mixed()


def test_runtime_of_glm_is_the_sum_of_its_parts():
    parts = runtime.runtime_parts(PlanRequest(GLM, machine(100 * GB), "cpu", context=32_768, kv_slots=2))
    assert {name: part.bytes for name, part in parts.items()} == {
        "process": 1_200_000_000,
        "working buffers": 2_500_000_000,
        "experts in flight": 64 * 37_789_696,
        "KV cache": 2 * 32_768 * 4 * (79 * (512 + 64) + 79 * 128),
        "attention workspace": 32_768 * 64 * (192 + 256) * 4,
    }


@pytest.mark.parametrize("rows", [0, 21, 79])
def test_index_cache_grows_with_the_layers_that_have_an_indexer(rows):
    model = replace(GLM, index_layers=rows)
    assert runtime.kv_bytes(model, 1) == 4 * (79 * (512 + 64) + rows * 128)


def test_unknown_family_is_refused_by_name():
    model = replace(GLM, family="mystery_moe")
    with pytest.raises(
        UsageError, match=r"models.glm: no memory rules .*'mystery_moe'; known: deepseek_v4, glm,"
    ):
        plan(PlanRequest(model, machine(100 * GB), "cpu"))


@pytest.mark.parametrize("value", [None, 0, -4, True, 1.5, "64", [64]])
def test_config_that_lies_is_refused_with_the_key(value):
    model = replace(GLM, config={**GLM_CONFIG, "kv_lora_rank": value})
    with pytest.raises(UsageError, match="kv_lora_rank must be a positive integer"):
        plan(PlanRequest(model, machine(100 * GB), "cpu"))


def test_config_without_a_key_is_refused_with_the_key():
    config = {key: value for key, value in GLM_CONFIG.items() if key != "v_head_dim"}
    with pytest.raises(UsageError, match=r"v_head_dim .* is missing"):
        plan(PlanRequest(replace(GLM, config=config), machine(100 * GB), "cpu"))


def test_rank_is_by_use_then_layer_then_expert_and_without_the_unused():
    usage = {(4, 1): 7, (3, 5): 7, (3, 2): 7, (4, 0): 9, (3, 0): 0, (99, 0): 50}
    assert tiers.rank_hot_experts(small_model(), usage) == ((4, 0), (3, 2), (3, 5), (4, 1))


def test_devices_take_whole_experts_row_by_row_in_rank_order():
    sizes = {(3, 0): 10, (3, 1): 10, (4, 0): 20, (4, 1): 5}
    ranked = tuple(sizes)
    assert tiers.fill_devices(ranked, sizes, [25, 20]) == ranked
    assert tiers.fill_devices(ranked, sizes, [25, 19]) == ((3, 0), (3, 1))
    assert tiers.fill_devices(ranked, sizes, []) == ()


def test_cap_counts_each_layer_with_its_own_width():
    model = small_model(widths=(10, 20, 30), experts=4)
    assert tiers.cap_for_cache(model, 179) == 2
    assert tiers.cap_for_cache(model, 10_000) == 4


@pytest.mark.parametrize(
    ("warm", "cold", "gpu", "expected"),
    [(5, 1, True, "disk"), (5, 0, True, "mixed"), (0, 0, True, "compute"), (5, 0, False, "compute")],
)
def test_bottleneck(warm, cold, gpu, expected):
    assert tiers.bottleneck_of(warm, cold, gpu_plans=gpu) == expected


@pytest.mark.parametrize(
    ("asked_ram", "asked_vram", "tier", "expected"),
    [
        (None, None, 500, (20, 79)),
        (None, None, 50, (49, 50)),
        (None, 30, 30, (69, 30)),
        (60, None, 500, (60, 39)),
        (60, 70, 70, (29, 70)),
        (40, 10, 10, (40, 10)),
        (100, None, 500, (100, 0)),
    ],
)
def test_unified_pool_is_split_floor_then_tier_then_cache(asked_ram, asked_vram, tier, expected):
    split = budgets.split_unified_pool(
        pool_bytes=100,
        floor_bytes=20,
        asked_ram=asked_ram,
        asked_vram=asked_vram,
        tier_bytes=tier,
        resident_bytes=0,
        scratch=1,
    )
    assert split == expected


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0.000"), (999_999, "0.000"), (14_089_999_999, "14.089"), (8 * GB, "8.000")]
)
def test_exported_gigabytes_are_rounded_down(count, text):
    assert environment.gigabytes(count) == text


SITUATION = tuning.Situation(
    backend="cpu", gpus=0, sockets=1, bottleneck="mixed", hit_rate=1.0, cold_bytes=1, user={}
)


@pytest.mark.parametrize(
    ("change", "name", "value"),
    [
        ({"bottleneck": "compute"}, "DRAFT", "0"),
        ({"bottleneck": "disk", "hit_rate": 0.8999}, "DRAFT", "0"),
        ({"bottleneck": "disk", "hit_rate": 0.90}, "DRAFT", None),
        ({"bottleneck": "mixed"}, "DRAFT", None),
        ({"bottleneck": "compute", "user": {"COLI_CUDA_MTP": "1"}}, "DRAFT", None),
        ({"backend": "cuda", "gpus": 1}, "COLI_CUDA_PIPE", "1"),
        ({"backend": "cuda", "gpus": 4}, "COLI_CUDA_PIPE", "2"),
        ({"backend": "vulkan", "gpus": 2}, "COLI_CUDA_PIPE", None),
        ({"bottleneck": "disk"}, "PIPE", "1"),
        ({"bottleneck": "disk", "backend": "cuda", "gpus": 1}, "PIPE", None),
        ({"sockets": 2}, "COLI_NUMA", "1"),
        ({"sockets": 1}, "COLI_NUMA", None),
        ({"sockets": 2}, "_numactl", "numactl --interleave=all"),
        ({"sockets": 2, "backend": "cuda", "gpus": 1}, "_numactl", None),
        ({"backend": "vulkan", "gpus": 1}, "COLI_NO_OMP_TUNE", "1"),
        ({"backend": "metal", "gpus": 1}, "COLI_NO_OMP_TUNE", "1"),
        ({"backend": "cuda", "gpus": 1}, "COLI_NO_OMP_TUNE", None),
        ({"cold_bytes": 0}, "PIN_GB", "all"),
        ({"cold_bytes": 1}, "PIN_GB", None),
        ({"cold_bytes": 0, "backend": "cuda", "gpus": 1}, "PIN_GB", None),
    ],
)
def test_tuning(change, name, value):
    settings = tuning.tune(replace(SITUATION, **change))
    assert settings.get(name, (None,))[0] == value


def cuda_environment(count: int = 1, **user: str) -> dict[str, str]:
    cards = tuple(device(f"card {index}", 24 * GB, index=index) for index in range(count))
    request = PlanRequest(
        GLM, machine(100 * GB, cores=12), "cuda", cards, usage=full_usage(GLM), environment=user
    )
    return dict(plan(request).environment)


def test_environment_of_one_cuda_device():
    assert cuda_environment() == {
        "COLI_POLICY": "balanced",
        "OMP_NUM_THREADS": "12",
        "RAM_GB": "88.000",
        "REPIN": "64",
        "DRAFT": "0",
        "COLI_CUDA_PIPE": "1",
        "COLI_CUDA": "1",
        "COLI_GPU": "0",
        "CUDA_EXPERT_GB": "22.000",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


def test_environment_of_several_cuda_devices_names_them():
    exported = cuda_environment(count=2)
    assert exported["COLI_GPUS"] == "0,1"
    assert exported["CUDA_EXPERT_GB"] == "44.000"
    assert "COLI_GPU" not in exported


@pytest.mark.parametrize("name", ["COLI_GPU", "COLI_GPUS"])
def test_device_choice_of_the_user_is_left_alone(name):
    exported = cuda_environment(count=2, **{name: "1"})
    assert {"COLI_GPU", "COLI_GPUS"} & exported.keys() == {name}
    assert exported[name] == "1"
    assert exported["CUDA_EXPERT_GB"] == "22.000"


def test_backend_switched_off_by_the_user_exports_no_device():
    exported = cuda_environment(COLI_CUDA="0")
    assert exported["COLI_CUDA"] == "0"
    assert not {"COLI_GPU", "COLI_GPUS", "CUDA_EXPERT_GB", "COLI_CUDA_PIPE"} & exported.keys()


def test_pinned_set_of_the_user_gets_the_vram_budget():
    assert "PIN_GB" not in cuda_environment()
    assert cuda_environment(PIN="hot.txt")["PIN_GB"] == "22.000"


def test_explicit_values_of_the_user_win_and_are_told():
    planned = plan(PlanRequest(GLM, machine(100 * GB), "cpu", environment={"RAM_GB": "50", "OTHER": "x"}))
    assert planned.environment["RAM_GB"] == "50"
    assert planned.environment["OTHER"] == "x"
    assert "RAM_GB=50 is set by the user and replaces the planned 88.000" in planned.warnings


def test_guessed_cores_are_told():
    host = machine(100 * GB)
    host = replace(host, processor=replace(host.processor, note="logical count taken"))
    assert "physical cores: logical count taken" in plan(PlanRequest(GLM, host, "cpu")).warnings


@pytest.mark.parametrize(("policy", "repin"), [("balanced", "64"), ("quality", None)])
def test_only_the_balanced_policy_pins_again(policy, repin):
    exported = plan(PlanRequest(GLM, machine(100 * GB), "cpu", policy=policy)).environment
    assert exported.get("REPIN") == repin
    assert exported["COLI_POLICY"] == policy


@pytest.mark.parametrize(
    ("backend", "accelerator", "switch"),
    [("vulkan", LAVAPIPE, "COLI_VULKAN"), ("metal", GB10, "COLI_METAL"), ("rocm", GB10, "COLI_CUDA")],
)
def test_each_backend_has_its_switch(backend, accelerator, switch):
    exported = plan(PlanRequest(GLM, machine(100 * GB), backend, (accelerator,))).environment
    assert {name for name in environment.SWITCHES.values() if name in exported} == {switch}
