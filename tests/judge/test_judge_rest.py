"""Tokens, endings, memory and exit statuses: each verdict from the figures that lead to it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from pytest_colibri.claims.engine import Statement
from pytest_colibri.claims.model import Place
from pytest_colibri.container.scan import read_geometry
from pytest_colibri.container.tiny import write_tiny_model
from pytest_colibri.errors import UsageError
from pytest_colibri.host.model import Host, Memory, Processor
from pytest_colibri.judge.ending import judge_ending, judge_model_folder, judge_protocol
from pytest_colibri.judge.memory import judge_floor, judge_peak, judge_plan, planned_peak_bytes
from pytest_colibri.judge.model import State, Verdict
from pytest_colibri.judge.status import Status, conclude
from pytest_colibri.judge.tokens import judge_generated, judge_scored, read_token_reference
from pytest_colibri.planner.plan import Plan, PlanRequest
from pytest_colibri.planner.reference import plan
from pytest_colibri.profiles.model import Backend
from pytest_colibri.units import Figure
from pytest_colibri.witness.evidence import MemoryEvidence, MemorySample, Output

QUIET = Statement("engine", (), (), (1, 2, 3), 12, None, None, None, (), True, (), ())


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
        judge_generated(replace(QUIET, tokens=tokens), 12, (1, 2, 3), "reference"),
        judge_scored(replace(QUIET, scores=tokens), (1, 2, 3), "reference"),
    ):
        assert verdict.state == state
        assert reason in verdict.reason


def test_tokens_begin_after_the_prompt() -> None:
    verdict = judge_generated(QUIET, 11, (1, 2, 3), "reference")
    assert verdict.state == "broken"
    assert "position 12" in verdict.reason


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
        ("timeout", -9, None, False, "unwitnessed"),
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


def test_output_that_was_not_kept_whole_decides_nothing() -> None:
    output = Output(0, "itself", (), (), 1000, truncated=True)
    assert judge_ending(QUIET, output).state == "unwitnessed"


def test_processes_that_cannot_be_ended_are_broken() -> None:
    output = Output(0, "itself", (), (), 1000, survivors=("sleep (process 123)",))
    verdict = judge_ending(QUIET, output)
    assert verdict.state == "broken"
    assert "sleep (process 123)" in verdict.reason


def test_wrong_events_are_broken() -> None:
    assert judge_protocol(QUIET).state == "held"
    verdict = judge_protocol(replace(QUIET, malformed=(Place("stdout", 7),)))
    assert verdict.state == "broken"
    assert "stdout:7" in verdict.reason


def test_model_folder() -> None:
    assert judge_model_folder(()).state == "held"
    assert judge_model_folder((".coli_usage",)).state == "broken"


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
def test_floor(cpu_plan: Plan, available: tuple[int | None, ...], stopped: bool, state: str) -> None:
    samples = (MemorySample(at, figure, 1) for at, figure in enumerate(available))
    assert judge_floor(cpu_plan, memory(*samples, stopped=stopped)).state == state


def test_no_sample_is_no_missing_source(cpu_plan: Plan) -> None:
    assert "before the memory was sampled" in judge_floor(cpu_plan, memory()).reason


def test_fall_that_no_process_shows_is_nobodys(cpu_plan: Plan) -> None:
    planned = planned_peak_bytes(cpu_plan)
    high, low = MemorySample(0, 4 * planned, 1), MemorySample(1, 2 * planned, planned // 2)
    assert judge_floor(cpu_plan, memory(high, low)).state == "unwitnessed"
    assert judge_floor(cpu_plan, memory(high, replace(low, tree_bytes=3 * planned))).state == "held"


def test_plan_beyond_the_machine_is_broken(cpu_plan: Plan) -> None:
    assert judge_plan(cpu_plan).state == "held"
    greedy = judge_plan(replace(cpu_plan, ram_budget_bytes=13 * 10**9))
    assert greedy.state == "broken"
    assert "13" in greedy.reason


def verdicts(*pairs: tuple[str, State]) -> list[Verdict]:
    return [Verdict(state, claim, "", "", "", "") for claim, state in pairs]


TIER, RUN, ANY = "expert tier", "run completes", "generated tokens"


@pytest.mark.parametrize(
    ("pairs", "backend", "plans_only", "status"),
    [
        ([(ANY, "held"), (TIER, "held")], "vulkan", False, Status.HELD),
        ([(ANY, "held")], "cpu", False, Status.HELD),
        ([(ANY, "held")], "vulkan", False, Status.NOTHING_SHOWN),
        ([(ANY, "held"), (TIER, "not_claimed")], "vulkan", False, Status.NOTHING_SHOWN),
        ([(TIER, "held"), (TIER, "not_claimed")], "vulkan", False, Status.NOTHING_SHOWN),
        ([(TIER, "held"), (RUN, "not_claimed")], "vulkan", False, Status.NOTHING_SHOWN),
        ([(TIER, "held"), ("device", "not_claimed")], "vulkan", False, Status.NOTHING_SHOWN),
        ([(TIER, "held"), ("own counters", "not_claimed")], "vulkan", False, Status.HELD),
        ([(TIER, "held"), (ANY, "unwitnessed")], "vulkan", False, Status.NOTHING_SHOWN),
        ([(TIER, "held"), (ANY, "unwitnessed"), (ANY, "broken")], "vulkan", False, Status.BROKEN),
        ([(ANY, "not_claimed")], "cpu", False, Status.NOTHING_SHOWN),
        ([], "cpu", False, Status.NOTHING_SHOWN),
        ([(ANY, "held")], "cuda", True, Status.HELD),
        ([(ANY, "held"), ("one pool is counted once", "not_claimed")], "cuda", True, Status.NOTHING_SHOWN),
        ([(ANY, "held"), ("available memory is there", "not_claimed")], "cpu", False, Status.NOTHING_SHOWN),
        ([(ANY, "held"), ("runtime holds the KV cache", "not_claimed")], "cpu", True, Status.HELD),
        ([], "cuda", True, Status.NOTHING_SHOWN),
        ([(ANY, "broken")], "cuda", True, Status.BROKEN),
    ],
)
def test_exit_status(
    pairs: list[tuple[str, State]], backend: Backend, plans_only: bool, status: Status
) -> None:
    for emulated in (True, False):
        ended = conclude(verdicts(*pairs), backend, plans_only=plans_only, emulated=emulated)
        assert ended[0] is status
        assert ("emulated" in ended[1]) == (
            emulated and plans_only and status in (Status.HELD, Status.BROKEN)
        )
