"""Planners that say the truth in other words, or at another moment, are not accused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machines import LAVAPIPE, device, full_usage, glm_mixed, machine, small_model

from pytest_colibri.host.model import DeviceIdentity, Host
from pytest_colibri.judge.memory import statement_of
from pytest_colibri.judge.plan_rules import RULES, refusal_is_right, why_refusal_is_open
from pytest_colibri.judge.plan_rules.refusal import least_ram_bytes
from pytest_colibri.judge.plan_rules.runtime import least_runtime_bytes
from pytest_colibri.planner.plan import PlanRequest
from pytest_colibri.planner.reference import plan
from pytest_colibri.units import GB

GLM = glm_mixed()
CPU = PlanRequest(GLM, machine(100 * GB), "cpu", vram_bytes=8 * GB)
SOFTWARE = PlanRequest(GLM, machine(100 * GB), "vulkan", (LAVAPIPE,), usage=full_usage(GLM))
CARD = PlanRequest(GLM, machine(100 * GB), "cuda", (device("card", 24 * GB),))
MISSING = PlanRequest(small_model(), machine(100 * GB), "cuda")
CONTRADICTING = tuple(
    replace(
        device("card", 16 * GB, api=api),
        identity=DeviceIdentity(api, 0, "card", pci="0000:03:00.0"),
        processor=name,
    )
    for api, name in (("vulkan", "gfx1200"), ("rocm", "gfx1201"))
)
TWO_NAMES = PlanRequest(
    GLM, replace(machine(100 * GB), accelerators=CONTRADICTING), "vulkan", CONTRADICTING[:1]
)


@pytest.mark.parametrize(
    ("rule", "request_", "warning"),
    [
        ("explicit_vram_holds", CPU, "VRAM budget of 8.0 GB ignored: no GPU works"),
        ("cpu_devices_are_told", SOFTWARE, "llvmpipe is software: its work is done by the processor"),
        ("cold_misses_are_told", CARD, "misses may reach the SSD"),
        ("missing_gpu_is_told", MISSING, "no supported graphics card was found"),
        ("contradictions_are_told", TWO_NAMES, "Vulkan says GFX1200, ROCm says gfx1201"),
    ],
)
def test_another_wording_tells_the_same(rule, request_, warning):
    assert RULES[rule].applies(request_)
    statement = statement_of(plan(request_))
    assert not RULES[rule].broken_by(replace(statement, warnings=(warning,)), request_)
    assert RULES[rule].broken_by(replace(statement, warnings=("all is well",)), request_)


def host(available: int, kind: str) -> Host:
    return replace(machine(available), kind=kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "is_right"), [("live", True), ("emulated", False)])
def test_a_live_machine_may_have_had_less_when_a_planner_refused(kind, is_right):
    needed = least_ram_bytes(PlanRequest(GLM, machine(100 * GB), "cpu")) or 0
    request = PlanRequest(GLM, host(needed * 102 // 88, kind), "cpu")
    assert (refusal_is_right(request) is None) is is_right


@pytest.mark.parametrize(("kind", "is_held"), [("live", True), ("emulated", False)])
def test_a_live_machine_may_have_had_more_when_a_planner_planned(kind, is_held):
    ample = PlanRequest(GLM, machine(100 * GB), "cpu")
    needed = GLM.dense_bytes + least_runtime_bytes(ample) + GLM.bytes_per_slot
    now = replace(ample, host=host(needed * 98 // 100, kind))
    assert (not RULES["least_ram_is_planned"].broken_by(statement_of(plan(ample)), now)) is is_held


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (PlanRequest(GLM, machine(None), "cpu"), "what is available is unknown"),
        (PlanRequest(replace(GLM, config={}), machine(100 * GB), "cpu"), "no rule tells"),
        (replace(CARD, environment={"CUDA_DENSE": "1"}), "asked for on the devices"),
        (CARD, None),
    ],
    ids=["unknown memory", "unknown needs", "residents", "all known"],
)
def test_a_refusal_that_nothing_can_judge_is_not_called_right(request_, why):
    open_because = why_refusal_is_open(request_)
    assert (open_because is None) is (why is None)
    assert (why or "") in (open_because or "")
    assert (refusal_is_right(request_) is None) is (why is not None)
