"""Physical devices: each counted once, whichever interfaces, drivers and tools show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from pytest_colibri.host.figures import agreed
from pytest_colibri.host.model import Accelerator, DeviceIdentity
from pytest_colibri.profiles.model import DeviceType
from pytest_colibri.units import Figure

_BEST_TYPE_FIRST: tuple[DeviceType, ...] = ("discrete", "integrated", "virtual", "other", "cpu")


@dataclass(frozen=True)
class PhysicalDevice:
    """One card or chip. ``views`` are what interfaces and drivers show of it, the most telling first.

    ``total`` and ``free`` are the smallest figures of the views. ``doubts`` are sentences on what the views
    contradict each other in.
    """

    views: tuple[Accelerator, ...]
    total: Figure
    free: Figure
    doubts: tuple[str, ...] = ()

    @property
    def is_software(self) -> bool:
        """Whether this is the CPU, which drivers such as llvmpipe show as a device."""
        return self.views[0].is_software

    def through(self, api: str) -> Accelerator | None:
        """Return the device as an interface shows it, None where it does not."""
        return next((view for view in self.views if view.identity.api == api), None)


def device_rank(device: Accelerator) -> tuple[int, bool, int]:
    """Return a key that sorts the best device first: discrete before integrated, then the larger."""
    size = device.total.bytes
    return _BEST_TYPE_FIRST.index(device.type), size is None, -(size or 0)


def physical_devices(accelerators: Sequence[Accelerator]) -> tuple[PhysicalDevice, ...]:
    """Join the views of each device, and return the devices with the best first.

    Views are joined by PCI address, else by UUID. A view with neither belongs to the only device of its
    vendor and type that another interface shows. What one driver lists twice without a PCI address is two
    devices, even under one UUID: such a UUID tells a model. All software devices are the CPU.
    """
    same = _Sameness(accelerators)
    groups: list[list[Accelerator]] = []
    for accelerator in accelerators:
        for group in groups:
            answers = [same(accelerator, view) for view in group]
            if True in answers and False not in answers:
                group.append(accelerator)
                break
        else:
            groups.append([accelerator])
    joined = [_joined(sorted(group, key=device_rank)) for group in groups]
    return tuple(sorted(joined, key=lambda device: device_rank(device.views[0])))


def combine(
    first: Sequence[Accelerator], second: Sequence[Accelerator]
) -> tuple[tuple[Accelerator, ...], tuple[str, ...]]:
    """Return the devices that two tools show of one interface, each once, and notes on what they doubt.

    Names come from the first tool, a PCI address, type or figure that it lacks from the second. Where both
    give a figure, the smaller is taken.
    """
    only = len(first) == len(second) == 1
    notes: list[str] = []
    found, rest = [], list(second)
    for device in first:
        twin = next((other for other in rest if only or _same_card(device.identity, other.identity)), None)
        if twin is not None:
            rest.remove(twin)
            device, doubts = _completed(device, twin)
            notes += doubts
        found.append(device)
    if rest and not all(device.identity.pci for device in first):
        notes.append(f"without PCI addresses, {len(rest)} more of another tool cannot be told from these")
        rest = []
    return (*found, *rest), tuple(notes)


class _Sameness:
    """Tells whether two views show one device; None where nothing tells."""

    def __init__(self, accelerators: Sequence[Accelerator]) -> None:
        self._of_kind = Counter(map(self._kind, accelerators))

    def __call__(self, one: Accelerator, other: Accelerator) -> bool | None:
        if one.is_software or other.is_software:
            return one.is_software and other.is_software
        a, b = one.identity, other.identity
        one_list = (a.api, one.driver) == (b.api, other.driver)
        other_uuid = a.uuid is not None and b.uuid is not None and a.uuid != b.uuid
        if a.pci is not None and b.pci is not None:
            # Slices of one card share its address.
            return a.pci == b.pci and not (one_list and other_uuid)
        if one_list or other_uuid:
            return False
        if a.uuid is not None and b.uuid is not None:
            return True
        return True if self._are_alone(one, other) else None

    def _are_alone(self, one: Accelerator, other: Accelerator) -> bool:
        kinds = self._kind(one), self._kind(other)
        return kinds[0][1:] == kinds[1][1:] and all(self._of_kind[kind] == 1 for kind in kinds)

    @staticmethod
    def _kind(device: Accelerator) -> tuple[str, str, DeviceType]:
        return device.identity.api, device.vendor, device.type


def _joined(views: Sequence[Accelerator]) -> PhysicalDevice:
    total, total_doubts = _fold(views, "total", lambda view: view.total)
    free, free_doubts = _fold(views, "free", lambda view: view.free)
    return PhysicalDevice(tuple(views), total, free, (*_differences(views), *total_doubts, *free_doubts))


def _fold(
    views: Sequence[Accelerator], what: str, figure_of: Callable[[Accelerator], Figure]
) -> tuple[Figure, list[str]]:
    figure, doubts = figure_of(views[0]), []
    for view in views[1:]:
        figure, doubt = agreed(figure, figure_of(view))
        if doubt:
            doubts.append(f"{views[0].identity.name}: {what} {doubt}")
    return figure, doubts


def _differences(views: Sequence[Accelerator]) -> Iterator[str]:
    """Yield where the views name different architectures or types of one device."""
    for what, words in (
        ("processor", {view.processor: view.describe() for view in views if view.processor}),
        ("type", {view.type: view.describe() for view in views if view.type not in ("virtual", "other")}),
    ):
        if len(words) > 1:
            named = " and ".join(f"{word} by {view}" for word, view in words.items())
            yield f"{views[0].identity.name}: its {what} is given as {named}"


def _same_card(one: DeviceIdentity, other: DeviceIdentity) -> bool:
    if one.pci is not None and other.pci is not None:
        return one.pci == other.pci
    return one.uuid is not None and one.uuid == other.uuid


def _completed(device: Accelerator, twin: Accelerator) -> tuple[Accelerator, tuple[str, ...]]:
    views = (device, twin)
    total, total_doubts = _fold(views, "total", lambda view: view.total)
    free, free_doubts = _fold(views, "free", lambda view: view.free)
    kind = twin if device.pool is None else device
    identity = replace(
        device.identity,
        uuid=device.identity.uuid or twin.identity.uuid,
        pci=device.identity.pci or twin.identity.pci,
    )
    completed = replace(device, identity=identity, type=kind.type, pool=kind.pool, total=total, free=free)
    return completed, (*total_doubts, *free_doubts)
