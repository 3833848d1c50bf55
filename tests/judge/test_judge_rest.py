"""Tokens, endings, memory and exit statuses: each verdict from the figures that lead to it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from pytest_colibri.claims.engine import Statement
from pytest_colibri.container.scan import read_geometry
from pytest_colibri.container.tiny import write_tiny_model
from pytest_colibri.errors import UsageError
from pytest_colibri.host.model import Host, Memory, Processor
from pytest_colibri.judge.ending import judge_ending
from pytest_colibri.judge.memory import judge_floor, judge_peak, judge_plan, planned_peak_bytes
from pytest_colibri.judge.model import State
from pytest_colibri.judge.status import Status, conclude
from pytest_colibri.judge.tokens import judge_generated, judge_scored, read_token_reference
from pytest_colibri.planner.plan import Plan, PlanRequest
from pytest_colibri.planner.reference import plan
from pytest_colibri.profiles.model import Backend
from pytest_colibri.units import Figure
from pytest_colibri.witness.evidence import MemoryEvidence, MemorySample, Output

QUIET = Statement("engine", (), (), (1, 2, 3), None, None, None, True, ())


@pytest.fixture(scope="module")
def cpu_plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    model = write_tiny_model(tmp_path_factory.mktemp("model"), "int4-row")
    unlimited = Figure(None, "no limit")
    memory = Memory(Figure(16 * 10**9, "test"), Figure(12 * 10**9, "test"), unlimited)
    host = Host("emulated", "linux", "x86_64", memory, Processor(4, 1, "test"), ())
    return plan(PlanRequest(read_geometry(model), host, "cpu"))


@pytest.mark.parametrize(
    ("tokens", "state", "reason"),
    [
        ((1, 2, 3), "held", ""),
        ((1, 9, 3), "broken", "position 1: 9 instead of 2"),
        ((1, 2), "broken", "2 tokens instead of 3"),
        ((1, 2, 3, 4), "broken", "4 tokens instead of 3"),
        ((), "broken", "0 tokens instead of 3"),
    ],
)
def test_tokens_are_compared_one_by_one(tokens: tuple[int, ...], state: str, reason: str) -> None:
    for verdict in (
        judge_generated(replace(QUIET, tokens=tokens), (1, 2, 3), "reference"),
        judge_scored(replace(QUIET, scores=tokens), (1, 2, 3), "reference"),
    ):
        assert verdict.state == state
        assert reason in verdict.reason


def test_no_scores_at_all_are_broken() -> None:
    assert judge_scored(QUIET, (1, 2, 3), "reference").state == "broken"


@pytest.mark.parametrize(
    "content",
    [
        "nonsense",
        "[]",
        '{"prompt_ids": [1]}',
        '{"prompt_ids": [1], "full_ids": [2, 3], "tf_pred": [1, 1]}',
        '{"prompt_ids": [1], "full_ids": [1, 3], "tf_pred": [1]}',
        '{"prompt_ids": [], "full_ids": [1, 3], "tf_pred": [1, 1]}',
        '{"prompt_ids": "ab", "full_ids": [1, 3], "tf_pred": [1, 1]}',
    ],
)
def test_bad_token_reference(content: str, tmp_path: Path) -> None:
    path = tmp_path / "reference.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"reference\.json"):
        read_token_reference(path)


def test_token_reference(tmp_path: Path) -> None:
    path = tmp_path / "reference.json"
    path.write_text(json.dumps({"prompt_ids": [1, 2], "full_ids": [1, 2, 3], "tf_pred": [2, 3, 4]}))
    reference = read_token_reference(path)
    assert reference.generated == (3,)
    assert reference.source == "reference.json"


@pytest.mark.parametrize(
    ("ended", "status", "refused", "complete", "state"),
    [
        ("itself", 0, None, True, "held"),
        ("itself", 0, None, False, "broken"),
        ("itself", 1, None, True, "broken"),
        ("itself", -11, None, False, "broken"),
        ("itself", 2, "no such device", False, "not_claimed"),
        ("itself", 0, "no such device", False, "not_claimed"),
        ("timeout", -9, None, False, "broken"),
        ("floor", -9, None, False, "unwitnessed"),
    ],
)
def test_ending(
    ended: Literal["itself", "timeout", "floor"],
    status: int,
    refused: str | None,
    complete: bool,
    state: str,
) -> None:
    output = Output(status, ended, (), ("boom",), 1000)
    verdict = judge_ending(replace(QUIET, refused=refused, complete=complete), output)
    assert verdict.state == state


def memory(*samples: MemorySample, floor: int = 100, stopped: bool = False) -> MemoryEvidence:
    return MemoryEvidence("sampler", samples, floor, stopped)


def test_peak_against_the_plan(cpu_plan: Plan) -> None:
    planned = planned_peak_bytes(cpu_plan)
    assert planned >= cpu_plan.dense_bytes + cpu_plan.runtime_bytes
    assert judge_peak(cpu_plan, memory(MemorySample(0, 1, planned))).state == "held"
    assert judge_peak(cpu_plan, memory(MemorySample(0, 1, planned + 1))).state == "broken"
    assert judge_peak(cpu_plan, memory()).state == "unwitnessed"


def test_only_a_proportional_figure_of_the_same_time_excuses_a_high_resident_set(cpu_plan: Plan) -> None:
    planned = planned_peak_bytes(cpu_plan)
    early = MemorySample(0, 1, 10, proportional_bytes=5)
    assert judge_peak(cpu_plan, memory(early, MemorySample(1, 1, planned + 9))).state == "broken"
    shared = MemorySample(1, 1, planned + 9, proportional_bytes=planned)
    assert judge_peak(cpu_plan, memory(early, shared)).state == "held"


@pytest.mark.parametrize(
    ("available", "stopped", "state"),
    [
        ((300, 100), False, "held"),
        ((300, 99), False, "broken"),
        ((300, 120), True, "broken"),
        ((None,), False, "unwitnessed"),
    ],
)
def test_floor(available: tuple[int | None, ...], stopped: bool, state: str) -> None:
    samples = (MemorySample(at, figure, 1) for at, figure in enumerate(available))
    assert judge_floor(memory(*samples, stopped=stopped)).state == state


def test_plan_beyond_the_machine_is_broken(cpu_plan: Plan) -> None:
    assert judge_plan(cpu_plan).state == "held"
    greedy = judge_plan(replace(cpu_plan, ram_budget_bytes=13 * 10**9))
    assert greedy.state == "broken"
    assert "13" in greedy.reason


@pytest.mark.parametrize(
    ("states", "tier", "backend", "plans_only", "status"),
    [
        (["held", "held"], ["held"], "vulkan", False, Status.HELD),
        (["held"], [], "cpu", False, Status.HELD),
        (["held"], [], "vulkan", False, Status.NOTHING_SHOWN),
        (["held", "not_claimed"], ["not_claimed"], "vulkan", False, Status.NOTHING_SHOWN),
        (["held", "not_claimed"], ["held", "not_claimed"], "vulkan", False, Status.HELD),
        (["held", "unwitnessed"], ["held"], "vulkan", False, Status.NOTHING_SHOWN),
        (["held", "unwitnessed", "broken"], ["held"], "vulkan", False, Status.BROKEN),
        (["not_claimed"], [], "cpu", False, Status.NOTHING_SHOWN),
        ([], [], "cpu", False, Status.NOTHING_SHOWN),
        (["held"], [], "cuda", True, Status.HELD),
        ([], [], "cuda", True, Status.NOTHING_SHOWN),
        (["broken"], [], "cuda", True, Status.BROKEN),
    ],
)
def test_exit_status(
    states: list[State], tier: list[State], backend: Backend, plans_only: bool, status: Status
) -> None:
    assert conclude(states, backend, tier, plans_only=plans_only)[0] is status
