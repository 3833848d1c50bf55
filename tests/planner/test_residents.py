"""Dense weights and attention that the user puts on devices are charged there, beside the expert tier."""

from __future__ import annotations

import pytest
from machines import GB10, LAVAPIPE, device, full_usage, glm_mixed, machine, small_model

from pytest_colibri.judge.memory import broken_rules_of
from pytest_colibri.planner.plan import DoesNotFit, Plan, PlanRequest
from pytest_colibri.planner.reference import plan
from pytest_colibri.units import GB

GLM = glm_mixed()
DENSE = GLM.dense_bytes
ATTENTION = 4096 * 4 * (79 * (512 + 64 + 128) + 64 * (192 + 256))
CARD = device("card", 40 * GB)


def sound_plan(*devices: object, backend: str = "cuda", available: int = 100 * GB, **change: object) -> Plan:
    planned = plan(
        PlanRequest(GLM, machine(available), backend, devices or (CARD,), usage=full_usage(GLM), **change)
    )
    assert broken_rules_of(planned) == {}
    return planned


@pytest.mark.parametrize(
    ("backend", "environment", "expected"),
    [
        ("cuda", {"CUDA_DENSE": "1"}, DENSE),
        ("rocm", {"CUDA_DENSE": "2"}, DENSE),
        ("cuda", {"COLI_CUDA_ATTN": "1"}, ATTENTION),
        ("vulkan", {"COLI_VK_DENSE": "1"}, DENSE),
        ("vulkan", {"COLI_VK_DENSE": "1", "COLI_VK_ATTN": "1"}, DENSE + ATTENTION),
        ("vulkan", {"COLI_VK_DENSE": "0", "COLI_VK_ATTN": ""}, 0),
        ("vulkan", {"CUDA_DENSE": "1"}, 0),
        ("metal", {"COLI_VK_DENSE": "1"}, 0),
    ],
)
def test_what_is_asked_for_is_charged_beside_the_tier(backend, environment, expected):
    planned = sound_plan(backend=backend, environment=environment)
    assert planned.resident_bytes == expected
    assert planned.vram_budget_bytes == 38 * GB - expected
    assert planned.hot_bytes <= planned.vram_budget_bytes


def test_the_exported_tier_leaves_room_for_the_dense_weights():
    planned = sound_plan(environment={"CUDA_DENSE": "1"})
    assert planned.environment["CUDA_EXPERT_GB"] == "27.300"


def test_an_explicit_budget_bounds_all_that_goes_to_the_device():
    planned = sound_plan(vram_bytes=20 * GB, environment={"CUDA_DENSE": "1"})
    assert planned.vram_budget_bytes + planned.resident_bytes == 20 * GB
    assert not any("VRAM budget clamped" in line for line in planned.warnings)


def test_a_clamped_budget_names_what_else_is_there():
    planned = sound_plan(vram_bytes=50 * GB, environment={"CUDA_DENSE": "1"})
    (line,) = [line for line in planned.warnings if line.startswith("VRAM budget clamped")]
    assert f"(50000000000 B) to 38.0 GB ({38 * GB} B)" in line
    assert "dense weights and attention 10.7 GB" in line


@pytest.mark.parametrize(("vram", "room"), [(None, 8 * GB), (5 * GB, 5 * GB)])
def test_dense_weights_that_do_not_fit_are_refused(vram, room):
    card = device("card", 10 * GB)
    with pytest.raises(DoesNotFit, match="dense weights on the devices, asked for by CUDA_DENSE") as refused:
        sound_plan(card, vram_bytes=vram, environment={"CUDA_DENSE": "1"})
    assert refused.value.missing_bytes == DENSE - room


def test_devices_of_unknown_size_take_no_dense_weights():
    with pytest.raises(DoesNotFit, match=r"there are 0 B for them"):
        sound_plan(device("card", None), environment={"CUDA_DENSE": "1"})


def test_dense_weights_go_on_where_one_device_is_full():
    planned = sound_plan(
        device("first", 10 * GB), device("second", 20 * GB, index=1), environment={"CUDA_DENSE": "1"}
    )
    assert [share.resident_bytes for share in planned.devices] == [8 * GB, DENSE - 8 * GB]
    assert [share.budget_bytes for share in planned.devices] == [0, 18 * GB - (DENSE - 8 * GB)]
    assert planned.environment["COLI_GPUS"] == "0,1"


@pytest.mark.parametrize("ram", [None, 60 * GB])
def test_a_copy_in_the_shared_pool_is_counted_there(ram):
    planned = sound_plan(GB10, available=114 * GB, ram_bytes=ram, environment={"CUDA_DENSE": "1"})
    (share,) = planned.devices
    assert share.resident_bytes == DENSE
    taken = planned.ram_budget_bytes + share.taken_bytes + share.reserve_bytes
    assert taken <= 114 * GB * 88 // 100


def test_a_copy_that_the_shared_pool_cannot_hold_is_refused():
    model = small_model()
    with pytest.raises(DoesNotFit) as refused:
        plan(PlanRequest(model, machine(100 * GB), "cpu", ram_bytes=1))
    least = 1 + refused.value.missing_bytes
    request = PlanRequest(
        model,
        machine((least + model.dense_bytes) * 100 // 88),
        "vulkan",
        (LAVAPIPE,),
        usage=full_usage(model),
        environment={"COLI_VK_DENSE": "1"},
    )
    with pytest.raises(DoesNotFit, match=r"50\.0 MB beside experts on a device that shares the RAM"):
        plan(request)


def test_dense_weights_without_a_device_are_told():
    planned = plan(PlanRequest(GLM, machine(100 * GB), "cuda", environment={"CUDA_DENSE": "1"}))
    assert planned.resident_bytes == 0
    assert "CUDA_DENSE=1 is set, and no device plans: the CPU keeps the dense weights" in planned.warnings
