"""What a planner states is read without trusting it: figures and texts, or an error that names the key."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import device, full_usage, machine, small_model

from pytest_colibri.claims.plan import LONGEST_LINE, MAX_COUNT, MAX_ITEMS, BadPlan, PlanStatement, read_plan
from pytest_colibri.planner.exchange import plan_to_json
from pytest_colibri.planner.plan import PlanRequest
from pytest_colibri.planner.reference import plan
from pytest_colibri.units import GB

MODEL = small_model()
PLANNED = plan(
    PlanRequest(
        MODEL, machine(60 * GB), "cuda", (device("card", 20 * GB, total=24 * GB),), usage=full_usage(MODEL)
    )
)


def written() -> dict[str, Any]:
    """Return the JSON form of a plan of ours, as another process would get it."""
    document: dict[str, Any] = json.loads(json.dumps(plan_to_json(PLANNED)))
    return document


def with_value(path: str, value: object) -> dict[str, Any]:
    """Return that plan with another value at a place such as ``tiers.vram.devices.0.name``."""
    document = written()
    *above, last = path.split(".")
    part: Any = document
    for key in above:
        part = part[int(key)] if isinstance(part, list) else part[key]
    part[int(last) if isinstance(part, list) else last] = value
    return document


def test_our_own_plan_states_its_figures() -> None:
    statement = read_plan(written(), PLANNED.environment)
    assert statement.limit_bytes == PLANNED.limit.bytes
    assert statement.ram_budget_bytes == PLANNED.ram_budget_bytes
    assert statement.dense_bytes == PLANNED.dense_bytes
    assert statement.runtime_bytes == PLANNED.runtime_bytes
    assert statement.cache_bytes == PLANNED.cache_bytes
    assert statement.slots_per_layer == PLANNED.slots_per_layer
    assert statement.vram_budget_bytes == PLANNED.vram_budget_bytes
    assert (statement.hot_bytes, statement.warm_bytes, statement.cold_bytes) == (
        PLANNED.hot_bytes,
        PLANNED.warm_bytes,
        PLANNED.cold_bytes,
    )
    assert statement.hot_count == len(PLANNED.hot_experts)
    assert statement.expert_bytes == MODEL.expert_bytes
    assert statement.bytes_per_slot == MODEL.bytes_per_slot
    assert (statement.hit_rate, statement.bottleneck) == (PLANNED.hit_rate, PLANNED.bottleneck)
    assert statement.warnings == PLANNED.warnings
    assert statement.environment == PLANNED.environment
    (card,) = statement.devices
    assert (card.name, card.number, card.total_bytes, card.free_bytes) == ("card", 0, 24 * GB, 20 * GB)
    assert (card.usable_bytes, card.reserve_bytes) == (18 * GB, 2 * GB)


def least() -> dict[str, Any]:
    """Return what every plan states, and nothing else."""
    ram, vram = {"available_bytes": None, "budget_bytes": 5}, {"devices": [], "budget_bytes": 0}
    return {"version": 2, "tiers": {"ram": ram, "vram": vram}}


def test_what_is_not_stated_is_unknown_and_never_zero() -> None:
    statement = read_plan(least(), {})
    there: dict[str, object] = {"ram_budget_bytes": 5, "vram_budget_bytes": 0, "devices": ()}
    there |= {"warnings": (), "steps": {}, "environment": {}}
    for field in fields(PlanStatement):
        assert getattr(statement, field.name) == there.get(field.name), field.name


@pytest.mark.parametrize(
    ("tier", "key"),
    [("ram", "available_bytes"), ("ram", "budget_bytes"), ("vram", "budget_bytes"), ("vram", "devices")],
)
def test_a_plan_that_promises_nothing_is_none(tier: str, key: str) -> None:
    document = least()
    del document["tiers"][tier][key]
    with pytest.raises(BadPlan, match=rf"plan\.tiers\.{tier}\.{key} is missing"):
        read_plan(document, {})
    with pytest.raises(BadPlan, match="is missing"):
        read_plan({"version": 2}, {})


@pytest.mark.parametrize(
    ("value", "count"), [(7, 7), (7.0, 7), (None, None), (-7, -7), (MAX_COUNT - 1, MAX_COUNT - 1)]
)
def test_a_count_may_be_written_as_a_float(value: object, count: int | None) -> None:
    assert read_plan(with_value("tiers.ram.warm_expert_bytes", value), {}).warm_bytes == count


WRONG = [
    ("tiers", [], "plan.tiers: [] is no object"),
    ("tiers.ram", 5, "plan.tiers.ram: 5 is no object"),
    ("tiers.ram.budget_bytes", "5 GB", "plan.tiers.ram.budget_bytes: '5 GB' is not allowed; a whole number"),
    ("tiers.ram.budget_bytes", True, "plan.tiers.ram.budget_bytes: True is not allowed"),
    ("tiers.ram.budget_bytes", 0.5, "plan.tiers.ram.budget_bytes: 0.5 is not allowed"),
    ("tiers.ram.budget_bytes", float("nan"), "plan.tiers.ram.budget_bytes: nan is not allowed"),
    ("tiers.ram.budget_bytes", float("inf"), "plan.tiers.ram.budget_bytes: inf is not allowed"),
    ("tiers.ram.budget_bytes", -1, "plan.tiers.ram.budget_bytes: -1 is not allowed; a whole number of"),
    ("tiers.ram.budget_bytes", None, "plan.tiers.ram.budget_bytes is missing; every plan states it"),
    ("tiers.vram.devices.0.usable_bytes", -1, "plan.tiers.vram.devices[0].usable_bytes: -1 is not allowed"),
    ("tiers.ram.budget_bytes", MAX_COUNT, f"plan.tiers.ram.budget_bytes: {MAX_COUNT} is not allowed"),
    ("tiers.ram.cache_slots_per_layer", [3], "plan.tiers.ram.cache_slots_per_layer: [3] is not allowed"),
    ("tiers.vram.devices", {}, f"plan.tiers.vram.devices: {{}} is no list of at most {MAX_ITEMS}"),
    ("tiers.vram.devices", [None] * (MAX_ITEMS + 1), "plan.tiers.vram.devices: [None, None"),
    ("tiers.vram.devices.0", "card", "plan.tiers.vram.devices[0]: 'card' is no object"),
    ("tiers.vram.devices.0.name", 3, "plan.tiers.vram.devices[0].name: 3 is not allowed; a text"),
    ("tiers.vram.devices.0.free_bytes", "?", "plan.tiers.vram.devices[0].free_bytes: '?' is not allowed"),
    ("projected_hit_rate", "high", "plan.projected_hit_rate: 'high' is not allowed; a number"),
    ("projected_hit_rate", False, "plan.projected_hit_rate: False is not allowed"),
    ("projected_hit_rate", float("nan"), "plan.projected_hit_rate: nan is not allowed"),
    ("projected_hit_rate", float("inf"), "plan.projected_hit_rate: inf is not allowed"),
    ("projected_hit_rate", 10**400, "plan.projected_hit_rate: 1000"),
    ("policy.quality_preserving", 1, "plan.policy.quality_preserving: 1 is not allowed; true, false"),
    ("warnings", "careful", "plan.warnings: 'careful' is no list"),
    ("warnings", ["careful", 1], "plan.warnings: ['careful', 1] is no list of texts"),
    ("steps", [3], "plan.steps[0]: 3 is no object"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value", "said"), WRONG, ids=[f"{path} {str(value)[:12]}" for path, value, _ in WRONG]
)
def test_a_value_of_another_kind_is_named_with_its_place(path: str, value: object, said: str) -> None:
    with pytest.raises(BadPlan) as refused:
        read_plan(with_value(path, value), {})
    assert str(refused.value).startswith(said)
    assert len(str(refused.value)) < 200


def test_texts_of_a_planner_cannot_write_to_the_terminal() -> None:
    evil = "\x1b[2J\ud800\n"
    document = with_value("tiers.vram.devices.0.name", evil)
    document |= {"warnings": [evil, "x" * 10_000], "bottleneck_class": evil}
    statement = read_plan(document, {})
    shown = "?[2J??"
    assert (statement.devices[0].name, statement.bottleneck) == (shown, shown)
    assert statement.warnings == (shown, "x" * LONGEST_LINE)
    with pytest.raises(BadPlan) as refused:
        read_plan(with_value("policy.name", {evil: 1}), {})
    assert str(refused.value).isprintable()


def places(part: object, above: str = "") -> list[str]:
    """Return the place of every value inside a document."""
    items = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    found = []
    for key, value in items:
        found += [f"{above}{key}", *places(value, f"{above}{key}.")]
    return found


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)
@given(st.sampled_from(places(written())), JSON)
def test_any_value_in_place_of_another_is_read_or_refused(path: str, value: object) -> None:
    with suppress(BadPlan):
        statement = read_plan(with_value(path, value), {})
        assert statement.hit_rate is None or abs(statement.hit_rate) < MAX_COUNT
