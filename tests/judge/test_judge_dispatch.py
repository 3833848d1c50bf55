"""Claims of the engine against doctored evidence: every verdict, and what leads to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_colibri.claims.engine import Statement, Telemetry
from pytest_colibri.claims.model import Claim, ClaimKind, Place, Retraction
from pytest_colibri.host.model import Accelerator, DeviceIdentity
from pytest_colibri.judge.dispatch import (
    Sighting,
    judge_counters,
    judge_device,
    judge_expert_tier,
    judge_residency,
)
from pytest_colibri.subjects.protocol import ShaderFile
from pytest_colibri.units import Figure
from pytest_colibri.witness.evidence import DeviceDispatch, DispatchEvidence, PhaseCounts, Reach, ShaderCount

GPU = DeviceIdentity("vulkan", 0, "Arc", uuid="0" * 32)
OTHER = DeviceIdentity("vulkan", 1, "llvmpipe", uuid="1" * 32)
SHADERS = (ShaderFile("gate_up_int4.spv", "gate_up", "aa"), ShaderFile("down_int4.spv", "down", "bb"))
REACH = Reach("tracer", True, "counts")
NO_REACH = Reach("tracer", False, "frida is not installed")


def claim(kind: ClaimKind, **fields: object) -> Claim:
    base = Claim(kind, "engine", "advertised", Place("stdout", 3), device=GPU, pieces=("gate_up", "down"))
    return replace(base, **fields)


def statement(*claims: Claim, telemetry: tuple[Telemetry, ...] = ()) -> Statement:
    return Statement("engine", claims, telemetry, (), None, None, None, True, ())


def phase(name: str, gate_up: int, down: int, submits: int = 5, recorded: int | None = None) -> PhaseCounts:
    counts = (("aa", gate_up), ("bb", down))
    shaders = tuple(ShaderCount(s, n if recorded is None else recorded, n) for s, n in counts)
    return PhaseCounts(name, shaders, submits)


def seen(*phases: PhaseCounts, device: DeviceIdentity = GPU, peak: int = 1000) -> DeviceDispatch:
    return DeviceDispatch(device, phases, {0: peak}, {0: peak})


def sighting(*devices: DeviceDispatch) -> Sighting:
    return Sighting(REACH, DispatchEvidence("tracer", devices))


@pytest.mark.parametrize(
    ("seen_phase", "state"),
    [
        (phase("decode", 10, 10), "held"),
        (phase("decode", 76, 76), "held"),
        (phase("decode", 9, 10), "broken"),
        (phase("decode", 10, 0), "broken"),
        (phase("decode", 0, 0), "broken"),
        (phase("decode", 0, 0, recorded=76), "broken"),
        (phase("prefill", 76, 76), "broken"),
        (phase("outside", 76, 76), "broken"),
    ],
)
def test_tier_is_judged_in_its_phase_and_by_piece(seen_phase: PhaseCounts, state: str) -> None:
    verdicts = judge_expert_tier(
        statement(claim("expert_tier")), SHADERS, sighting(seen(seen_phase)), {"decode": 10}
    )
    assert [verdict.state for verdict in verdicts] == [state]
    assert bool(verdicts[0].reason) == (state == "broken")


def test_work_on_another_device_is_no_work_on_this_one() -> None:
    evidence = sighting(seen(phase("decode", 76, 76), device=OTHER))
    (verdict,) = judge_expert_tier(statement(claim("expert_tier")), SHADERS, evidence, {"decode": 10})
    assert verdict.state == "broken"
    assert "152 dispatches went to llvmpipe" in verdict.reason


def test_devices_are_judged_one_by_one() -> None:
    evidence = sighting(seen(phase("decode", 0, 0)), seen(phase("decode", 76, 76), device=OTHER))
    for device, state in ((GPU, "broken"), (OTHER, "held")):
        (verdict,) = judge_expert_tier(
            statement(claim("expert_tier", device=device)), SHADERS, evidence, {"decode": 10}
        )
        assert verdict.state == state


def test_unknown_shaders_are_judged_by_their_sum() -> None:
    evidence = sighting(seen(phase("decode", 5, 5)))
    (verdict,) = judge_expert_tier(statement(claim("expert_tier")), (), evidence, {"decode": 10})
    assert verdict.state == "held"


def test_shader_of_no_piece_does_not_count() -> None:
    shaders = (SHADERS[0], replace(SHADERS[1], sha256="cc"))
    evidence = sighting(seen(phase("decode", 76, 76)))
    (verdict,) = judge_expert_tier(statement(claim("expert_tier")), shaders, evidence, {"decode": 10})
    assert verdict.state == "broken"


@pytest.mark.parametrize("engine_says", [(), (claim("device"),)])
def test_nothing_announced_is_not_claimed(engine_says: tuple[Claim, ...]) -> None:
    (verdict,) = judge_expert_tier(statement(*engine_says), SHADERS, sighting(), {"decode": 10})
    assert verdict.state == "not_claimed"


def test_taken_back_is_not_claimed_even_with_work_seen() -> None:
    taken_back = claim("expert_tier", retracted=Retraction("no usage history", Place("stdout", 9)))
    (verdict,) = judge_expert_tier(
        statement(taken_back), SHADERS, sighting(seen(phase("decode", 76, 76))), {"decode": 10}
    )
    assert verdict.state == "not_claimed"
    assert "stdout:9" in verdict.reason


def test_no_reach_is_never_a_pass_nor_a_fault() -> None:
    blind = Sighting(NO_REACH, None)
    said = statement(
        claim("device"),
        claim("expert_tier"),
        claim("resident", counts={"bytes": 10}),
        telemetry=(Telemetry("decode", {}, {"gate_up_int4.spv": 1}, 1, Place("stdout", 8)),),
    )
    verdicts = [
        judge_device(said, accelerator(GPU), blind),
        *judge_expert_tier(said, SHADERS, blind, {"prefill": 1, "decode": 1}),
        judge_residency(said, blind),
        *judge_counters(said, SHADERS, blind),
    ]
    assert {verdict.state for verdict in verdicts} == {"unwitnessed"}
    assert {verdict.reason for verdict in verdicts} == {NO_REACH.statement}


def test_nothing_due_is_not_a_pass() -> None:
    (verdict,) = judge_expert_tier(
        statement(claim("expert_tier")), SHADERS, sighting(seen(phase("decode", 0, 0))), {"decode": 0}
    )
    assert verdict.state == "unwitnessed"


def accelerator(identity: DeviceIdentity) -> Accelerator:
    unknown = Figure(None, "not probed")
    return Accelerator(identity, "intel", "discrete", "driver", "discrete", unknown, unknown)


@pytest.mark.parametrize(
    ("claimed", "wanted", "opened", "state"),
    [
        (GPU, GPU, GPU, "held"),
        (OTHER, GPU, OTHER, "broken"),
        (GPU, GPU, OTHER, "broken"),
        (GPU, GPU, None, "broken"),
        (replace(GPU, index=3), GPU, GPU, "held"),
    ],
)
def test_device_is_the_one_asked_for(
    claimed: DeviceIdentity, wanted: DeviceIdentity, opened: DeviceIdentity | None, state: str
) -> None:
    evidence = sighting(seen(device=opened)) if opened else sighting()
    verdict = judge_device(statement(claim("device", device=claimed)), accelerator(wanted), evidence)
    assert verdict.state == state


@pytest.mark.parametrize(("peak", "state"), [(1000, "held"), (999, "broken"), (0, "broken")])
def test_residents_take_memory(peak: int, state: str) -> None:
    said = statement(claim("resident", counts={"bytes": 1000}))
    assert judge_residency(said, sighting(seen(peak=peak))).state == state


def telemetry(gate_up: int, down: int, submits: int) -> tuple[Telemetry, ...]:
    dispatches = {"gate_up_int4.spv": gate_up, "down_int4.spv": down}
    return (Telemetry("decode", {}, dispatches, submits, Place("stdout", 8)),)


@pytest.mark.parametrize(
    ("own", "state"),
    [
        (telemetry(76, 76, 5), "held"),
        (telemetry(76, 75, 5), "broken"),
        (telemetry(75, 77, 5), "broken"),
        (telemetry(76, 76, 6), "broken"),
        (telemetry(0, 0, 0), "broken"),
    ],
)
def test_own_counters_are_compared_shader_by_shader(own: tuple[Telemetry, ...], state: str) -> None:
    said = statement(claim("device"), telemetry=own)
    (verdict,) = judge_counters(said, SHADERS, sighting(seen(phase("decode", 76, 76))))
    assert verdict.state == state


def test_own_counters_of_unknown_shaders_are_compared_as_a_sum() -> None:
    said = statement(claim("device"), telemetry=telemetry(75, 77, 5))
    (verdict,) = judge_counters(said, (), sighting(seen(phase("decode", 76, 76))))
    assert verdict.state == "held"


def test_phases_without_work_have_no_counters_to_judge() -> None:
    said = statement(claim("device"), telemetry=telemetry(0, 0, 0))
    assert judge_counters(said, SHADERS, sighting(seen())) == ()
