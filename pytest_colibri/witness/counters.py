"""The counters that the agent leaves in a shared file, and what they amount to.

The layout is that of ``Counters`` in ``counters.c``. A file belongs to one process image: an engine that
executes itself anew, or forks, leaves several, which are added up by device, phase and shader.
"""

from __future__ import annotations

import ctypes
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pytest_colibri.host.model import DeviceIdentity
from pytest_colibri.profiles.model import DeviceType
from pytest_colibri.witness.evidence import (
    DeviceDispatch,
    DispatchEvidence,
    PhaseCounts,
    ShaderCount,
)

OUTSIDE = "outside"
UNKNOWN_SHADER = "unknown"

_UNKNOWN = 0xFFFFFFFF
_SUBMITS = 0xFFFFFFFE
_DEVICE_TYPES: tuple[DeviceType, ...] = ("other", "integrated", "discrete", "virtual", "cpu")
_LOST = {
    1: "more devices than the witness has room for: some work is not in these counts",
    2: "more shaders than the witness has room for: the rest is counted as 'unknown'",
    4: "more phase markers than the witness has room for: later work is counted as 'outside'",
    8: "more combinations of device, phase and shader than the witness has room for: some work is missing",
}


class _Device(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 256),
        ("uuid", ctypes.c_ubyte * 16),
        ("index", ctypes.c_uint32),
        ("type", ctypes.c_uint32),
        ("pci", ctypes.c_uint32 * 4),
        ("allocated", ctypes.c_uint64 * 32),
        ("live", ctypes.c_uint64 * 32),
        ("peak", ctypes.c_uint64 * 32),
    )


class _Window(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint32), ("padding", ctypes.c_uint32), ("text", ctypes.c_ubyte * 248))


class _Count(ctypes.Structure):
    _fields_ = (
        ("device", ctypes.c_uint32),
        ("window", ctypes.c_uint32),
        ("shader", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
        ("recorded", ctypes.c_uint64),
        ("executed", ctypes.c_uint64),
    )


class _Counters(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_uint32),
        ("lost", ctypes.c_uint32),
        ("devices", ctypes.c_uint32),
        ("shaders", ctypes.c_uint32),
        ("windows", ctypes.c_uint32),
        ("counts", ctypes.c_uint32),
        ("device", _Device * 16),
        ("shader", (ctypes.c_ubyte * 32) * 1024),
        ("window", _Window * 4096),
        ("count", _Count * 65536),
    )


SIZE_BYTES = ctypes.sizeof(_Counters)


@dataclass(frozen=True)
class PhaseMarkers:
    """How an engine says where it is. ``prefixes`` are the first bytes of a write that marks a phase;
    ``phase_after`` tells which phase such a marker opens, ``outside`` when it closes one."""

    prefixes: tuple[str, ...]
    phase_after: Callable[[str], str]


def _phase_after_event(marker: str) -> str:
    try:
        event = json.loads(marker.split("\n", 1)[0])
        return str(event["phase"]) if event["state"] == "begin" else OUTSIDE
    except (ValueError, KeyError, TypeError):
        return OUTSIDE


PROTOCOL_MARKERS = PhaseMarkers(prefixes=('{"event":"phase",',), phase_after=_phase_after_event)


@dataclass
class _DeviceTotals:
    type: DeviceType
    recorded: Counter[tuple[str, str]] = field(default_factory=Counter)
    executed: Counter[tuple[str, str]] = field(default_factory=Counter)
    submits: Counter[str] = field(default_factory=Counter)
    allocated: Counter[int] = field(default_factory=Counter)
    peak: Counter[int] = field(default_factory=Counter)

    def evidence(self, device: DeviceIdentity) -> DeviceDispatch:
        """Freeze the totals, phases and shaders in the order in which they first appeared."""
        phases = dict.fromkeys([*(phase for phase, _ in self.recorded), *self.submits])
        return DeviceDispatch(
            device=device,
            type=self.type,
            phases=tuple(PhaseCounts(phase, self._shaders(phase), self.submits[phase]) for phase in phases),
            allocated_bytes=dict(self.allocated),
            peak_bytes=dict(self.peak),
        )

    def _shaders(self, phase: str) -> tuple[ShaderCount, ...]:
        return tuple(
            ShaderCount(shader, self.recorded[key], self.executed[key])
            for key in self.recorded
            for shader in (key[1],)
            if key[0] == phase
        )


def read_evidence(
    files: Iterable[Path], markers: PhaseMarkers, witness: str, notes: Iterable[str] = ()
) -> DispatchEvidence:
    """Add up what the process images of one run left in ``files``, each of SIZE_BYTES."""
    totals: dict[DeviceIdentity, _DeviceTotals] = {}
    allocating: Counter[DeviceIdentity] = Counter()
    all_notes = dict.fromkeys(notes)
    for file in files:
        counters = _Counters.from_buffer_copy(file.read_bytes())
        all_notes.update(dict.fromkeys(text for bit, text in _LOST.items() if counters.lost & bit))
        devices = [_identity(counters.device[slot]) for slot in range(counters.devices)]
        for slot, identity in enumerate(devices):
            device = counters.device[slot]
            total = totals.setdefault(identity, _DeviceTotals(_device_type(device)))
            allocating[identity] += _add_memory(total, device)
        for phase, slot, shader, count in _counts(counters, markers):
            _add_count(totals[devices[slot]], phase, shader, count)
    for identity, images in allocating.items():
        if images > 1:
            all_notes[f"{images} processes allocated on {identity.name}; its peak is that of the largest"] = (
                None
            )
    evidence = tuple(total.evidence(device) for device, total in totals.items())
    return DispatchEvidence(witness=witness, devices=evidence, notes=tuple(all_notes))


def _counts(counters: _Counters, markers: PhaseMarkers) -> Iterator[tuple[str, int, str | None, _Count]]:
    """Give phase, device slot, shader (None for submits) and figures of every count of one process image."""
    phases = [OUTSIDE]
    for slot in range(1, counters.windows):
        window = counters.window[slot]
        text = bytes(window.text[: window.length]).decode(errors="replace")
        phases.append(markers.phase_after(text))
    for slot in range(counters.counts):
        count = counters.count[slot]
        yield phases[count.window], count.device, _shader(counters, count.shader), count


def _shader(counters: _Counters, slot: int) -> str | None:
    if slot == _SUBMITS:
        return None
    return UNKNOWN_SHADER if slot == _UNKNOWN else bytes(counters.shader[slot]).hex()


def _add_count(total: _DeviceTotals, phase: str, shader: str | None, count: _Count) -> None:
    if shader is None:
        total.submits[phase] += count.executed
    else:
        total.recorded[phase, shader] += count.recorded
        total.executed[phase, shader] += count.executed


def _add_memory(total: _DeviceTotals, device: _Device) -> bool:
    """Add the allocations by memory type; tell whether there were any."""
    used = [kind for kind, amount in enumerate(device.allocated) if amount]
    for kind in used:
        total.allocated[kind] += device.allocated[kind]
        total.peak[kind] = max(total.peak[kind], device.peak[kind])
    return bool(used)


def _identity(device: _Device) -> DeviceIdentity:
    domain, bus, slot, function = device.pci
    return DeviceIdentity(
        api="vulkan",
        index=-1 if device.index == _UNKNOWN else device.index,
        name=device.name.decode(errors="replace"),
        uuid=bytes(device.uuid).hex() if any(device.uuid) else None,
        pci=None if domain == _UNKNOWN else f"{domain:04x}:{bus:02x}:{slot:02x}.{function:x}",
    )


def _device_type(device: _Device) -> DeviceType:
    return _DEVICE_TYPES[device.type] if device.type < len(_DEVICE_TYPES) else "other"
