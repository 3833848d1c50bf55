"""What a planner states: a plan of version 2 (``docs/planner-protocol.md``), read without trusting it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pytest_colibri.errors import ColibriError
from pytest_colibri.host.tools import printable

Kind = TypeVar("Kind")

MAX_COUNT = 2**63
MAX_ITEMS = 10_000
LONGEST_LINE = 2000


class BadPlan(ColibriError):
    """A plan that says something of the wrong kind: names the key and what is allowed there."""


@dataclass(frozen=True)
class DeviceStatement:
    """One device of a plan; None is what the plan does not state, or states to be unknown (bytes).

    ``number`` is the engine's own number for the device. ``usable_bytes`` is what the plan takes for free,
    less a reserve; ``budget_bytes`` is for experts, ``resident_bytes`` for what else lies there.
    """

    number: int | None
    name: str
    unified: bool | None
    total_bytes: int | None
    free_bytes: int | None
    reserve_bytes: int | None
    usable_bytes: int | None
    budget_bytes: int | None
    resident_bytes: int | None


@dataclass(frozen=True)
class PlanStatement:
    """The figures of a plan (bytes); None where the plan does not state one, or states it to be unknown.

    Every plan states its two budgets and its devices, and whether it knows ``limit_bytes``.
    ``limit_bytes`` is what the plan takes for available RAM, ``cache_bytes`` the RAM for experts of which
    ``warm_bytes`` are filled, ``hot_bytes`` the experts on devices (``hot_count`` of them), ``cold_bytes``
    those on the disk. ``slots_per_layer`` is the cap, ``context`` the tokens that were planned for.
    ``environment`` is what an engine gets, ``steps`` maps the lines of the sum to bytes.
    ``hot_experts`` are (layer, expert) pairs in rank order, which the JSON form does not carry.
    """

    limit_bytes: int | None
    ram_budget_bytes: int
    dense_bytes: int | None
    runtime_bytes: int | None
    cache_bytes: int | None
    warm_bytes: int | None
    slots_per_layer: int | None
    devices: tuple[DeviceStatement, ...]
    vram_budget_bytes: int
    resident_bytes: int | None
    hot_bytes: int | None
    hot_count: int | None
    cold_bytes: int | None
    disk_bytes: int | None
    expert_bytes: int | None
    bytes_per_slot: int | None
    physical_cores: int | None
    sockets: int | None
    hit_rate: float | None
    bottleneck: str | None
    context: int | None
    policy: str | None
    quality_preserving: bool | None
    warnings: tuple[str, ...]
    environment: Mapping[str, str]
    steps: Mapping[str, int | None] = field(default_factory=dict)
    hot_experts: tuple[tuple[int, int], ...] | None = None


def read_plan(plan: Mapping[str, object], environment: Mapping[str, str]) -> PlanStatement:
    """Read a plan of version 2; raises BadPlan for a value of another kind, and for one that must be there.

    Without budgets and devices a plan promises nothing, and could not be false.
    """
    document = _Section(plan, "plan")
    tiers = document.section("tiers")
    ram, vram, disk = tiers.section("ram"), tiers.section("vram"), tiers.section("disk")
    model, cpu, policy = document.section("model"), document.section("cpu"), document.section("policy")
    ram.require("available_bytes")
    vram.require("devices")
    return PlanStatement(
        limit_bytes=ram.size("available_bytes"),
        ram_budget_bytes=ram.stated("budget_bytes", ram.size("budget_bytes")),
        dense_bytes=ram.count("dense_bytes"),
        runtime_bytes=ram.count("runtime_bytes"),
        cache_bytes=ram.count("expert_cache_bytes"),
        warm_bytes=ram.count("warm_expert_bytes"),
        slots_per_layer=ram.count("cache_slots_per_layer"),
        devices=tuple(_device(item) for item in vram.sections("devices")),
        vram_budget_bytes=vram.stated("budget_bytes", vram.count("budget_bytes")),
        resident_bytes=vram.size("resident_bytes"),
        hot_bytes=vram.count("hot_expert_bytes"),
        hot_count=vram.count("expert_capacity"),
        cold_bytes=disk.count("cold_expert_bytes"),
        disk_bytes=disk.count("available_bytes"),
        expert_bytes=model.count("expert_bytes"),
        bytes_per_slot=model.count("per_cap_bytes"),
        physical_cores=cpu.count("physical_cores"),
        sockets=cpu.count("sockets"),
        hit_rate=document.number("projected_hit_rate"),
        bottleneck=document.text("bottleneck_class"),
        context=document.section("request").count("context"),
        policy=policy.text("name"),
        quality_preserving=policy.switch("quality_preserving"),
        warnings=document.texts("warnings"),
        environment=environment,
        steps={str(step.text("name")): step.count("bytes") for step in document.sections("steps")},
    )


def _device(item: _Section) -> DeviceStatement:
    return DeviceStatement(
        number=item.count("index"),
        name=item.text("name") or "a device without a name",
        unified=item.switch("unified_memory"),
        total_bytes=item.size("total_bytes"),
        free_bytes=item.size("free_bytes"),
        reserve_bytes=item.size("reserve_bytes"),
        usable_bytes=item.size("usable_bytes"),
        budget_bytes=item.count("budget_bytes"),
        resident_bytes=item.size("resident_bytes"),
    )


class _Section:
    """An object inside a plan, with its place for errors; a missing one is empty."""

    def __init__(self, values: object, place: str) -> None:
        if values is None:
            values = {}
        if not isinstance(values, Mapping):
            raise BadPlan(f"{place}: {_shown(values)} is no object")
        self._values, self._place = values, place

    def section(self, key: str) -> _Section:
        return _Section(self._values.get(key), f"{self._place}.{printable(key)}")

    def sections(self, key: str) -> list[_Section]:
        place = f"{self._place}.{key}"
        return [_Section(item, f"{place}[{index}]") for index, item in enumerate(self._list(key))]

    def texts(self, key: str) -> tuple[str, ...]:
        lines = self._list(key)
        if not all(isinstance(line, str) for line in lines):
            raise BadPlan(f"{self._place}.{key}: {_shown(lines)} is no list of texts")
        return tuple(printable(str(line), LONGEST_LINE) for line in lines)

    def require(self, key: str) -> None:
        if key not in self._values:
            raise BadPlan(f"{self._place}.{key} is missing; every plan has it")

    def stated(self, key: str, value: Kind | None) -> Kind:
        if value is None:
            raise BadPlan(f"{self._place}.{key} is missing; every plan states it")
        return value

    def size(self, key: str) -> int | None:
        return self._value(key, _is_size, "a whole number of at least 0, or null", int)

    def count(self, key: str) -> int | None:
        return self._value(key, _is_count, "a whole number, or null", int)

    def number(self, key: str) -> float | None:
        return self._value(key, _is_number, "a number, or null", float)

    def text(self, key: str) -> str | None:
        return self._value(key, lambda value: isinstance(value, str), "a text, or null", printable)

    def switch(self, key: str) -> bool | None:
        return self._value(key, lambda value: isinstance(value, bool), "true, false or null", bool)

    def _list(self, key: str) -> list[object]:
        items = self._values.get(key)
        if items is None:
            return []
        if not isinstance(items, list) or len(items) > MAX_ITEMS:
            raise BadPlan(f"{self._place}.{key}: {_shown(items)} is no list of at most {MAX_ITEMS}")
        return items

    def _value(
        self, key: str, fits: Callable[[object], bool], allowed: str, kind: Callable[[Any], Kind]
    ) -> Kind | None:
        value = self._values.get(key)
        if value is None:
            return None
        if not fits(value):
            raise BadPlan(f"{self._place}.{key}: {_shown(value)} is not allowed; {allowed}")
        return kind(value)


def _is_number(value: object) -> bool:
    """Tell whether a value is a number of sense; JSON allows 1e999, which is read as infinite."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MAX_COUNT


def _is_count(value: object) -> bool:
    """Tell whether a value counts something; planners in other languages write whole numbers as floats."""
    if type(value) is int or (isinstance(value, float) and value.is_integer()):
        return abs(value) < MAX_COUNT
    return False


def _is_size(value: object) -> bool:
    return _is_count(value) and isinstance(value, (int, float)) and value >= 0


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
