"""The counters that the agent leaves in a shared file, and what they amount to.

The layout is that of ``Counters`` in ``counters.c``. A file belongs to one process image: an engine that
executes itself anew, or forks, leaves several, which are added up by device, phase and shader.
"""

from __future__ import annotations

import ctypes
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
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
    _fields_ = (("text", ctypes.c_char * 248),)


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
        ("markers", ctypes.c_uint32),
        ("counts", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
        ("device", _Device * 16),
        ("shader", (ctypes.c_ubyte * 32) * 1024),
        ("window", _Window * 4096),
        ("marker", ctypes.c_uint32 * 65536),
        ("count", _Count * 65536),
    )


SIZE_BYTES = ctypes.sizeof(_Counters)


@dataclass(frozen=True)
class PhaseMarkers:
    """How an engine says on standard output where it is. ``prefixes`` are the first bytes of a write that
    marks a phase; ``read`` gives the phase of such a marker and ``begin`` or ``end``, None for no phase."""

    prefixes: tuple[str, ...]
    read: Callable[[str], tuple[str, str] | None]


def _read_event(marker: str) -> tuple[str, str] | None:
    try:
        event = json.loads(marker.split("\n", 1)[0])
        return str(event["phase"]), str(event["state"])
    except (ValueError, KeyError, TypeError):
        return None


PROTOCOL_MARKERS = PhaseMarkers(prefixes=('{"event":"phase",',), read=_read_event)


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
    files: Iterable[Path], markers: PhaseMarkers, witness: str, losses: Iterable[str] = ()
) -> DispatchEvidence:
    """Add up what the process images of one run left in ``files``, each of SIZE_BYTES.

    ``losses`` say what else is known to be missing from the counts.
    """
    images = [_Counters.from_buffer_copy(file.read_bytes()) for file in files]
    lost = [*losses, *(text for image in images for bit, text in _LOST.items() if image.lost & bit)]
    one_of = one_identity_per_device(_identity(device) for image in images for device in _devices(image))
    totals: dict[DeviceIdentity, _DeviceTotals] = {}
    allocating: Counter[DeviceIdentity] = Counter()
    for image in images:
        identities = [one_of[_identity(device)] for device in _devices(image)]
        for identity, device in zip(identities, _devices(image), strict=True):
            total = totals.setdefault(identity, _DeviceTotals(_device_type(device)))
            allocating[identity] += _add_memory(total, device)
        for phase, slot, shader, count in _counts(image, markers):
            _add_count(totals[identities[slot]], phase, shader, count)
    partial_peaks = [
        f"{shares} processes or instances allocated on {identity.name}; its peak is that of the largest"
        for identity, shares in allocating.items()
        if shares > 1
    ]
    return DispatchEvidence(
        witness=witness,
        devices=tuple(total.evidence(device) for device, total in totals.items()),
        notes=tuple(dict.fromkeys([*lost, *partial_peaks])),
        phases_seen=_phases_seen(images, markers),
        complete=not lost,
    )


def one_identity_per_device(seen: Iterable[DeviceIdentity]) -> dict[DeviceIdentity, DeviceIdentity]:
    """Map each identity under which a device was seen to the fullest one, the same for all of one device.

    A process may see one device twice, once with less: instances of an old API version tell no UUID, and
    only an enumeration tells the index. One that fits several devices stays apart.
    """
    fullest: list[DeviceIdentity] = []
    place_of: dict[DeviceIdentity, int] = {}
    for identity in sorted(dict.fromkeys(seen), key=lambda one: one.uuid is None):
        fitting = [place for place, known in enumerate(fullest) if _may_be_one_device(identity, known)]
        if len(fitting) == 1:
            (place,) = fitting
            fullest[place] = _fuller(fullest[place], identity)
        else:
            place = len(fullest)
            fullest.append(identity)
        place_of[identity] = place
    return {identity: fullest[place] for identity, place in place_of.items()}


def _may_be_one_device(one: DeviceIdentity, other: DeviceIdentity) -> bool:
    if one.same_device(other):
        return True
    comparable = None not in (one.uuid, other.uuid) or None not in (one.pci, other.pci)
    return not comparable and one.name == other.name and -1 in (one.index, other.index)


def _fuller(one: DeviceIdentity, other: DeviceIdentity) -> DeviceIdentity:
    return replace(
        one,
        index=other.index if one.index == -1 else one.index,
        uuid=one.uuid or other.uuid,
        pci=one.pci or other.pci,
    )


def _devices(counters: _Counters) -> list[_Device]:
    return list(counters.device[: counters.devices])


def _phases_seen(images: list[_Counters], markers: PhaseMarkers) -> tuple[tuple[str, str], ...]:
    """Give the markers in their order, only of process images that counted work if there is one: what others
    write puts no count into a phase."""
    counting = [image for image in images if image.counts] or images
    return tuple(
        marker
        for image in counting
        for window in image.marker[: image.markers]
        if (marker := _marker(image.window[window], markers)) is not None
    )


def _marker(window: _Window, markers: PhaseMarkers) -> tuple[str, str] | None:
    return markers.read(window.text.decode(errors="replace"))


def _counts(counters: _Counters, markers: PhaseMarkers) -> Iterator[tuple[str, int, str | None, _Count]]:
    """Give phase, device slot, shader (None for submits) and figures of every count of one process image."""
    opened = [None, *(_marker(window, markers) for window in counters.window[1 : counters.windows])]
    phases = [marker[0] if marker is not None and marker[1] == "begin" else OUTSIDE for marker in opened]
    for count in counters.count[: counters.counts]:
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
