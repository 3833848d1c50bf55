"""The rules that hold for every plan: each catches a plan that breaks it, and no sound plan is accused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machines import GB10, LAVAPIPE, device, full_usage, glm_mixed, machine, small_model, windowed

from pytest_colibri.host.model import DeviceIdentity
from pytest_colibri.judge.memory import broken_rules_of, statement_of
from pytest_colibri.judge.plan_rules import RULES, broken_rules
from pytest_colibri.planner.plan import DeviceShare, Plan, PlanRequest
from pytest_colibri.planner.reference import plan
from pytest_colibri.units import GB, Figure

GLM = glm_mixed()
USAGE = {**full_usage(GLM), (3, 7): 9, (5, 1): 4}
CARD = device("card", 24 * GB)
MASK = {"CUDA_VISIBLE_DEVICES": "1,0"}
OVER = device("busy", 25 * GB, total=24 * GB)
LESS_GB = Figure(23 * GB, "free less 1 GB")
UNREPORTED = device("unreported", None, pool=None, index=1)

UNIFIED = plan(PlanRequest(GLM, machine(114 * GB), "cuda", (GB10,), usage=USAGE))
DISCRETE = plan(PlanRequest(GLM, machine(100 * GB), "cuda", (CARD,), usage=USAGE))
WIDE = plan(PlanRequest(GLM, machine(100 * GB), "cuda", (CARD,), usage=USAGE, prompt_width=7065))
EXPLICIT = plan(PlanRequest(GLM, machine(100 * GB), "cuda", (CARD,), ram_bytes=60 * GB, vram_bytes=10 * GB))
CLAMPED = plan(PlanRequest(GLM, machine(100 * GB), "cuda", (CARD,), ram_bytes=300 * GB, vram_bytes=30 * GB))
SLOTS = plan(PlanRequest(GLM, machine(100 * GB), "cpu", slots_per_layer=4))
VULKAN = plan(PlanRequest(GLM, machine(100 * GB), "vulkan", (CARD,), usage=USAGE))
BLIND = plan(PlanRequest(GLM, machine(100 * GB), "cuda", (UNREPORTED,), usage=USAGE))
STATED = plan(PlanRequest(GLM, machine(None), "cuda", (GB10,), ram_bytes=60 * GB, usage=USAGE))
USER = plan(PlanRequest(GLM, machine(100 * GB), "cpu", environment={"PIPE": "0", "OMP_PLACES": "cores"}))
MASKED = plan(
    PlanRequest(
        GLM,
        machine(100 * GB),
        "cuda",
        (CARD, device("other", 24 * GB, index=1)),
        usage=USAGE,
        environment=MASK,
    )
)
RESIDENT = plan(
    PlanRequest(
        GLM,
        machine(100 * GB),
        "cuda",
        (CARD,),
        usage=USAGE,
        vram_bytes=16 * GB,
        environment={"CUDA_DENSE": "1"},
    )
)
WINDOWED = plan(
    PlanRequest(GLM, machine(100 * GB), "vulkan", (windowed("RX 580", 8 * GB, 256 * 2**20),), usage=USAGE)
)
ALL_IN_RAM = plan(PlanRequest(small_model(), machine(100 * GB), "cpu"))
BUSY = plan(
    PlanRequest(GLM, machine(100 * GB), "cuda", (device("busy", 10 * GB, total=24 * GB),), usage=USAGE)
)
TWO_SOCKETS = plan(PlanRequest(small_model(), machine(100 * GB, sockets=2), "cpu"))
BARE = plan(PlanRequest(GLM, machine(100 * GB), "cuda"))
OFF = plan(PlanRequest(GLM, machine(100 * GB), "cuda", (CARD,), environment={"COLI_CUDA": "0"}))
DRAFTS = plan(PlanRequest(GLM, machine(100 * GB), "cuda", (CARD,), environment={"COLI_CUDA_MTP": "1"}))
CODELESS = plan(PlanRequest(small_model(family="olmoe"), machine(100 * GB), "cuda", (CARD,)))
KV_Q8 = plan(PlanRequest(GLM, machine(100 * GB), "cpu", context=65_536, kv_slots=2, kv_type="q8_0"))
TWO_CARDS = plan(
    PlanRequest(GLM, machine(100 * GB), "cuda", (CARD, device("other", 24 * GB, index=1)), vram_bytes=9 * GB)
)
INTEGRATED = device("integrated", 30 * GB, total=48 * GB, pool="unified", kind="integrated", index=1)
HYBRID = plan(PlanRequest(GLM, machine(100 * GB), "vulkan", (CARD, INTEGRATED), usage=USAGE))
APPLE = plan(
    PlanRequest(
        GLM, machine(60 * GB), "metal", (replace(INTEGRATED, free=Figure(48 * GB, "Metal")),), usage=USAGE
    )
)
CPU_DEVICE = plan(PlanRequest(GLM, machine(100 * GB), "vulkan", (LAVAPIPE,), usage=USAGE))
VIEWS = tuple(
    replace(CARD, identity=DeviceIdentity(api, 0, "RX 9070", pci="0000:03:00.0"), processor=processor)
    for api, processor in (("rocm", "gfx1201"), ("vulkan", "gfx1200"))
)
CONTRADICTED = plan(
    PlanRequest(GLM, replace(machine(100 * GB), accelerators=VIEWS), "rocm", VIEWS[:1], usage=USAGE)
)
ALL_HOT = plan(PlanRequest(GLM, machine(100 * GB), "cuda", (device("huge", 500 * GB),), usage=USAGE))
CONTAINER = plan(PlanRequest(small_model(), machine(250 * GB, cgroup=34 * GB), "cpu"))

SOUND = {name: value for name, value in globals().items() if name.isupper() and isinstance(value, Plan)}


def share_of(base: Plan, **change: object) -> tuple[DeviceShare, ...]:
    return (replace(base.devices[0], **change),)


def exporting(base: Plan, **variables: str) -> Plan:
    return replace(base, environment={**base.environment, **variables})


def without(base: Plan, name: str) -> Plan:
    """The plan with one variable less in its environment."""
    return replace(base, environment={key: value for key, value in base.environment.items() if key != name})


def divided(base: Plan, *budgets: int) -> Plan:
    """The plan with these budgets for its devices instead."""
    shares = zip(base.devices, budgets, strict=True)
    return replace(base, devices=tuple(replace(share, budget_bytes=count) for share, count in shares))


BAD: dict[str, list[tuple[str, Plan]]] = {
    "available_memory_is_found": [
        ("nothing found", replace(DISCRETE, limit=Figure(0, "no meminfo"))),
        ("half of it found", replace(UNIFIED, limit=Figure(57 * GB, "MemFree"))),
    ],
    "devices_are_named": [("device left out", replace(DISCRETE, devices=(), warnings=()))],
    "used_memory_is_told": [("use untold", replace(BUSY, warnings=()))],
    "sockets_share_the_load": [("second socket forgotten", replace(TWO_SOCKETS, environment={}))],
    "runtime_holds_caches": [
        ("cache forgotten", replace(DISCRETE, runtime_bytes=DISCRETE.runtime_bytes - GB // 2)),
        ("one byte too few", replace(ALL_IN_RAM, runtime_bytes=ALL_IN_RAM.runtime_bytes - 1)),
    ],
    "limit_is_physical": [
        ("control group forgotten", replace(CONTAINER, limit=Figure(250 * GB, "MemAvailable"))),
        ("limit invented", replace(STATED, limit=Figure(64 * GB, "MemTotal"))),
    ],
    "reserve_is_kept": [
        ("one byte too many", replace(UNIFIED, ram_budget_bytes=UNIFIED.ram_budget_bytes + 1)),
        ("no reserve of the RAM", replace(ALL_IN_RAM, ram_budget_bytes=100 * GB)),
        ("more than was asked for", replace(EXPLICIT, ram_budget_bytes=90 * GB)),
    ],
    "pool_is_counted_once": [
        ("pool counted twice", replace(UNIFIED, ram_budget_bytes=100 * GB)),
        ("RAM alone above the limit", replace(ALL_IN_RAM, ram_budget_bytes=101 * GB)),
    ],
    "unknown_drives_no_tier": [
        ("unknown as budget", replace(BLIND, devices=share_of(BLIND, budget_bytes=GB))),
        ("unknown as pool", replace(BLIND, devices=share_of(BLIND, usable=Figure(80 * GB, "RAM")))),
        ("unknown limit", replace(STATED, devices=share_of(STATED, budget_bytes=GB))),
    ],
    "devices_keep_their_reserve": [
        ("usable is all that is free", replace(DISCRETE, devices=share_of(DISCRETE, usable=CARD.free))),
        ("heaps summed", replace(WINDOWED, devices=share_of(WINDOWED, usable=Figure(6 * GB + 1, "heaps")))),
        ("small reserve", replace(DISCRETE, devices=share_of(DISCRETE, reserve_bytes=GB, usable=LESS_GB))),
        ("more than its reserve leaves", replace(DISCRETE, devices=share_of(DISCRETE, reserve_bytes=3 * GB))),
        ("no room for a wide prompt", replace(WIDE, devices=DISCRETE.devices)),
    ],
    "staging_is_told": [("staging untold", replace(WINDOWED, warnings=()))],
    "devices_were_asked_for": [
        ("another device", replace(DISCRETE, devices=share_of(DISCRETE, number=1))),
        ("one device twice", replace(DISCRETE, devices=DISCRETE.devices * 2)),
    ],
    "devices_are_visible": [
        ("mask forgotten", replace(MASKED, devices=share_of(MASKED, number=0))),
        ("number beyond the mask", replace(MASKED, devices=share_of(MASKED, number=2))),
        ("numbered anew without a mask", replace(DISCRETE, devices=share_of(DISCRETE, number=1))),
    ],
    "residents_are_charged": [
        ("dense weights forgotten", replace(RESIDENT, devices=share_of(RESIDENT, resident_bytes=0))),
    ],
    "budgets_fit_devices": [
        ("residents above usable", replace(DISCRETE, devices=share_of(DISCRETE, resident_bytes=1))),
        ("budget above usable", replace(DISCRETE, devices=share_of(DISCRETE, budget_bytes=23 * GB))),
        ("sum differs", replace(DISCRETE, vram_budget_bytes=23 * GB)),
    ],
    "explicit_ram_holds": [
        ("RAM raised", replace(EXPLICIT, ram_budget_bytes=61 * GB)),
        ("clamped in silence", replace(CLAMPED, warnings=())),
        ("lowered in silence", replace(EXPLICIT, ram_budget_bytes=59 * GB)),
    ],
    "explicit_vram_holds": [
        (
            "VRAM raised by what else is there",
            replace(RESIDENT, vram_budget_bytes=RESIDENT.vram_budget_bytes + 1),
        ),
        ("VRAM raised", replace(EXPLICIT, vram_budget_bytes=11 * GB)),
        ("clamped in silence", replace(CLAMPED, warnings=CLAMPED.warnings[:1])),
    ],
    "explicit_slots_hold": [("slots raised", replace(SLOTS, slots_per_layer=5))],
    "ram_budget_holds_its_parts": [
        ("cache without runtime", replace(DISCRETE, cache_bytes=DISCRETE.cache_bytes + 1)),
    ],
    "dense_weights_are_counted": [("dense weights forgotten", replace(DISCRETE, dense_bytes=0))],
    "runtime_holds_experts_in_flight": [
        ("typical width", replace(DISCRETE, runtime_bytes=3_700_000_000 + 64 * 18_915_328)),
    ],
    "runtime_parts_add_up": [("a part forgotten", replace(DISCRETE, steps=DISCRETE.steps[:8]))],
    "slots_fit_cache": [
        ("one slot too many", replace(DISCRETE, slots_per_layer=DISCRETE.slots_per_layer + 1)),
        ("more slots than experts", replace(ALL_IN_RAM, slots_per_layer=9)),
    ],
    "every_layer_has_a_slot": [("no slot", replace(DISCRETE, slots_per_layer=0))],
    "runtime_holds_kv_cache": [
        ("both slots forgotten", replace(KV_Q8, runtime_bytes=3_700_000_000 + 64 * 37_789_696)),
    ],
    "runtime_is_not_overstated": [
        ("width of the cache forgotten", replace(KV_Q8, runtime_bytes=4 * KV_Q8.runtime_bytes)),
    ],
    "least_ram_is_planned": [
        ("raised to 8 GB", replace(CONTAINER, ram_budget_bytes=2 * GB)),
        ("beyond the machine", replace(CONTAINER, request=replace(CONTAINER.request, host=machine(3 * GB)))),
    ],
    "cache_is_used": [
        ("a slot forgotten", replace(DISCRETE, slots_per_layer=DISCRETE.slots_per_layer - 1)),
        (
            "idle beside cold experts",
            replace(
                DISCRETE,
                warm_bytes=DISCRETE.warm_bytes - 60 * GB,
                cold_bytes=DISCRETE.cold_bytes + 60 * GB,
            ),
        ),
    ],
    "shared_tier_fits_its_share": [
        ("above the working set", replace(APPLE, devices=share_of(APPLE, budget_bytes=49 * GB))),
    ],
    "free_is_within_total": [("free above total", replace(BUSY, devices=share_of(BUSY, accelerator=OVER)))],
    "devices_are_found": [
        ("device dropped", replace(DISCRETE, devices=())),
        ("chip of a shared pool dropped", replace(UNIFIED, devices=())),
        ("taken for nothing", replace(DISCRETE, devices=share_of(DISCRETE, usable=Figure(0, "")))),
    ],
    "tier_uses_devices": [("half a tier", replace(DISCRETE, vram_budget_bytes=11 * GB))],
    "pools_are_recognised": [
        (
            "shared taken for its own",
            replace(UNIFIED, devices=share_of(UNIFIED, accelerator=replace(GB10, pool="discrete"))),
        ),
    ],
    "discrete_comes_first": [
        ("integrated instead", divided(HYBRID, 0, 22 * GB)),
    ],
    "one_device_suffices": [
        ("divided in half", divided(TWO_CARDS, 4 * GB, 5 * GB)),
    ],
    "device_order_is_named": [("order left to CUDA", without(TWO_CARDS, "CUDA_DEVICE_ORDER"))],
    "contradictions_are_told": [("untold", replace(CONTRADICTED, warnings=()))],
    "cpu_devices_are_told": [("untold", replace(CPU_DEVICE, warnings=()))],
    "cold_misses_are_told": [("untold", replace(DISCRETE, warnings=()))],
    "missing_gpu_is_told": [
        ("untold", replace(BARE, warnings=())),
        ("one vendor only", replace(BARE, warnings=("no NVIDIA device was found",))),
    ],
    "missing_code_is_told": [("untold", replace(CODELESS, warnings=()))],
    "exported_ram_is_there": [
        ("raised to 8 GB", exporting(CONTAINER, RAM_GB="80.000")),
        ("more than asked for", exporting(EXPLICIT, RAM_GB="60.002")),
    ],
    "switched_off_exports_nothing": [("tier exported", exporting(OFF, CUDA_EXPERT_GB="22.000"))],
    "draft_is_off": [("drafts on", without(DISCRETE, "DRAFT"))],
    "draft_is_left_to_engine": [("drafts off", exporting(DRAFTS, DRAFT="0"))],
    "cuda_pipe_fits_devices": [
        ("several", exporting(DISCRETE, COLI_CUDA_PIPE="2")),
        ("unset", without(DISCRETE, "COLI_CUDA_PIPE")),
    ],
    "reads_overlap": [("unset", without(SLOTS, "PIPE"))],
    "threads_do_not_spin": [("unset", without(VULKAN, "COLI_NO_OMP_TUNE"))],
    "pins_only_what_fits": [("experts on the disk", exporting(DISCRETE, PIN_GB="all"))],
    "hot_bytes_are_real_widths": [
        ("wide expert at the typical width", replace(ALL_HOT, hot_bytes=ALL_HOT.hot_bytes - 18_874_368)),
        ("more experts than there are", replace(ALL_HOT, hot_experts=ALL_HOT.hot_experts * 2)),
    ],
    "hot_experts_exist": [
        ("an expert of another model", replace(DISCRETE, hot_experts=(*DISCRETE.hot_experts[:-1], (999, 0)))),
        ("an expert twice", replace(DISCRETE, hot_experts=(*DISCRETE.hot_experts, (3, 7)))),
        ("typical width", replace(DISCRETE, hot_bytes=DISCRETE.hot_bytes - 1)),
    ],
    "hot_experts_are_ranked": [
        ("order turned round", replace(DISCRETE, hot_experts=DISCRETE.hot_experts[::-1])),
    ],
    "hot_experts_fit": [("tier above its budget", replace(DISCRETE, hot_bytes=23 * GB))],
    "residency_is_complete": [
        ("bytes lost", replace(DISCRETE, cold_bytes=0)),
        (
            "more warm than the cache holds",
            replace(
                DISCRETE,
                warm_bytes=DISCRETE.cache_bytes + GB,
                cold_bytes=DISCRETE.cold_bytes - DISCRETE.cache_bytes + DISCRETE.warm_bytes - GB,
            ),
        ),
        (
            "negative",
            replace(ALL_IN_RAM, warm_bytes=ALL_IN_RAM.warm_bytes + 1, cold_bytes=-1),
        ),
    ],
    "hit_rate_matches": [
        ("above one", replace(ALL_IN_RAM, hit_rate=1.1)),
        ("too good", replace(DISCRETE, hit_rate=1.0)),
    ],
    "bottleneck_matches": [
        ("disk denied", replace(DISCRETE, bottleneck="mixed")),
        ("disk invented", replace(ALL_IN_RAM, bottleneck="disk")),
    ],
    "environment_keeps_budgets": [
        ("raised to 8 GB", exporting(CONTAINER, RAM_GB="80.000")),
        ("no figure", exporting(DISCRETE, RAM_GB="auto")),
        ("more experts than planned", exporting(VULKAN, COLI_VK_EXPERTS="320")),
    ],
    "exports_are_rounded_down": [("rounded up", exporting(RESIDENT, RAM_GB="88.0001"))],
    "threads_are_physical_cores": [("logical cores", exporting(DISCRETE, OMP_NUM_THREADS="16"))],
    "affinity_is_left_alone": [("affinity", exporting(DISCRETE, OMP_PROC_BIND="close"))],
    "environment_keeps_user_values": [("user overridden", exporting(USER, PIPE="1"))],
    "environment_exports_no_hints": [("hint exported", exporting(USER, _numactl="numactl"))],
    "environment_asks_for_planned_devices": [
        ("no device", exporting(BLIND, COLI_CUDA="1")),
        ("another index", exporting(DISCRETE, COLI_GPU="1")),
    ],
}


# What the JSON form derives from the request, so that no plan of ours can state it wrong.
MISSTATED: dict[str, tuple[Plan, dict[str, object]]] = {
    "context_is_stated": (DISCRETE, {"context": 8192}),
    "cores_are_physical": (DISCRETE, {"physical_cores": 16}),
    "sockets_are_counted": (DISCRETE, {"sockets": 2}),
    "policy_preserves_quality": (DISCRETE, {"policy": "experimental-fast"}),
    "disk_is_not_invented": (DISCRETE, {"disk_bytes": 500 * GB}),
    "slot_bytes_are_layer_widths": (DISCRETE, {"bytes_per_slot": 76 * 18_915_328}),
    "experts_are_counted": (DISCRETE, {"expert_bytes": 76 * 256 * 18_915_328}),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_plans_break_no_rule(name):
    assert broken_rules_of(SOUND[name]) == {}


def test_every_rule_has_a_plan_that_breaks_it():
    assert BAD.keys() | MISSTATED.keys() == RULES.keys()


@pytest.mark.parametrize(
    ("rule", "bad"),
    [pytest.param(rule, bad, id=f"{rule}: {fault}") for rule, faults in BAD.items() for fault, bad in faults],
)
def test_rule_catches_a_bad_plan(rule, bad):
    assert rule in broken_rules_of(bad)


@pytest.mark.parametrize("rule", MISSTATED)
def test_rule_catches_a_misstatement(rule):
    base, change = MISSTATED[rule]
    assert rule in broken_rules(replace(statement_of(base), **change), base.request)
