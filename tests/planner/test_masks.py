"""Masks restrict and renumber devices, as the drivers do, and a plan speaks of what is left."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machines import device, full_usage, machine, small_model

from pytest_colibri.host.model import Accelerator
from pytest_colibri.judge.memory import broken_rules_of
from pytest_colibri.planner.environment import engine_variables
from pytest_colibri.planner.masks import visible_devices
from pytest_colibri.planner.plan import Plan, PlanRequest
from pytest_colibri.planner.reference import plan
from pytest_colibri.units import GB

UUIDS = ("1a2b0000000000000000000000000000", "1a2c0000000000000000000000000000", "ffff" * 8)


def card(index: int, *, api: str = "cuda") -> Accelerator:
    bare = device(f"card {index}", 24 * GB, index=index, api=api)
    return replace(bare, identity=replace(bare.identity, uuid=UUIDS[index]))


CARDS = tuple(card(index) for index in range(3))


def seen(mask: str, *, name: str = "CUDA_VISIBLE_DEVICES", backend: str = "cuda") -> list[tuple[int, str]]:
    visible = visible_devices(backend, CARDS, {name: mask})
    return [(number, device.identity.name) for number, device in visible.devices]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("0,1,2", [(0, "card 0"), (1, "card 1"), (2, "card 2")]),
        ("2,0", [(0, "card 2"), (1, "card 0")]),
        (" 1 ", [(0, "card 1")]),
        ("GPU-ffffffff-ffff-ffff-ffff-ffffffffffff,0", [(0, "card 2"), (1, "card 0")]),
        ("GPU-1a2c", [(0, "card 1")]),
        ("", []),
        ("-1", []),
        ("1,-1,0", [(0, "card 1")]),
        ("1,7,0", [(0, "card 1")]),
        ("1,1,0", [(0, "card 1")]),
        ("GPU-1a2", []),
        ("MIG-1a2c", []),
        ("GPU-", []),
        (",0", []),
        ("none", []),
    ],
)
def test_a_mask_restricts_and_renumbers(mask, expected):
    assert seen(mask) == expected


@pytest.mark.parametrize(
    ("mask", "note"),
    [
        ("1,7,0", "CUDA_VISIBLE_DEVICES=1,7,0: the device 7 was not found; it and all that follow are not"),
        ("1,1", "the device 1 is named twice"),
        ("0,-1", "-1 ends the list of visible devices"),
        ("", "CUDA_VISIBLE_DEVICES is empty: no device is visible"),
    ],
)
def test_what_a_mask_hides_is_told(mask, note):
    (told,) = visible_devices("cuda", CARDS, {"CUDA_VISIBLE_DEVICES": mask}).notes
    assert note in told


def test_a_mask_that_names_devices_only_is_not_commented():
    assert visible_devices("cuda", CARDS, {"CUDA_VISIBLE_DEVICES": "2,1"}).notes == ()


@pytest.mark.parametrize(
    ("backend", "environment", "expected"),
    [
        ("rocm", {"HIP_VISIBLE_DEVICES": "2"}, [0]),
        ("rocm", {"CUDA_VISIBLE_DEVICES": "2"}, [0]),
        ("rocm", {"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": ""}, [0, 1]),
        ("cuda", {"HIP_VISIBLE_DEVICES": "2"}, [0, 1, 2]),
        ("vulkan", {"CUDA_VISIBLE_DEVICES": ""}, [0, 1, 2]),
        ("cuda", {"COLI_GPU": "1"}, [1]),
        ("cuda", {"COLI_GPUS": "2, 0"}, [0, 2]),
        ("cuda", {"COLI_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "2"}, [0]),
        ("cuda", {"COLI_GPUS": ""}, [0, 1, 2]),
    ],
)
def test_each_backend_has_its_masks(backend, environment, expected):
    visible = visible_devices(backend, CARDS, environment)
    assert [number for number, _ in visible.devices] == expected


@pytest.mark.parametrize("name", ["COLI_GPU", "COLI_GPUS"])
def test_a_chosen_device_that_was_not_found_is_told(name):
    visible = visible_devices("cuda", CARDS, {name: "1,9,x"})
    assert [device for _, device in visible.devices] == [CARDS[1]]
    assert visible.notes == (
        f"{name}=1,9,x: the device 9 was not found",
        f"{name}=1,9,x: the device x was not found",
    )


def planned(environment: dict[str, str], **change: object) -> Plan:
    model = small_model()
    request = PlanRequest(
        model, machine(64 * GB), "cuda", CARDS, usage=full_usage(model), environment=environment
    )
    answer = plan(replace(request, **change))
    assert broken_rules_of(answer) == {}
    return answer


def test_a_plan_uses_visible_devices_by_their_new_numbers():
    answer = planned({"CUDA_VISIBLE_DEVICES": "2,1"})
    assert [share.accelerator for share in answer.devices] == [CARDS[1], CARDS[2]]
    assert answer.environment["COLI_GPU"] == "1"
    assert answer.environment["CUDA_VISIBLE_DEVICES"] == "2,1"


def test_a_hidden_device_gets_no_tier_and_the_plan_says_why():
    answer = planned({"CUDA_VISIBLE_DEVICES": "-1"})
    assert answer.devices == ()
    assert "COLI_CUDA" not in answer.environment
    assert "the engine does not see card 0, card 1, card 2: the CPU does all work" in answer.warnings


def test_a_visible_device_that_is_not_asked_for_keeps_its_number():
    host = replace(machine(64 * GB), accelerators=(*CARDS, card(0, api="vulkan")))
    answer = planned({"CUDA_VISIBLE_DEVICES": "0,2"}, host=host, accelerators=(CARDS[2],))
    assert answer.environment["COLI_GPU"] == "1"
    assert answer.warnings == ()


def test_a_choice_of_the_user_decides_where_the_tier_goes():
    answer = planned({"COLI_GPU": "2"})
    assert [share.accelerator for share in answer.devices] == [CARDS[2]]
    assert answer.environment["COLI_GPU"] == "2"


def test_masks_of_both_vendors_speak_to_an_engine():
    environment = {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1", "HIPPO": "1"}
    assert engine_variables(environment).keys() == {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"}
