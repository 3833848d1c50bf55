"""Planners with one fault each, the checks that catch it, and the public reports that it stands for.

A fault replaces parts of the reference planner, of what it reads from a machine, or of what it writes down.
The judge keeps its own view of the machine. Run as a script, this prints both matrices.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

from issue_faults import IssueTrials, Outcome, planner_issues
from machines import device, full_usage, glm_mixed, machine, small_model, windowed

from pytest_colibri.claims.plan import BadPlan
from pytest_colibri.container.geometry import Geometry
from pytest_colibri.errors import ColibriError, UsageError
from pytest_colibri.host import emulated, matching
from pytest_colibri.host.devices import PhysicalDevice
from pytest_colibri.host.model import Accelerator, Host, Processor
from pytest_colibri.judge import memory
from pytest_colibri.judge.memory import statement_of
from pytest_colibri.judge.plan_rules import broken_rules, refusal_is_right
from pytest_colibri.judge.planning import ANSWERS, CHECKS, REFUSAL
from pytest_colibri.planner import (
    budgets,
    division,
    environment,
    exchange,
    explain,
    masks,
    notes,
    reference,
    runtime,
    tiers,
    tuning,
)
from pytest_colibri.planner.plan import PlanRequest
from pytest_colibri.profiles.loader import find_profile
from pytest_colibri.profiles.model import Backend, Pool
from pytest_colibri.units import GB, KIB, Figure

TYPICAL = 18_915_328

GLM = glm_mixed()
SMALL = small_model()
OLMOE = small_model(family="olmoe")
NULL_KEY = replace(OLMOE, config={**OLMOE.config, "kv_lora_rank": None})
CHINESE_NAME = replace(OLMOE, config={**OLMOE.config, "_name_or_path": "量化"})
USAGE = {id(model): full_usage(model) for model in (GLM, SMALL, OLMOE, NULL_KEY, CHINESE_NAME)}


@dataclass(frozen=True)
class Machine:
    """A machine of a profile, or one that no profile has; ``request`` is what is asked of the planner."""

    profile: str | None = None
    host: Host | None = None
    backend: Backend = "cuda"
    devices: tuple[Accelerator, ...] = ()
    model: Geometry = GLM
    request: Mapping[str, Any] = field(default_factory=dict)

    def seen(self) -> PlanRequest:
        """Return the request with the machine as the parsers of the probes see it now."""
        if self.host is not None:
            host, devices, backend = self.host, self.devices, self.backend
        else:
            profile = find_profile(str(self.profile))
            host, backend = emulated.emulate_host(profile), profile.backend
            devices = matching.matching_accelerators(profile, host)
        usage = USAGE[id(self.model)]
        return PlanRequest(self.model, host, backend, devices, usage=usage, **self.request)


def of(profile: str, model: Geometry = GLM, **request: Any) -> Machine:
    """The machine of a profile, with a request."""
    return Machine(profile=profile, model=model, request=request)


def made(
    host: Host, backend: Backend, *devices: Accelerator, model: Geometry = GLM, **request: Any
) -> Machine:
    """A machine that no profile has, with a request."""
    return Machine(host=host, backend=backend, devices=devices, model=model, request=request)


Part = tuple[ModuleType, str, Callable[[Any], Any]]


@dataclass(frozen=True)
class Fault:
    """One fault: ``parts`` are (module, name, how the original is wrapped).

    ``caught_by`` are the checks that must catch it, on ``machine``. ``reports`` are the ids of the registry
    for which it stands: a planner with it must be found out there, too.
    """

    machine: Machine
    caught_by: tuple[str, ...]
    parts: tuple[Part, ...]
    reports: tuple[str, ...] = ()

    def is_caught(self, broken: Mapping[str, str]) -> bool:
        """Tell whether all the checks that must catch it do."""
        return set(self.caught_by) <= broken.keys()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the parts while the planner plans."""
        with ExitStack() as stack:
            for module, name, wrap in self.parts:
                stack.enter_context(mock.patch.object(module, name, wrap(getattr(module, name))))
            yield


def verdicts(shown: Machine, fault: Fault | None = None) -> Mapping[str, str]:
    """Map each check that the planner breaks on a machine, as a judge without its fault sees it, to how."""
    known = shown.seen()
    try:
        with nullcontext() if fault is None else fault.applied():
            statement = statement_of(reference.plan(shown.seen()))
    except BadPlan as error:
        return {ANSWERS: str(error)}
    except ColibriError:
        wrong = refusal_is_right(known)
        return {} if wrong is None else {REFUSAL: wrong}
    except Exception as error:  # whatever ends a planner, it gives no answer
        return {ANSWERS: repr(error)}
    return broken_rules(statement, known)


def gives(value: Any) -> Callable[[Any], Any]:
    """Replace a function by one that returns a value, whatever it is asked."""
    return lambda _: lambda *_, **__: value


def then(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Change what a function returns."""
    return lambda original: lambda *given, **named: change(original(*given, **named))


def instead(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Replace a function."""
    return lambda _: function


def stating(**values: object) -> Callable[[Any], Any]:
    """Change keys of a part of the plan's JSON."""
    return then(lambda section: {**section, **values})


def without(*names: str) -> Callable[[Any], Any]:
    """Leave variables out."""
    return then(lambda values: {name: value for name, value in values.items() if name not in names})


def each_device(change: Callable[[Accelerator], Accelerator]) -> Callable[[Any], Any]:
    """Change each device that a parser finds."""
    return then(lambda found: tuple(map(change, found)))


def with_memory(total: int | None, free: int | None, pool: Pool | None = None) -> Callable[[Any], Any]:
    """Take every device for one with this memory."""

    def changed(found: Accelerator) -> Accelerator:
        return replace(found, total=Figure(total, "tool"), free=Figure(free, "tool"), pool=pool or found.pool)

    return each_device(changed)


def split(ram: Callable[..., int], vram: Callable[..., int]) -> Callable[[Any], Any]:
    """Divide a unified pool otherwise; both get the arguments of the right division."""
    return instead(lambda **given: (ram(**given), vram(**given)))


def floorless(original: Callable[..., Any]) -> Callable[..., Any]:
    """Divide a unified pool without a slot for each layer first."""
    return lambda **given: original(**{**given, "floor_bytes": given["floor_bytes"] - GB})


def mem_free(text: str) -> tuple[Figure, Figure]:
    """Read MemFree for MemAvailable."""
    fields = dict(line.split(":") for line in text.splitlines())
    total, free = (int(fields[key].split()[0]) * KIB for key in ("MemTotal", "MemFree"))
    return Figure(total, "MemTotal"), Figure(free, "MemFree")


def without_reclaimable(original: Callable[..., Figure]) -> Callable[..., Figure]:
    """Overlook the cache that a control group can give back."""
    return lambda text, version: original(text.replace("inactive_file", "other"), version)


def threads_of(text: str) -> Processor:
    """Count logical processors for cores."""
    rows = [line for line in text.splitlines() if line and not line.startswith("#")]
    return Processor(len(rows), 1, "lscpu")


def counted_by(pattern: str) -> Callable[[Any], Any]:
    """Take the cores of another line of what a system tells."""
    return instead(lambda text: Processor(int(re.findall(pattern, text)[0]), 1, pattern))


def seen_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Leave out each device that several drivers show."""
    return lambda views: tuple(found for found in original(views) if len(found.views) == 1)


def each_view(views: Sequence[Accelerator]) -> tuple[PhysicalDevice, ...]:
    """Take each view of a device for a device."""
    return tuple(PhysicalDevice((view,), view.total, view.free) for view in views)


def equally(total: int, bounds: Any) -> tuple[int, ...]:
    """Divide a tier over all devices."""
    return tuple(min(bound, total // len(bounds)) for bound in bounds) if bounds else ()


def beyond_its_bounds(total: int, bounds: Sequence[int]) -> tuple[int, ...]:
    """Give one device more than it has."""
    return tuple(bound + GB if total and not place else 0 for place, bound in enumerate(bounds))


def kv_in_f32(original: Callable[..., int]) -> Callable[..., int]:
    """Ignore the type of the cache."""
    return lambda geometry, context, _="f32": original(geometry, context)


def before(step: Callable[[Geometry], object]) -> Callable[[Any], Any]:
    """Do something else with the model first, and go on."""

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def both(geometry: Geometry, *given: Any, **named: Any) -> Any:
            step(geometry)
            return original(geometry, *given, **named)

        return both

    return wrapped


def read_key_of_another_family(geometry: Geometry) -> int:
    """Expect a number in a key that another family has, and that may be null here."""
    value: Any = geometry.config.get("kv_lora_rank", 0)
    return int(value)


def read_in_a_code_page(geometry: Geometry) -> str:
    """Read config.json in the code page of Windows."""
    return json.dumps(dict(geometry.config), ensure_ascii=False).encode().decode("cp1252")


def unless_glm(error: Exception) -> Callable[[Geometry], None]:
    """Raise an error for every family but one."""

    def check(geometry: Geometry) -> None:
        if geometry.family != "glm_moe_dsa":
            raise error

    return check


def at_all_devices(original: Callable[..., Any]) -> Callable[..., Any]:
    """Plan for every device of the machine, whichever were asked for."""
    return lambda request: original(replace(request, accelerators=request.host.accelerators))


def with_experts(original: Callable[..., Any]) -> Callable[..., Any]:
    """State experts among the dense weights."""
    return lambda plan: {**original(plan), "dense_bytes": plan.request.geometry.total_bytes}


def named(variables: Mapping[str, str]) -> Callable[[Any], Any]:
    """Export more variables."""
    return then(lambda planned: {**planned, **variables})


def with_hints(original: Callable[..., Any]) -> Callable[..., Any]:
    """Export hints too."""

    def planned(request: Any, ram: Any, devices: Any, hot: Any, tune: Any) -> Any:
        hints = {name: value for name, (value, _) in tune.items()}
        return {**hints, **original(request, ram, devices, hot, tune)}

    return planned


def fill_by_typical_width(ranked: Sequence[Any], _: Any, budgets: Sequence[int]) -> Sequence[Any]:
    """Fill the tier as if every expert had the typical width."""
    return ranked[: sum(budgets) // TYPICAL]


FAMILIES_OF_1066 = ("1066-olmoe", "1066-kimi-k3", "1066-inkling", "1066-deepseek-v4")
PC = of("nvidia-cuda")
GB10_124 = of("gb10-124gb")
CARD = device("card", 24 * GB, total=24 * GB)
OTHER = device("other", 24 * GB, total=24 * GB, index=1)
SHARED = device("integrated", 30 * GB, total=48 * GB, pool="unified", kind="integrated", index=1)
METAL = device("Apple M2 Max", 48 * GB, total=48 * GB, pool="unified", kind="integrated", api="metal")
HUGE = device("huge", 500 * GB, total=500 * GB)
TWO_CARDS = made(machine(100 * GB), "cuda", CARD, OTHER, vram_bytes=8 * GB)
NOTHING = Figure(0, "")
NO_FLOOR: Part = (budgets, "refuse_below_floor", gives(None))
AT_LEAST_8_GB: Part = (division, "ram_budget", then(lambda budget: max(budget, 8 * GB)))
OVER_TOTAL = with_memory(33_665_581_056, 58_061_750_272)

FAULTS: Mapping[str, Fault] = {
    # Whether there is an answer.
    "ends at a key that is null": Fault(
        of("nvidia-cuda", NULL_KEY),
        (ANSWERS,),
        ((runtime, "kv_bytes", before(read_key_of_another_family)),),
        reports=("184-null-key",),
    ),
    "ends at a name in another script": Fault(
        of("cpu", CHINESE_NAME),
        (ANSWERS,),
        ((runtime, "kv_bytes", before(read_in_a_code_page)),),
        reports=("184-code-page",),
    ),
    "ends at a family that it does not know": Fault(
        of("nvidia-cuda", OLMOE),
        (ANSWERS,),
        ((runtime, "rules_of", before(unless_glm(KeyError("kv_lora_rank")))),),
        reports=("712", *FAMILIES_OF_1066),
    ),
    "refuses a family that it does not know": Fault(
        of("nvidia-cuda", OLMOE),
        (REFUSAL,),
        ((runtime, "rules_of", before(unless_glm(UsageError("no rules for this family")))),),
        reports=("712", *FAMILIES_OF_1066),
    ),
    "writes infinity into the plan": Fault(
        PC, (ANSWERS,), ((exchange, "_disk", stating(available_bytes=math.inf)),), reports=("379",)
    ),
    # The limit and the pool.
    "counts a shared pool twice": Fault(
        of("gb10-114gb"),
        ("pool_is_counted_once", "reserve_is_kept"),
        ((budgets, "split_unified_pool", split(lambda **g: g["pool_bytes"], lambda **g: g["tier_bytes"])),),
        reports=("653", "case-13", "case-14", "case-15"),
    ),
    "grants both budgets of one pool": Fault(
        of("gb10-124gb", ram_bytes=100 * GB, vram_bytes=65 * GB),
        ("pool_is_counted_once", "reserve_is_kept"),
        ((budgets, "split_unified_pool", split(lambda **g: g["asked_ram"], lambda **g: g["asked_vram"])),),
        reports=("759",),
    ),
    "keeps no reserve of the pool": Fault(
        GB10_124,
        ("reserve_is_kept",),
        ((budgets, "automatic_ram_budget", instead(lambda limit: limit)),),
        reports=("open-unified-reserve",),
    ),
    "gives the tier what the slots need": Fault(
        GB10_124,
        ("every_layer_has_a_slot", "least_ram_is_planned"),
        ((budgets, "split_unified_pool", floorless),),
        reports=("open-unified-reserve",),
    ),
    "forgets the control group": Fault(
        of("container-34gb"),
        ("limit_is_physical",),
        ((budgets, "limit_of", instead(lambda host: host.memory.available)),),
        reports=("open-cgroup", "case-17", "case-18"),
    ),
    "counts reclaimable cache of the group as used": Fault(
        of("pod-page-cache", SMALL),
        ("available_memory_is_found",),
        ((emulated, "parse_cgroup", without_reclaimable),),
        reports=("case-18",),
    ),
    "takes MemFree for MemAvailable": Fault(
        of("gb10-page-cache", SMALL),
        ("available_memory_is_found",),
        ((emulated, "parse_meminfo", instead(mem_free)),),
        reports=("case-11",),
    ),
    "plans with MemFree, however little": Fault(
        of("gb10-page-cache"),
        ("available_memory_is_found",),
        (
            NO_FLOOR,
            (emulated, "parse_meminfo", instead(mem_free)),
            (emulated, "parse_cgroup", without_reclaimable),
        ),
        reports=("case-11", "case-18"),
    ),
    "makes up 8 GB where it finds no memory": Fault(
        of("ryzen-9950x3d-windows"),
        ("available_memory_is_found",),
        (
            NO_FLOOR,
            AT_LEAST_8_GB,
            (emulated, "parse_cim", gives((NOTHING, NOTHING))),
            (emulated, "parse_vm_stat", gives((NOTHING, NOTHING))),
        ),
        reports=("123", "150"),
    ),
    "takes the total for available": Fault(
        of("cpu"),
        ("limit_is_physical",),
        ((emulated, "parse_meminfo", then(lambda figures: (figures[0], figures[0]))),),
        reports=("case-11",),
    ),
    "believes in a working set of the whole RAM": Fault(
        made(machine(120 * GB), "metal", METAL, vram_bytes=60 * GB),
        ("shared_tier_fits_its_share", "devices_keep_their_reserve"),
        ((budgets, "usable_on_device", gives(Figure(90 * GB, "RAM"))),),
    ),
    "grants a tier beyond the working set": Fault(
        of("apple-m2-max-64gb", vram_bytes=60 * GB),
        ("shared_tier_fits_its_share",),
        (
            (budgets, "usable_on_device", gives(Figure(90 * GB, "RAM"))),
            (budgets, "split_unified_pool", split(lambda **g: g["floor_bytes"], lambda **g: g["asked_vram"])),
        ),
        reports=("case-16",),
    ),
    # What is asked for.
    "raises a small budget to 8 GB": Fault(
        of("host-3gb"),
        ("least_ram_is_planned", "exported_ram_is_there", "pool_is_counted_once"),
        (NO_FLOOR, AT_LEAST_8_GB),
        reports=("open-small-host",),
    ),
    "refuses what fits": Fault(
        of("cpu", SMALL), (REFUSAL,), ((budgets, "ram_floor", then(lambda floor: floor * 10)),)
    ),
    "raises the RAM budget that was asked for": Fault(
        of("cpu", SMALL, ram_bytes=8 * GB),
        ("explicit_ram_holds", "exported_ram_is_there"),
        ((budgets, "explicit_ram_budget", instead(lambda _, limit: limit * 88 // 100)),),
        reports=("766-plan",),
    ),
    "takes any RAM budget as it is": Fault(
        of("wsl-rtx-4090", ram_bytes=300 * GB),
        ("pool_is_counted_once", "reserve_is_kept"),
        ((budgets, "explicit_ram_budget", instead(lambda asked, _: asked)),),
    ),
    "clamps budgets in silence": Fault(
        of("nvidia-cuda", ram_bytes=300 * GB, vram_bytes=30 * GB),
        ("explicit_ram_holds", "explicit_vram_holds"),
        ((budgets, "clamp_warning", gives(())),),
        reports=("759", "case-16"),
    ),
    "fills the card whatever was asked for": Fault(
        of("nvidia-cuda", vram_bytes=8 * GB),
        ("explicit_vram_holds",),
        ((budgets, "spread", instead(lambda _, bounds: tuple(bounds))),),
        reports=("759", "848-plan"),
    ),
    "plans half of a tier in silence": Fault(
        of("nvidia-cuda", vram_bytes=8 * GB),
        ("explicit_vram_holds",),
        (
            (budgets, "spread", lambda original: lambda total, bounds: original(total // 2, bounds)),
            (budgets, "clamp_warning", gives(())),
        ),
        reports=("848-plan",),
    ),
    "forgets the slots asked for": Fault(
        of("cpu", SMALL, slots_per_layer=2),
        ("explicit_slots_hold",),
        (
            (
                reference,
                "ram_cache",
                lambda original: lambda request, room: original(replace(request, slots_per_layer=None), room),
            ),
        ),
    ),
    # Which devices there are.
    "leaves out a device with [N/A]": Fault(
        of("gb10-114gb"),
        ("devices_are_found", "devices_are_named"),
        (
            (
                emulated,
                "parse_nvidia_smi",
                then(lambda found: tuple(one for one in found if one.free.bytes is not None)),
            ),
        ),
        reports=("487",),
    ),
    "takes [N/A] for zero": Fault(
        of("gb10-114gb"),
        ("devices_are_found",),
        ((emulated, "parse_nvidia_smi", with_memory(0, 0)),),
        reports=("487",),
    ),
    "finds no AMD device": Fault(
        of("rx-6950-xt-rocm"),
        ("devices_are_found", "tier_uses_devices"),
        ((emulated, "parse_rocm_smi", gives(())), (emulated, "parse_drm", gives(()))),
        reports=("662",),
    ),
    "finds no AMD device under Windows": Fault(
        of("strix-halo-windows"),
        ("devices_are_named",),
        ((emulated, "parse_hipinfo", gives(())),),
        reports=("931",),
    ),
    "leaves out a card with a comma in its name": Fault(
        of("comma-in-name"),
        ("devices_are_found", "devices_are_named"),
        (
            (
                emulated,
                "parse_nvidia_smi",
                then(lambda found: tuple(one for one in found if "," not in one.identity.name)),
            ),
        ),
        reports=("186",),
    ),
    "leaves out a card that two drivers show": Fault(
        of("radeon-gtx-1650-five-entries"),
        ("devices_are_found",),
        ((matching, "physical_devices", seen_once),),
        reports=("case-8",),
    ),
    "takes the carve-out for the pool": Fault(
        of("strix-halo-carve-out-512mib"),
        ("devices_are_found",),
        (
            (emulated, "parse_rocm_smi", with_memory(2**29, 2**29)),
            (emulated, "parse_drm", with_memory(2**29, 2**29)),
        ),
        reports=("case-13", "case-15"),
    ),
    "takes hidden memory for the RAM": Fault(
        of("a100-mig"),
        ("unknown_drives_no_tier",),
        ((emulated, "parse_nvidia_smi", with_memory(1081 * GB, 1081 * GB, "discrete")),),
        reports=("open-mig",),
    ),
    "takes a shared pool for a card's own": Fault(
        of("jetson-thor"),
        ("pools_are_recognised", "pool_is_counted_once"),
        (
            (emulated, "parse_nvidia_smi", with_memory(128 * GB, 120 * GB, "discrete")),
            (emulated, "parse_rocm_smi", with_memory(128 * GB, 120 * GB, "discrete")),
            (emulated, "parse_drm", with_memory(128 * GB, 120 * GB, "discrete")),
            (matching, "_fits", gives(True)),
        ),
        reports=("case-13", "case-15"),
    ),
    "believes in more free memory than there is": Fault(
        of("rtx-5090-free-over-total"),
        ("free_is_within_total", "unknown_drives_no_tier"),
        (
            (emulated, "parse_nvidia_smi", OVER_TOTAL),
            (budgets, "trusted_free", instead(lambda found: found.free)),
        ),
        reports=("case-12",),
    ),
    "counts a card once for each driver": Fault(
        of("radeon-gtx-1650-five-entries"),
        ("devices_were_asked_for",),
        ((matching, "physical_devices", instead(each_view)),),
        reports=("case-8",),
    ),
    "takes llvmpipe for a GPU": Fault(
        of("wsl-rtx-4090"),
        ("devices_were_asked_for",),
        ((matching, "_fits", gives(True)),),
        reports=("case-8",),
    ),
    "prefers the integrated chip": Fault(
        made(machine(100 * GB), "vulkan", CARD, SHARED),
        ("discrete_comes_first",),
        (
            (
                division,
                "usable_bytes",
                lambda original: (
                    lambda shares: [
                        0 if share.accelerator.pool == "discrete" else count
                        for share, count in zip(shares, original(shares), strict=True)
                    ]
                ),
            ),
        ),
    ),
    "takes the larger, integrated chip": Fault(
        of("rtx-5070-ti-radeon-igpu"),
        ("discrete_comes_first", "devices_were_asked_for"),
        ((matching, "_fits", instead(lambda *given: given[2].type == "integrated")),),
        reports=("case-9", "case-10"),
    ),
    "forgets the mask": Fault(
        made(machine(100 * GB), "cuda", CARD, OTHER, environment={"CUDA_VISIBLE_DEVICES": "1,0"}),
        ("devices_are_visible",),
        (
            (
                masks,
                "visible_devices",
                lambda original: lambda backend, known, _: original(backend, known, {}),
            ),
        ),
    ),
    "divides what fits one device": Fault(
        TWO_CARDS,
        ("one_device_suffices",),
        ((budgets, "spread", instead(equally)),),
        reports=("case-22",),
    ),
    "gives work to an idle device": Fault(
        TWO_CARDS,
        ("environment_asks_for_planned_devices", "cuda_pipe_fits_devices"),
        ((environment, "working_devices", instead(tuple)),),
    ),
    "plans for a card that was left out": Fault(
        made(replace(machine(100 * GB), accelerators=(CARD, OTHER)), "cuda", CARD),
        ("devices_were_asked_for",),
        ((environment, "planned_accelerators", at_all_devices),),
        reports=("case-21",),
    ),
    "leaves the order of devices to CUDA": Fault(
        of("gtx-1660-super-rtx-3090"),
        ("device_order_is_named",),
        ((environment, "cuda_environment", without("CUDA_DEVICE_ORDER")),),
        reports=("open-gpu-order",),
    ),
    # What devices can hold.
    "keeps no reserve on the device": Fault(
        of("h200"),
        ("devices_keep_their_reserve",),
        ((budgets, "device_reserve", gives(0)),),
        reports=("687-plan", "case-19", "case-20"),
    ),
    "keeps no room for a prompt": Fault(
        of("rtx-a6000-four", prompt_width=7065),
        ("devices_keep_their_reserve",),
        ((runtime, "prompt_scratch_bytes", gives(0)),),
        reports=("767-plan",),
    ),
    "adds up the heaps": Fault(
        made(machine(100 * GB), "vulkan", replace(windowed("card", 8 * GB, GB), free=Figure(9 * GB, ""))),
        ("devices_keep_their_reserve",),
        (
            (budgets, "trusted_free", instead(lambda found: Figure(9 * GB, found.free.source))),
            (budgets, "largest_local_heap", gives(Figure(9 * GB, "all heaps"))),
        ),
        reports=("case-19",),
    ),
    "stops the tier at half": Fault(
        PC,
        ("tier_uses_devices",),
        (
            (
                budgets,
                "usable_on_device",
                then(lambda figure: Figure((figure.bytes or 0) // 2, figure.source)),
            ),
        ),
    ),
    "gives one device more than it has": Fault(
        TWO_CARDS,
        ("budgets_fit_devices",),
        ((budgets, "spread", instead(beyond_its_bounds)),),
        reports=("687-plan", "767-plan", "848-plan", "case-19", "case-20"),
    ),
    "forgets dense weights on the device": Fault(
        of("h200", vram_bytes=60 * GB, environment={"CUDA_DENSE": "1"}),
        ("residents_are_charged",),
        ((runtime, "resident_bytes", gives(0)),),
        reports=("687-plan",),
    ),
    # What the RAM must hold.
    "forgets the runtime": Fault(
        PC,
        ("ram_budget_holds_its_parts",),
        ((tiers, "cache_bytes", instead(lambda budget, dense, _: budget - dense)),),
    ),
    "counts experts as dense weights": Fault(
        PC, ("dense_weights_are_counted",), ((exchange, "_ram", with_experts),), reports=("1055",)
    ),
    "buffers experts of typical width": Fault(
        PC,
        ("runtime_holds_experts_in_flight",),
        ((runtime, "expert_buffer_bytes", gives(64 * TYPICAL)),),
        reports=("903-widest-expert",),
    ),
    "forgets the KV cache": Fault(
        of("nvidia-cuda", context=32_768),
        ("runtime_holds_kv_cache", "runtime_holds_caches"),
        ((runtime, "kv_bytes", gives(0)),),
        reports=("case-24",),
    ),
    "forgets the cache of indexers": Fault(
        of("h200", context=131_072),
        ("runtime_holds_caches",),
        (
            (
                runtime,
                "kv_bytes",
                lambda original: lambda geometry, *given: original(replace(geometry, index_layers=0), *given),
            ),
        ),
        reports=("1063",),
    ),
    "plans the same runtime for every context": Fault(
        of("h200", context=131_072, kv_type="q8_0"),
        ("runtime_holds_kv_cache",),
        ((runtime, "kv_bytes", gives(0)), (runtime, "workspace_bytes", gives(0))),
        reports=("case-23",),
    ),
    "counts every KV cache in f32": Fault(
        of("nvidia-cuda", context=65_536, kv_type="q4_0"),
        ("runtime_is_not_overstated",),
        ((runtime, "kv_bytes", kv_in_f32),),
        reports=("case-23",),
    ),
    "leaves a part out of the sum": Fault(
        PC,
        ("runtime_parts_add_up",),
        (
            (
                explain,
                "steps_of",
                then(lambda steps: tuple(step for step in steps if step.name != explain.IN_FLIGHT)),
            ),
        ),
    ),
    "counts slots of typical width": Fault(
        of("cpu", ram_bytes=23_900_000_000),
        ("slots_fit_cache",),
        (
            (
                tiers,
                "cap_for_cache",
                instead(lambda geometry, room: room // (TYPICAL * len(geometry.layers)) + 1),
            ),
        ),
        reports=("766-plan",),
    ),
    "counts every slot as the widest": Fault(
        of("host-256gb"),
        ("cache_is_used",),
        (
            (
                tiers,
                "cap_for_cache",
                instead(lambda geometry, room: room // (geometry.widest * len(geometry.layers))),
            ),
        ),
        reports=("856-plan", "885-plan"),
    ),
    "counts a wide row in every model": Fault(
        of("host-256gb"),
        ("cache_is_used",),
        (
            (
                tiers,
                "cap_for_cache",
                instead(lambda geometry, room: room // (geometry.bytes_per_slot + 2 * geometry.widest)),
            ),
        ),
        reports=("856-plan",),
    ),
    "states slots of typical width": Fault(
        PC,
        ("slot_bytes_are_layer_widths",),
        ((exchange, "_model", stating(per_cap_bytes=76 * TYPICAL)),),
        reports=("766-plan", "856-plan"),
    ),
    # Where the experts are.
    "overlooks the widest layer": Fault(
        PC,
        ("experts_are_counted",),
        ((exchange, "_model", stating(expert_bytes=75 * 256 * TYPICAL)),),
    ),
    "fills the tier by the typical width": Fault(
        made(machine(100 * GB), "cuda", HUGE, vram_bytes=372 * GB),
        ("hot_experts_fit",),
        ((tiers, "fill_devices", instead(fill_by_typical_width)),),
    ),
    "counts hot experts at the typical width": Fault(
        made(machine(100 * GB), "cuda", HUGE),
        ("hot_experts_exist", "hot_bytes_are_real_widths"),
        ((tiers, "bytes_of_experts", then(lambda sizes: dict.fromkeys(sizes, TYPICAL))),),
    ),
    "ranks the least used first": Fault(
        PC, ("hot_experts_are_ranked",), ((tiers, "rank_hot_experts", then(lambda ranked: ranked[::-1])),)
    ),
    "loses the experts on the disk": Fault(
        PC,
        ("residency_is_complete", "bottleneck_matches"),
        ((exchange, "_disk", stating(cold_expert_bytes=0)),),
        reports=("885-plan",),
    ),
    "promises every hit": Fault(PC, ("hit_rate_matches",), ((tiers, "hit_rate", gives(1.0)),)),
    "denies the disk": Fault(PC, ("bottleneck_matches",), ((tiers, "bottleneck_of", gives("mixed")),)),
    "invents free disk space": Fault(
        PC, ("disk_is_not_invented",), ((exchange, "_disk", stating(available_bytes=500 * GB)),)
    ),
    # What is exported.
    "exports twice the budget": Fault(
        PC,
        ("environment_keeps_budgets", "exports_are_rounded_down"),
        ((environment, "gigabytes", then(lambda text: f"{2 * float(text):.3f}")),),
    ),
    "rounds budgets up": Fault(
        PC,
        ("exports_are_rounded_down",),
        ((environment, "gigabytes", instead(lambda count: f"{count // 10**6 / 1000 + 0.001:.3f}")),),
    ),
    "counts siblings of a core": Fault(
        of("wsl-rtx-4090"),
        ("cores_are_physical", "threads_are_physical_cores"),
        ((emulated, "parse_lscpu", instead(threads_of)),),
        reports=("325", "325-siblings", "332"),
    ),
    "counts siblings of a core under Windows": Fault(
        of("ryzen-9950x3d-windows"),
        ("cores_are_physical", "threads_are_physical_cores"),
        ((emulated, "parse_cim_cores", counted_by(r"NumberOfLogicalProcessors *: (\d+)")),),
        reports=("275",),
    ),
    "counts siblings of a core under macOS": Fault(
        of("mac-pro-intel"),
        ("cores_are_physical", "threads_are_physical_cores"),
        ((emulated, "parse_mac_cores", counted_by(r"hw\.logicalcpu: (\d+)")),),
        reports=("805",),
    ),
    "counts efficiency cores": Fault(
        of("apple-metal"),
        ("cores_are_physical", "threads_are_physical_cores"),
        ((emulated, "parse_mac_cores", counted_by(r"hw\.physicalcpu: (\d+)")),),
        reports=("903-efficiency-cores",),
    ),
    "counts one core": Fault(
        of("cores-64-two-columns"),
        ("cores_are_physical", "threads_are_physical_cores"),
        ((emulated, "parse_lscpu", gives(Processor(1, 1, "lscpu"))),),
        reports=("325",),
    ),
    "counts one socket": Fault(
        of("two-sockets-1tb"),
        ("sockets_are_counted", "sockets_share_the_load"),
        ((emulated, "parse_lscpu", then(lambda found: replace(found, sockets=1))),),
    ),
    "binds threads to cores": Fault(
        PC,
        ("affinity_is_left_alone",),
        ((environment, "planned_environment", named({"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"})),),
        reports=("279", "325", "325-affinity"),
    ),
    "overrides the user": Fault(
        of("cpu", environment={"RAM_GB": "20", "OMP_NUM_THREADS": "3"}),
        ("environment_keeps_user_values",),
        ((environment, "with_user_values", instead(lambda planned, user: {**user, **planned})),),
    ),
    "exports hints": Fault(
        of("two-sockets-1tb"),
        ("environment_exports_no_hints",),
        ((environment, "planned_environment", with_hints),),
    ),
    "asks for a device that holds nothing": Fault(
        of("a100-mig"),
        ("environment_asks_for_planned_devices",),
        ((environment, "working_devices", instead(tuple)),),
    ),
    "exports a backend that is switched off": Fault(
        of("nvidia-cuda", environment={"COLI_CUDA": "0"}),
        ("switched_off_exports_nothing",),
        ((environment, "switched_off", gives(False)),),
    ),
    "calls a fast policy harmless": Fault(
        of("cpu", policy="experimental-fast"),
        ("policy_preserves_quality",),
        (
            (
                memory,
                "plan_to_json",
                stating(policy={"name": "experimental-fast", "quality_preserving": True}),
            ),
        ),
    ),
    # What makes it faster.
    "drafts where computing bounds the run": Fault(
        of("two-sockets-1tb"),
        ("draft_is_off",),
        ((tuning, "draft", gives(None)),),
        reports=("389",),
    ),
    "drafts where the disk bounds the run": Fault(
        PC,
        ("draft_is_off",),
        ((tuning, "draft", gives(None)),),
    ),
    "switches off drafts that were asked for": Fault(
        of("nvidia-cuda", environment={"COLI_CUDA_MTP": "1"}),
        ("draft_is_left_to_engine",),
        ((tuning, "draft", gives(("0", "disk-bound"))),),
        reports=("467",),
    ),
    "pipelines for several GPUs": Fault(
        PC, ("cuda_pipe_fits_devices",), ((tuning, "cuda_pipe", gives(("2", "GPUs"))),)
    ),
    "reads without overlap": Fault(of("cpu"), ("reads_overlap",), ((tuning, "pipe", gives(None)),)),
    "fills one socket's memory": Fault(
        of("two-sockets-1tb"),
        ("sockets_share_the_load",),
        ((tuning, "numa", gives(None)),),
        reports=("384",),
    ),
    "lets threads spin": Fault(
        of("nvidia-vulkan"), ("threads_do_not_spin",), ((tuning, "no_omp_tune", gives(None)),)
    ),
    "pins what does not fit": Fault(
        PC, ("pins_only_what_fits",), ((tuning, "pin_all", gives(("all", "RAM"))),)
    ),
    # What a person must know.
    "bills a context in silence": Fault(
        of("h200", context=262_144),
        ("context_is_stated",),
        ((exchange, "_request", stating(context=4096)),),
        reports=("case-24",),
    ),
    "is silent where interfaces contradict each other": Fault(
        of("rx-9070-two-names"),
        ("contradictions_are_told",),
        ((notes, "contradiction_notes", gives(())),),
        reports=("case-6",),
    ),
    "calls a CPU device a GPU": Fault(
        of("software-vulkan"),
        ("cpu_devices_are_told",),
        ((notes, "device_notes", gives(())),),
        reports=("case-7",),
    ),
    "is silent on staging": Fault(
        of("rx-580-without-rebar"),
        ("staging_is_told",),
        ((notes, "staging_note", gives(())),),
        reports=("case-19", "case-20"),
    ),
    "is silent on memory that others use": Fault(
        of("rtx-a6000-four-in-use"),
        ("used_memory_is_told",),
        ((notes, "in_use_note", gives(())),),
        reports=("770",),
    ),
    "is silent on the disk": Fault(PC, ("cold_misses_are_told",), ((notes, "disk_notes", gives(())),)),
    "is silent on a missing GPU": Fault(
        made(machine(100 * GB), "rocm"),
        ("missing_gpu_is_told",),
        ((notes, "request_notes", gives(())),),
    ),
    "misses an NVIDIA device on every machine": Fault(
        made(machine(100 * GB), "rocm"),
        ("missing_gpu_is_told",),
        ((notes, "request_notes", gives(("no NVIDIA device was found",))),),
    ),
    "is silent on a backend without code": Fault(
        of("nvidia-cuda", OLMOE),
        ("missing_code_is_told",),
        ((notes, "family_notes", gives(())),),
        reports=("887-plan", "case-25"),
    ),
}


@cache
def matrix() -> Mapping[str, Mapping[str, str]]:
    """Map each fault to the checks that catch it on its machine, and to how each is broken."""
    return {name: verdicts(fault.machine, fault) for name, fault in FAULTS.items()}


def faults_of(issue: str) -> Mapping[str, Fault]:
    """Return the faults that stand for a report."""
    return {name: fault for name, fault in FAULTS.items() if issue in fault.reports}


def check_table() -> Iterator[str]:
    """Write a column for each check: ``#`` where it catches a fault as it must, ``+`` where it may."""
    yield from (f"{number:>3} {check}" for number, check in enumerate(CHECKS, 1))
    width = max(map(len, FAULTS))
    for place, title in enumerate(("", "fault")):
        numbers = (f"{number:>2}"[place] for number in range(1, len(CHECKS) + 1))
        yield f"{title:<{width}}  {''.join(numbers)}"
    for name, broken in matrix().items():
        named = FAULTS[name].caught_by
        marks = ("." if check not in broken else "#" if check in named else "+" for check in CHECKS)
        yield f"{name:<{width}}  {''.join(marks)}"


def report_table(outcomes: Mapping[str, Mapping[str | None, Outcome]]) -> Iterator[str]:
    """Write a line for each report and planner: what becomes of it, and the checks that find it out."""
    width = max(map(len, FAULTS))
    for issue, by_fault in outcomes.items():
        for fault, outcome in by_fault.items():
            checks = ", ".join(sorted({check for _, check in outcome.broken}))
            yield f"{issue:<20}  {fault or 'no fault':<{width}}  {outcome.state:<14}  {checks}".rstrip()


def report_outcomes() -> Mapping[str, Mapping[str | None, Outcome]]:
    """Map each report to what becomes of it: with each fault that stands for it, and without (None)."""
    with tempfile.TemporaryDirectory() as folder:
        trials = IssueTrials(Path(folder))
        return {
            issue.id: {
                None: trials.outcome(issue),
                **{name: trials.outcome(issue, fault) for name, fault in faults_of(issue.id).items()},
            }
            for issue in planner_issues()
        }


def main() -> int:
    """Print both matrices, and how many faults and reports are as they must be; 1 where one is not."""
    outcomes = report_outcomes()
    print("\n".join([*check_table(), "", *report_table(outcomes), ""]))
    caught = sum(FAULTS[name].is_caught(broken) for name, broken in matrix().items())
    clean = [by_fault[None].state for by_fault in outcomes.values()]
    faulty = [{one.state for fault, one in by_fault.items() if fault} for by_fault in outcomes.values()]
    reproduced, wrongly = faulty.count({"reproduced"}), len(clean) - clean.count("not_reproduced")
    print(
        f"{caught} of {len(FAULTS)} faults caught; {reproduced} of {len(outcomes)} reports reproduced by "
        f"their fault, and {wrongly or 'none'} by the clean planner"
    )
    return int(caught < len(FAULTS) or reproduced < len(outcomes) or wrongly > 0)


if __name__ == "__main__":
    sys.exit(main())
