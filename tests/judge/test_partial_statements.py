"""Plans that state less than others: what they leave out is neither held nor broken."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machines import GB10, device, full_usage, glm_mixed, machine

from pytest_colibri.claims.plan import DeviceStatement, PlanStatement
from pytest_colibri.judge.memory import statement_of
from pytest_colibri.judge.plan_rules import RULES, broken_rules
from pytest_colibri.judge.plan_rules.rule import Unstated
from pytest_colibri.planner.plan import PlanRequest
from pytest_colibri.planner.reference import plan
from pytest_colibri.units import GB

GLM = glm_mixed()
USAGE = full_usage(GLM)
CARDS = tuple(device("card", 50 * GB, index=index) for index in range(4))
UNREPORTED = device("unreported", None, pool=None)
FOUR = PlanRequest(GLM, machine(100 * GB), "cuda", CARDS, usage=USAGE)
ONE_WORKS = replace(FOUR, vram_bytes=9 * GB)
SHARED = PlanRequest(GLM, machine(114 * GB), "cuda", (GB10,), usage=USAGE)
BLIND = PlanRequest(GLM, machine(100 * GB), "cuda", (UNREPORTED,), usage=USAGE)


def stated_for(request: PlanRequest, **of_devices: object) -> PlanStatement:
    """Return what the embedded planner states, with other figures of each device."""
    statement = statement_of(plan(request))
    devices = tuple(replace(device, **of_devices) for device in statement.devices)  # type: ignore[arg-type]
    return replace(statement, devices=devices)


def outcome(rule: str, statement: PlanStatement, request: PlanRequest) -> str:
    try:
        return "broken" if RULES[rule].broken_by(statement, request) else "held"
    except Unstated:
        return "unstated"


@pytest.mark.parametrize(
    "left_out",
    [
        {"number": None},
        {"usable_bytes": None},
        {"budget_bytes": None, "resident_bytes": None},
        {"usable_bytes": None, "budget_bytes": None},
        {"reserve_bytes": None},
        {"total_bytes": None, "free_bytes": None},
        {"unified": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("request_", [FOUR, ONE_WORKS, SHARED], ids=["four cards", "one of four", "one pool"])
def test_an_honest_plan_that_states_less_of_devices_breaks_no_rule(left_out, request_):
    assert broken_rules(stated_for(request_, **left_out), request_) == {}


def unknown_device(**figures: object) -> PlanStatement:
    """Return a plan with a tier of 900 GB, and one device of which it states these figures."""
    nothing = dict.fromkeys(DeviceStatement.__dataclass_fields__)
    one = DeviceStatement(**{**nothing, "name": "a GPU", **figures})  # type: ignore[arg-type]
    return replace(statement_of(plan(BLIND)), devices=(one,), vram_budget_bytes=900 * GB)


@pytest.mark.parametrize(
    "statement",
    [
        unknown_device(number=7, usable_bytes=900 * GB),
        unknown_device(usable_bytes=900 * GB),
        unknown_device(number=0),
        replace(unknown_device(), devices=()),
    ],
    ids=["a number of no device", "a name of no device", "nothing usable is stated", "no device"],
)
def test_a_tier_on_a_device_that_is_not_told_is_no_tier_on_known_memory(statement):
    assert outcome("unknown_drives_no_tier", statement, BLIND) == "unstated"


@pytest.mark.parametrize("devices", ["with no part of it", "none"])
def test_a_vram_budget_that_no_device_takes_is_counted_in_the_shared_memory(devices):
    statement = replace(stated_for(SHARED, budget_bytes=0, resident_bytes=0), vram_budget_bytes=112 * GB)
    if devices == "none":
        statement = replace(statement, devices=())
    assert outcome("pool_is_counted_once", statement, SHARED) == "broken"


def test_what_is_broken_stays_broken_beside_a_figure_that_is_not_stated():
    request = PlanRequest(GLM, machine(100 * GB), "vulkan", (CARDS[0],), usage=USAGE)
    statement = statement_of(plan(request))
    false = {**statement.environment, "RAM_GB": "999"}
    assert "COLI_VK_EXPERTS" in false
    statement = replace(statement, environment=false, hot_count=None)
    assert outcome("environment_keeps_budgets", statement, request) == "broken"


@pytest.mark.parametrize("value", ["1.²", "٣", "1e3", "-1", "", "24 GB"])
def test_an_exported_budget_that_is_no_number_is_no_figure_of_a_budget(value):
    request = PlanRequest(GLM, machine(100 * GB), "cpu")
    statement = statement_of(plan(request))
    statement = replace(statement, environment={**statement.environment, "RAM_GB": value})
    assert outcome("environment_keeps_budgets", statement, request) == "broken"


@pytest.mark.parametrize(
    ("rule", "request_"),
    [("cold_misses_are_told", FOUR), ("pins_only_what_fits", PlanRequest(GLM, machine(900 * GB), "cpu"))],
)
def test_experts_on_the_disk_that_are_not_stated_leave_open_what_follows_from_them(rule, request_):
    statement = statement_of(plan(request_))
    assert outcome(rule, statement, request_) == "held"
    pinned = {**statement.environment, "PIN_GB": "all"}
    assert outcome(rule, replace(statement, cold_bytes=None, environment=pinned), request_) == "unstated"
