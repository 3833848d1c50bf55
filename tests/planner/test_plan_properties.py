"""What holds over random machines, models and requests."""

from __future__ import annotations

import json
import math
import re
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from machines import FAMILY_CONFIGS, device, machine, small_model

from pytest_colibri.container.families import BY_MODEL_TYPE
from pytest_colibri.container.geometry import Geometry, SparseLayer
from pytest_colibri.container.hollow import EXPERT_TENSORS
from pytest_colibri.container.scan import read_geometry
from pytest_colibri.errors import HostMismatch
from pytest_colibri.host.model import Accelerator, Heap, Host, MemoryType
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
def hosts(draw: st.DrawFn, least: int) -> Host:
    """Machines of known memory, in a control group or not."""
    available = draw(st.integers(least, 60 * GB))
    return machine(
        available,
        cgroup=draw(st.none() | st.integers(least, 60 * GB)),
        total=draw(st.none() | st.integers(available, 80 * GB)),
        sockets=draw(st.integers(1, 2)),
    )


@st.composite
def requests(draw: st.DrawFn, least: int = ENOUGH) -> PlanRequest:
    ram = st.integers(least, 60 * GB)
    pairs = st.tuples(st.integers(2, 8), st.integers(0, 12))
    return PlanRequest(
        geometry=draw(containers()),
        host=draw(hosts(least)),
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


@st.composite
def situations(draw: st.DrawFn) -> PlanRequest:
    """Requests on machines of any size, with what the user sets: masks, choices, residents on devices."""
    return replace(draw(requests(least=1)), environment=draw(ENVIRONMENTS))


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
@given(situations(), st.integers(0, 30 * GB))
def test_more_memory_never_gives_fewer_slots(request, more):
    assert slots_or_none(with_memory(request, more)) >= slots_or_none(request)


def with_device_memory(request: PlanRequest, more: int) -> PlanRequest:
    """Return the request with larger cards; a device that shares the RAM has no more than its pool."""
    return replace(request, accelerators=tuple(larger(device, more) for device in request.accelerators))


def larger(device: Accelerator, more: int) -> Accelerator:
    if device.pool != "discrete":
        return device
    total, free = (
        figure if figure.bytes is None else Figure(figure.bytes + more, "more")
        for figure in (device.total, device.free)
    )
    heaps = tuple(replace(heap, size_bytes=heap.size_bytes + more) for heap in device.heaps)
    return replace(device, total=total, free=free, heaps=heaps)


@relaxed
@given(situations(), st.integers(0, 30 * GB))
def test_more_device_memory_never_gives_fewer_slots_or_a_smaller_tier(request, more):
    richer = with_device_memory(request, more)
    assert slots_or_none(richer) >= slots_or_none(request)
    with suppress(DoesNotFit):
        assert plan(richer).vram_budget_bytes >= plan(request).vram_budget_bytes


@relaxed
@given(situations(), st.integers(0, 100_000), st.integers(0, 3))
def test_more_tokens_to_remember_never_give_more_slots(request, tokens, slots):
    for longer in (
        replace(request, context=request.context + tokens),
        replace(request, kv_slots=request.kv_slots + slots),
    ):
        assert slots_or_none(longer) <= slots_or_none(request)


@relaxed
@given(situations())
def test_an_explicit_figure_is_met_exactly_or_clamped_aloud_or_refused(request):
    with suppress(DoesNotFit):
        planned = plan(request)
        figures = [
            ("RAM budget", request.ram_bytes, planned.ram_budget_bytes),
            ("VRAM budget", request.vram_bytes, planned.vram_budget_bytes + planned.resident_bytes),
            ("slots per layer", request.slots_per_layer, planned.slots_per_layer),
        ]
        for what, asked, granted in figures:
            told = any(
                line.startswith(f"{what} clamped") and names(line, asked) and names(line, granted)
                for line in planned.warnings
            )
            assert asked is None or granted == asked or (granted < asked and told)


def names(line: str, figure: int | None) -> bool:
    return re.search(rf"\b{figure}\b", line) is not None


@relaxed
@given(situations())
def test_budgets_never_exceed_the_pool(request):
    with suppress(DoesNotFit):
        planned = plan(request)
        limit = request.host.memory.limit.bytes
        shared = sum(share.taken_bytes for share in planned.devices if share.accelerator.pool != "discrete")
        taken = planned.ram_budget_bytes + shared
        assert taken <= (limit if request.ram_bytes is not None and not shared else limit * 88 // 100)
        for share in planned.devices:
            free = share.accelerator.free.bytes
            assert free is None or share.taken_bytes <= max(0, free - share.reserve_bytes)


@relaxed
@given(situations())
def test_nothing_is_put_on_a_device_of_unknown_or_contradicting_memory(request):
    with suppress(DoesNotFit):
        for share in plan(request).devices:
            total, free = share.accelerator.total.bytes, share.accelerator.free.bytes
            is_shared = share.accelerator.pool == "unified"
            if (free is None and not is_shared) or (total is not None and free is not None and free > total):
                assert share.taken_bytes == 0


@relaxed
@given(situations(), st.none() | st.integers(1, 60 * GB))
def test_unknown_memory_gives_a_plan_within_a_stated_budget_or_none(request, total):
    request = replace(request, host=machine(None, total=total))
    with suppress(DoesNotFit, HostMismatch):
        planned = plan(request)
        assert planned.ram_budget_bytes == request.ram_bytes
        assert total is None or planned.ram_budget_bytes <= total
        assert all(
            share.taken_bytes == 0 or share.accelerator.pool == "discrete" for share in planned.devices
        )


@relaxed
@given(situations())
def test_tiers_sum_to_the_experts(request):
    with suppress(DoesNotFit):
        planned = plan(request)
        tiers = (planned.hot_bytes, planned.warm_bytes, planned.cold_bytes)
        assert sum(tiers) == request.geometry.expert_bytes
        assert min(tiers) >= 0
        widths = {layer.index: layer.expert_bytes for layer in request.geometry.layers}
        assert planned.hot_bytes == sum(widths[layer][expert] for layer, expert in planned.hot_experts)
        assert len(set(planned.hot_experts)) == len(planned.hot_experts)


def write_hollow(folder: Path, geometry: Geometry, shards: int) -> None:
    """Write a container of these figures: headers in ``shards`` files, and holes for the weights."""
    family = BY_MODEL_TYPE[geometry.family]
    experts = len(geometry.layers[0].expert_bytes) if geometry.layers else 0
    config = {**geometry.config, "model_type": geometry.family, family.count_key: experts}
    (folder / "config.json").write_text(json.dumps(config))
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (geometry.dense_bytes,)}
    for layer in geometry.layers:
        name = EXPERT_TENSORS[family.name]
        if family.fused:
            tensors[name.format(layer=layer.index)] = (experts, layer.width)
        else:
            tensors |= {
                name.format(layer=layer.index, expert=expert): (size,)
                for expert, size in layer.expert_bytes.items()
            }
    for number in range(shards):
        header, position = {}, 0
        for name, shape in list(tensors.items())[number::shards]:
            end = position + math.prod(shape)
            header[name] = {"dtype": "U8", "shape": shape, "data_offsets": (position, end)}
            position = end
        text = json.dumps(header).encode()
        with (folder / f"model-{number + 1:05}-of-{shards:05}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(file.tell() + position)


@relaxed
@given(requests(), st.integers(1, 4))
def test_a_container_on_disk_is_planned_by_its_own_figures(request, shards):
    geometry = replace(request.geometry, index_layers=0)
    if BY_MODEL_TYPE[geometry.family].fused:
        layers = (
            replace(layer, expert_bytes=dict.fromkeys(layer.expert_bytes, layer.width))
            for layer in geometry.layers
        )
        geometry = replace(geometry, layers=tuple(layers))
    with tempfile.TemporaryDirectory() as folder:
        write_hollow(Path(folder), geometry, shards)
        read = read_geometry(Path(folder))
    assert (read.family, read.shards, read.dense_bytes) == (geometry.family, shards, geometry.dense_bytes)
    assert read.layers == geometry.layers
    planned, expected = (plan(replace(request, geometry=model)) for model in (read, geometry))
    assert replace(planned, request=request) == replace(expected, request=request)


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
