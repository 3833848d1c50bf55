"""Claims of the engine against doctored evidence: every verdict, and what leads to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_colibri.claims.engine import Statement, Telemetry
from pytest_colibri.claims.model import Claim, ClaimKind, Place, Retraction
from pytest_colibri.host.model import Accelerator, DeviceIdentity, MemoryType
from pytest_colibri.judge.dispatch import (
    Due,
    Sighting,
    judge_counters,
    judge_device,
    judge_expert_tier,
    judge_placement,
    judge_residency,
)
from pytest_colibri.judge.model import Verdict
from pytest_colibri.subjects.protocol import ShaderFile
from pytest_colibri.units import Figure
from pytest_colibri.witness.evidence import DeviceDispatch, DispatchEvidence, PhaseCounts, Reach, ShaderCount

GPU = DeviceIdentity("vulkan", 0, "Arc", uuid="0" * 32)
OTHER = DeviceIdentity("vulkan", 1, "llvmpipe", uuid="1" * 32)
SHADERS = (ShaderFile("gate_up_int4.spv", "gate_up", "aa"), ShaderFile("down_int4.spv", "down", "bb"))
PHASES = (("decode", "begin"), ("decode", "end"))
TEN = {"decode": Due(batches=5, experts=10)}
REACH = Reach("tracer", True, "counts")
NO_REACH = Reach("tracer", False, "frida is not installed")


def claim(kind: ClaimKind, **fields: object) -> Claim:
    base = Claim(kind, "engine", "advertised", Place("stdout", 3), device=GPU, pieces=("gate_up", "down"))
    return replace(base, **fields)


def statement(*claims: Claim, telemetry: tuple[Telemetry, ...] = ()) -> Statement:
    return Statement("engine", claims, telemetry, (), None, None, None, None, PHASES, True, (), ())


def phase(name: str, gate_up: int, down: int, submits: int = 5, recorded: int | None = None) -> PhaseCounts:
    counts = (("aa", gate_up), ("bb", down))
    shaders = tuple(ShaderCount(s, n if recorded is None else recorded, n) for s, n in counts)
    return PhaseCounts(name, shaders, submits)


def seen(*phases: PhaseCounts, device: DeviceIdentity = GPU, peak: int = 1000) -> DeviceDispatch:
    return DeviceDispatch(device, phases, {0: peak}, {0: peak})


def sighting(*devices: DeviceDispatch) -> Sighting:
    return Sighting(REACH, DispatchEvidence("tracer", devices, phases_seen=PHASES))


def tier(
    said: Statement,
    evidence: Sighting,
    due: dict[str, Due] = TEN,
    shaders: tuple[ShaderFile, ...] = SHADERS,
    wanted: DeviceIdentity = GPU,
) -> tuple[Verdict, ...]:
    return judge_expert_tier(said, accelerator(wanted), shaders, evidence, due)


def residency(said: Statement, evidence: Sighting) -> Verdict:
    return judge_residency(said, accelerator(GPU), {(3, 0): 400, (3, 1): 600}, evidence)


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
    verdicts = tier(statement(claim("expert_tier")), sighting(seen(seen_phase)))
    assert [verdict.state for verdict in verdicts] == [state]
    assert bool(verdicts[0].reason) == (state == "broken")


def test_work_on_another_device_is_no_work_on_this_one() -> None:
    evidence = sighting(seen(phase("decode", 76, 76), device=OTHER))
    (verdict,) = tier(statement(claim("expert_tier")), evidence)
    assert verdict.state == "broken"
    assert "152 dispatches went to llvmpipe" in verdict.reason


def test_devices_are_judged_one_by_one() -> None:
    evidence = sighting(seen(phase("decode", 0, 0)), seen(phase("decode", 76, 76), device=OTHER))
    for device, state in ((GPU, "broken"), (OTHER, "held")):
        (verdict,) = tier(statement(claim("expert_tier", device=device)), evidence, wanted=device)
        assert verdict.state == state


def test_unknown_shaders_are_judged_by_their_sum() -> None:
    evidence = sighting(seen(phase("decode", 5, 5)))
    (verdict,) = tier(statement(claim("expert_tier")), evidence, shaders=())
    assert verdict.state == "held"


def test_shader_of_no_piece_does_not_count() -> None:
    shaders = (SHADERS[0], replace(SHADERS[1], sha256="cc"))
    evidence = sighting(seen(phase("decode", 76, 76)))
    (verdict,) = tier(statement(claim("expert_tier")), evidence, shaders=shaders)
    assert verdict.state == "broken"


@pytest.mark.parametrize("engine_says", [(), (claim("device"),)])
def test_nothing_announced_is_not_claimed(engine_says: tuple[Claim, ...]) -> None:
    (verdict,) = tier(statement(*engine_says), sighting())
    assert verdict.state == "not_claimed"


def test_taken_back_is_not_claimed_even_with_work_seen() -> None:
    taken_back = claim("expert_tier", retracted=Retraction("no usage history", Place("stdout", 9)))
    (verdict,) = tier(statement(taken_back), sighting(seen(phase("decode", 76, 76))))
    assert verdict.state == "not_claimed"
    assert "stdout:9" in verdict.reason


def test_no_reach_is_never_a_pass_nor_a_fault() -> None:
    blind = Sighting(NO_REACH, None)
    said = statement(
        claim("device"),
        claim("expert_tier"),
        claim("resident", experts=((3, 0),)),
        telemetry=(Telemetry("decode", {}, {"gate_up_int4.spv": 1}, 1, Place("stdout", 8)),),
    )
    verdicts = [
        judge_device(said, accelerator(GPU), blind),
        *tier(said, blind, {"prefill": Due(1, 1), "decode": Due(1, 1)}),
        residency(said, blind),
        *judge_counters(said, SHADERS, blind),
    ]
    assert {verdict.state for verdict in verdicts} == {"unwitnessed"}
    assert {verdict.reason for verdict in verdicts} == {NO_REACH.statement}


def test_nothing_due_is_not_a_pass() -> None:
    (verdict,) = tier(
        statement(claim("expert_tier")), sighting(seen(phase("decode", 0, 0))), {"decode": Due(0, 0)}
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
    said = statement(claim("resident", experts=((3, 0), (3, 1)), counts={"bytes": 1000}))
    assert residency(said, sighting(seen(peak=peak))).state == state


@pytest.mark.parametrize("said_bytes", [{}, {"bytes": 0}, {"bytes": -5}])
def test_residents_take_their_own_bytes_whatever_is_said(said_bytes: dict[str, int]) -> None:
    said = statement(claim("resident", experts=((3, 0), (3, 1)), counts=said_bytes))
    assert residency(said, sighting(seen(peak=999))).state == "broken"


def test_resident_that_the_model_has_not() -> None:
    verdict = residency(statement(claim("resident", experts=((9, 0),))), sighting(seen()))
    assert verdict.state == "broken"
    assert "no expert 0 in layer 9" in verdict.reason


def test_memory_that_is_not_local_to_the_device_is_no_residency() -> None:
    kinds = (MemoryType(0, 0, False, True, True, True), MemoryType(1, 1, True, False, False, False))
    device = replace(accelerator(GPU), memory_types=kinds)
    said = statement(claim("resident", experts=((3, 0),)))
    for peak, state in (({0: 1000}, "broken"), ({1: 1000}, "held")):
        evidence = sighting(DeviceDispatch(GPU, (), peak, peak))
        assert judge_residency(said, device, {(3, 0): 400}, evidence).state == state


@pytest.mark.parametrize(
    ("experts", "state"),
    [(((3, 0), (3, 1)), "held"), (((3, 0),), "broken"), ((), "broken"), (((3, 0), (3, 1), (4, 0)), "held")],
)
def test_planned_experts_are_named(experts: tuple[tuple[int, int], ...], state: str) -> None:
    verdict = judge_placement(statement(claim("resident", experts=experts)), ((3, 0), (3, 1)))
    assert verdict.state == state


@pytest.mark.parametrize("kind", ["device", "expert_tier", "resident"])
def test_claim_about_another_device_is_broken_though_work_was_done_there(kind: ClaimKind) -> None:
    said = statement(claim(kind, device=OTHER, experts=((3, 0),)))
    evidence = sighting(seen(phase("decode", 76, 76), device=OTHER), seen())
    verdict = {
        "device": lambda: judge_device(said, accelerator(GPU), evidence),
        "expert_tier": lambda: tier(said, evidence)[0],
        "resident": lambda: residency(said, evidence),
    }[kind]()
    assert verdict.state == "broken"
    assert "asked for Arc" in verdict.reason


def test_tier_in_ram_is_no_device_tier() -> None:
    (verdict,) = tier(statement(claim("expert_tier", tier="ram")), sighting(seen(phase("decode", 76, 76))))
    assert verdict.state == "broken"


@pytest.mark.parametrize(("grouped", "state"), [(True, "held"), (False, "broken")])
def test_experts_of_a_batch_may_be_grouped_where_the_engine_says_so(grouped: bool, state: str) -> None:
    evidence = sighting(seen(phase("decode", 5, 5)))
    (verdict,) = tier(statement(claim("expert_tier", grouped=grouped)), evidence)
    assert verdict.state == state


def test_all_pieces_are_asked_for_where_none_is_named() -> None:
    evidence = sighting(seen(phase("decode", 76, 0)))
    (verdict,) = tier(statement(claim("expert_tier", pieces=())), evidence)
    assert verdict.state == "broken"


@pytest.mark.parametrize(
    ("counts", "state"),
    [((76, 76), "unwitnessed"), ((0, 0), "unwitnessed")],
)
def test_lost_counts_decide_nothing(counts: tuple[int, int], state: str) -> None:
    evidence = DispatchEvidence(
        "tracer", (seen(phase("decode", *counts)),), ("lost",), PHASES, complete=False
    )
    (verdict,) = tier(statement(claim("expert_tier")), Sighting(REACH, evidence))
    assert verdict.state == state


def test_phases_that_the_witness_did_not_see_decide_nothing() -> None:
    said = statement(claim("device"), claim("expert_tier"), telemetry=telemetry(76, 76, 5))
    evidence = Sighting(REACH, DispatchEvidence("tracer", (seen(phase("outside", 76, 76)),)))
    assert tier(said, evidence)[0].state == "unwitnessed"
    assert judge_counters(said, SHADERS, evidence)[0].state == "unwitnessed"


def test_no_work_in_any_phase_is_broken_whatever_the_phases() -> None:
    evidence = Sighting(REACH, DispatchEvidence("tracer", (seen(phase("outside", 3, 3)),)))
    assert tier(statement(claim("expert_tier")), evidence)[0].state == "broken"


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
