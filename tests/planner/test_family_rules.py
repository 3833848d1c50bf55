"""The memory rules of each model family, against figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machines import FAMILY_CONFIGS, device, glm_mixed, machine, small_model

from pytest_colibri.container.families import BY_MODEL_TYPE, FAMILIES
from pytest_colibri.errors import UsageError
from pytest_colibri.planner import runtime
from pytest_colibri.planner.families import RULES
from pytest_colibri.planner.plan import PlanRequest
from pytest_colibri.planner.reference import plan
from pytest_colibri.units import GB

CONTEXT = 1000


def test_every_family_that_can_be_read_has_rules():
    assert RULES.keys() == {family.name for family in FAMILIES}
    assert {BY_MODEL_TYPE[model_type].name for model_type in FAMILY_CONFIGS} == RULES.keys()


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("glm_moe_dsa", 4 * CONTEXT * (6 * (512 + 64) + 6 * 128)),
        ("olmoe", 4 * 4 * CONTEXT * 8 * 32 * 2),
        ("qwen3_5_moe", 4 * (1 * CONTEXT * 2 * 32 * 2 + 3 * (8 * 16 * 24 + (2 * 4 * 16 + 8 * 24) * 3))),
        ("kimi_k3", 4 * (3 * CONTEXT * (128 + 32) + 5 * (8 * 64 * 64 + 3 * 3 * 8 * 64))),
        (
            "inkling_mm_model",
            4
            * (
                2 * (2 * CONTEXT * 4 * 32 + 10 * 100 * 8 * 32)
                + 2 * (2 * (4 * 32 + 256) + 10 * (8 * 32 + 256)) * 3
            ),
        ),
        ("deepseek_v4", 4 * (500 * 32 + 2 * 250 * (32 + 24) + 4 * 8 * 32)),
    ],
)
def test_a_slot_holds_what_grows_with_the_context_and_what_does_not(family, expected):
    assert runtime.kv_bytes(small_model(family=family), CONTEXT) == expected


@pytest.mark.parametrize(
    ("family", "per_token", "fixed"),
    [
        ("glm_moe_dsa", 4 * (192 + 256), 0),
        ("olmoe", 0, 0),
        ("qwen3_5_moe", 0, 0),
        ("kimi_k3", 6 * 8 * 64 + 64 + 256, 0),
        ("inkling_mm_model", 2 * 16 * 32 + 2 * 8 * 32 + 16 * 16, 0),
        ("deepseek_v4", 48 + 2 * 16 * 32 + 32 + 4 * 64, 48),
    ],
)
def test_workspace_is_that_of_the_widest_layer(family, per_token, fixed):
    model = small_model(family=family)
    assert runtime.workspace_bytes(model, CONTEXT) == 4 * (CONTEXT * per_token + fixed)


@pytest.mark.parametrize(
    ("family", "attention", "chosen"),
    [
        ("glm_moe_dsa", 4 * (192 + 64 + 256), 8 * 2048),
        ("olmoe", 8 * 2 * 32, 2 * 96),
        ("qwen3_5_moe", 8 * 2 * 32, 2 * 96),
        ("kimi_k3", 16 * (48 + 32 + 40), 2 * 96),
        ("inkling_mm_model", 16 * 2 * 32, 2 * 96),
        ("deepseek_v4", 16 * 2 * 32, 2 * 96),
    ],
)
def test_scratch_grows_with_the_width_of_a_prompt(family, attention, chosen):
    model = small_model(family=family)
    per_token = 4 * (4 * 256 + 2 * attention + 3 * chosen)
    assert runtime.prompt_scratch_bytes(model, 7) == 7 * per_token


def test_mla_layers_can_be_wider_than_kda_layers():
    config = {**FAMILY_CONFIGS["kimi_k3"], "num_attention_heads": 64}
    model = replace(small_model(family="kimi_k3"), config=config)
    assert runtime.workspace_bytes(model, 1) == 4 * (64 + 128 + 32 + 64 * (48 + 32 + 2 * 40))


def test_an_indexer_of_kimi_caches_in_its_mla_layers():
    model = small_model(family="kimi_k3")
    indexed = replace(model, config={**model.config, "index_head_dim": 16})
    assert runtime.kv_bytes(indexed, CONTEXT) - runtime.kv_bytes(model, CONTEXT) == 4 * 3 * CONTEXT * 16


@pytest.mark.parametrize(
    ("layers", "local"),
    [
        ({}, 10),
        ({"layer_types": ["hybrid_sliding"] * 3 + ["hybrid"] * 9}, 3),
        ({"local_layer_ids": [0, 1, 1, 11, 12, "2"]}, 3),
    ],
)
def test_inkling_layers_with_a_window_stop_to_grow(layers, local):
    model = small_model(family="inkling_mm_model")
    model = replace(model, config={**model.config, **layers})
    growth = runtime.kv_bytes(model, 2 * CONTEXT) - runtime.kv_bytes(model, CONTEXT)
    assert growth == 4 * 2 * (12 - local) * CONTEXT * 4 * 32


def test_width_of_inkling_experts_has_two_names():
    model = small_model(family="inkling_mm_model")
    own_key = {**model.config, "intermediate_size": 96, "dense_intermediate_size": 4096}
    del own_key["moe_intermediate_size"]
    renamed = replace(model, config=own_key)
    assert runtime.prompt_scratch_bytes(renamed, 1) == runtime.prompt_scratch_bytes(model, 1)


def test_prediction_layers_of_deepseek_have_a_window_too():
    model = small_model(family="deepseek_v4")
    longer = replace(model, config={**model.config, "compress_ratios": [0, 2, 4, 4, 0]})
    assert runtime.kv_bytes(longer, CONTEXT) - runtime.kv_bytes(model, CONTEXT) == 4 * 8 * 32


@pytest.mark.parametrize(
    ("family", "change", "fault"),
    [
        ("olmoe", {"hidden_size": 4}, "hidden_size = 4 is less than num_attention_heads = 8"),
        ("qwen3_5_moe", {"layer_types": ["full_attention"]}, r"each of 4 layers, and has 1"),
        ("qwen3_5_moe", {"layer_types": 4}, r"each of 4 layers, and is int"),
        ("kimi_k3", {"linear_attn_config": None}, "linear_attn_config must have a list kda_layers"),
        ("kimi_k3", {"linear_attn_config": {"kda_layers": 3}}, "must have a list kda_layers"),
        ("deepseek_v4", {"compress_ratios": [0, 2, 4, -4]}, "compress_ratios must be integers, 0 or more"),
        ("deepseek_v4", {"compress_ratios": [0, 2, True, 4]}, "compress_ratios must be integers"),
        ("inkling_mm_model", {"sliding_window_size": 0}, "sliding_window_size must be a positive integer"),
    ],
)
def test_config_that_the_rules_cannot_read_is_refused(family, change, fault):
    model = small_model(family=family)
    model = replace(model, config={**model.config, **change})
    with pytest.raises(UsageError, match=fault):
        plan(PlanRequest(model, machine(100 * GB), "cpu"))


@pytest.mark.parametrize(
    ("kv_type", "bits"), [("f32", 32), ("f16", 16), ("bf16", 16), ("q8_0", 8.5), ("q4_0", 4.5)]
)
def test_cache_takes_the_width_of_its_type(kv_type, bits):
    values = 32_768 * (79 * (512 + 64) + 79 * 128)
    assert runtime.kv_bytes(glm_mixed(), 32_768, kv_type) == values * bits / 8


def test_state_does_not_follow_the_type_of_the_cache():
    model = small_model(family="kimi_k3")
    state = 4 * 5 * (8 * 64 * 64 + 3 * 3 * 8 * 64)
    assert runtime.kv_bytes(model, CONTEXT, "f16") - state == (runtime.kv_bytes(model, CONTEXT) - state) / 2


def test_slots_and_type_of_the_cache_are_inputs_and_are_shown():
    request = PlanRequest(glm_mixed(), machine(200 * GB), "cpu", context=65_536, kv_slots=3, kv_type="q8_0")
    planned = plan(request)
    (step,) = [step for step in planned.steps if step.name == "runtime: KV cache"]
    assert step.figure.bytes == 3 * 65_536 * 79 * (576 + 128) * 34 // 32
    assert step.figure.source.endswith("glm_moe_dsa, context 65536, q8_0")
    assert f"{step.figure.bytes // 3} B" in step.figure.source


@pytest.mark.parametrize(
    ("family", "backend", "told"),
    [
        ("deepseek_v4", "vulkan", True),
        ("olmoe", "cuda", True),
        ("qwen3_5_moe", "cuda", False),
        ("kimi_k3", "vulkan", False),
        ("glm_moe_dsa", "vulkan", False),
        ("olmoe", "cpu", False),
    ],
)
def test_backend_without_code_in_the_engine_of_the_family_is_told(family, backend, told):
    devices = () if backend == "cpu" else (device("card", 24 * GB, api=backend),)
    warnings = plan(PlanRequest(small_model(family=family), machine(64 * GB), backend, devices)).warnings
    assert (
        any(f"engine of the family {family} has no code for {backend}" in line for line in warnings) is told
    )
