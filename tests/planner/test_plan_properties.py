"""What holds over random machines, models and requests."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from machines import FAMILY_CONFIGS, device, machine, small_model

from pytest_colibri.container.geometry import Geometry, SparseLayer
from pytest_colibri.host.model import Accelerator, Heap, MemoryType
from pytest_colibri.judge.memory import broken_rules_of
from pytest_colibri.planner.exchange import load_plan_schema, plan_to_json
from pytest_colibri.planner.plan import DoesNotFit, PlanRequest
from pytest_colibri.planner.reference import plan
from pytest_colibri.units import GB, Figure

ENOUGH = 16 * GB  # holds every model of this file, of which the reserve was taken

FORM = Draft202012Validator(load_plan_schema())

relaxed = settings(deadline=None)


@st.composite
def accelerators(draw: st.DrawFn) -> tuple[Accelerator, ...]:
    pools = draw(st.lists(st.sampled_from(["unified", "discrete", None]), max_size=3))
    figures = st.none() | st.integers(0, 60 * GB)
    sizes = st.integers(1, 60 * GB)
    return tuple(
        replace(
            device(f"device {index}", draw(figures), total=draw(figures), pool=pool, index=index),
            heaps=(Heap(0, draw(sizes), True), Heap(1, draw(sizes), True)),
            memory_types=(MemoryType(0, 1, True, True, True, False),),
        )
        for index, pool in enumerate(pools)
    )


@st.composite
def containers(draw: st.DrawFn) -> Geometry:
    """Models of every family, whose layers and experts differ in width."""
    experts = draw(st.integers(1, 12))
    widths = st.lists(st.integers(1, 50_000_000), min_size=experts, max_size=experts)
    layers = draw(st.lists(widths, max_size=4))
    return replace(
        small_model(family=draw(st.sampled_from(sorted(FAMILY_CONFIGS)))),
        dense_bytes=draw(st.integers(0, 2 * GB)),
        layers=tuple(SparseLayer(index, dict(enumerate(sizes))) for index, sizes in enumerate(layers, 3)),
    )


@st.composite
def requests(draw: st.DrawFn, least: int = ENOUGH) -> PlanRequest:
    ram = st.integers(least, 60 * GB)
    pairs = st.tuples(st.integers(2, 8), st.integers(0, 12))
    return PlanRequest(
        geometry=draw(containers()),
        host=machine(draw(ram), cgroup=draw(st.none() | ram), sockets=draw(st.integers(1, 2))),
        backend=draw(st.sampled_from(["vulkan", "cuda", "rocm", "metal"])),
        accelerators=draw(accelerators()),
        ram_bytes=draw(st.none() | ram),
        vram_bytes=draw(st.none() | st.integers(0, 2 * GB)),
        slots_per_layer=draw(st.none() | st.integers(1, 15)),
        context=draw(st.integers(1, 100_000)),
        kv_slots=draw(st.integers(1, 2)),
        kv_type=draw(st.sampled_from(["f32", "f16", "bf16", "q8_0", "q4_0"])),
        prompt_width=draw(st.integers(1, 100_000)),
        usage=draw(st.dictionaries(pairs, st.integers(0, 5), max_size=30)),
    )


@relaxed
@given(requests())
def test_every_plan_is_sound_and_of_the_form(request):
    planned = plan(request)
    assert broken_rules_of(planned) == {}
    written = json.loads(json.dumps(plan_to_json(planned), allow_nan=False))
    assert [error.message for error in FORM.iter_errors(written)] == []


@relaxed
@given(requests(least=1))
def test_a_plan_on_a_small_machine_is_sound_or_refused(request):
    with suppress(DoesNotFit):
        assert broken_rules_of(plan(request)) == {}


ENVIRONMENTS = st.fixed_dictionaries(
    {},
    optional={
        "CUDA_DENSE": st.sampled_from(["0", "1"]),
        "COLI_CUDA_ATTN": st.just("1"),
        "COLI_VK_DENSE": st.just("1"),
        "COLI_VK_ATTN": st.just("1"),
        "CUDA_VISIBLE_DEVICES": st.sampled_from(["", "-1", "0", "2,0", "1,0,2", "1,5,0", "GPU-ab"]),
        "HIP_VISIBLE_DEVICES": st.sampled_from(["1", "0,1,2"]),
        "COLI_GPU": st.sampled_from(["0", "1", "7"]),
    },
)


@relaxed
@given(requests(), ENVIRONMENTS)
def test_what_the_user_sets_leaves_a_sound_plan_or_none(request, environment):
    with suppress(DoesNotFit):
        assert broken_rules_of(plan(replace(request, environment=environment))) == {}


@relaxed
@given(requests(), ENVIRONMENTS, st.integers(0, 30 * GB))
def test_more_memory_never_gives_fewer_slots_beside_what_the_user_sets(request, environment, more):
    request = replace(request, environment=environment)
    assert slots_or_none(with_memory(request, more)) >= slots_or_none(request)


def slots_or_none(request: PlanRequest) -> int:
    """Count the slots per layer, -1 where the model does not fit."""
    try:
        return plan(request).slots_per_layer
    except DoesNotFit:
        return -1


def with_memory(request: PlanRequest, more: int) -> PlanRequest:
    memory = request.host.memory
    richer = replace(
        memory,
        available=Figure(memory.available.bytes + more, "more"),
        cgroup_available=Figure(None, "no cgroup limit"),
    )
    return replace(request, host=replace(request.host, memory=richer))


@relaxed
@given(requests(least=1), st.integers(0, 30 * GB))
def test_more_memory_never_gives_fewer_slots(request, more):
    assert slots_or_none(with_memory(request, more)) >= slots_or_none(request)


@relaxed
@given(requests(least=1))
def test_an_explicit_budget_is_met_exactly_or_clamped_aloud_or_refused(request):
    with suppress(DoesNotFit):
        planned = plan(request)
        pairs = [
            (request.ram_bytes, planned.ram_budget_bytes),
            (request.vram_bytes, planned.vram_budget_bytes),
        ]
        for asked, granted in pairs:
            told = any(f"({asked} B) to " in line and f"({granted} B)" in line for line in planned.warnings)
            assert asked is None or granted == asked or (granted < asked and told)


@relaxed
@given(requests())
def test_budgets_never_exceed_the_pool(request):
    planned = plan(request)
    limit = request.host.memory.limit.bytes
    shared = sum(share.budget_bytes for share in planned.devices if share.accelerator.pool != "discrete")
    taken = planned.ram_budget_bytes + shared
    assert taken <= (limit if request.ram_bytes is not None and not shared else limit * 88 // 100)
    for share in planned.devices:
        free = share.accelerator.free.bytes
        assert free is None or share.budget_bytes <= max(0, free - share.reserve_bytes)


@relaxed
@given(requests())
def test_tiers_sum_to_the_experts(request):
    planned = plan(request)
    assert planned.hot_bytes + planned.warm_bytes + planned.cold_bytes == request.geometry.expert_bytes
    assert min(planned.hot_bytes, planned.warm_bytes, planned.cold_bytes) >= 0


@relaxed
@given(requests())
def test_a_narrower_cache_never_needs_more(request):
    widest_first = ("f32", "f16", "bf16", "q8_0", "q4_0")
    needed = [plan(replace(request, kv_type=kv_type)).runtime_bytes for kv_type in widest_first]
    assert needed == sorted(needed, reverse=True)


@relaxed
@given(requests())
def test_a_refusal_says_exactly_what_is_missing(request):
    request = replace(request, accelerators=(), ram_bytes=1, host=machine(200 * GB))
    with pytest.raises(DoesNotFit) as refused:
        plan(request)
    enough = 1 + refused.value.missing_bytes
    assert plan(replace(request, ram_bytes=enough)).ram_budget_bytes == enough
    with pytest.raises(DoesNotFit):
        plan(replace(request, ram_bytes=enough - 1))


@relaxed
@given(requests())
def test_granted_budgets_are_granted_again(request):
    planned = plan(request)
    granted = replace(request, ram_bytes=planned.ram_budget_bytes, vram_bytes=planned.vram_budget_bytes)
    again = plan(granted)
    assert again.ram_budget_bytes == planned.ram_budget_bytes
    assert again.vram_budget_bytes == planned.vram_budget_bytes
    assert not any("budget clamped" in line for line in again.warnings)
