"""The facts of a machine at run time, each with its source: *live* (probed here) or *emulated* (replayed)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pytest_colibri.profiles.model import DeviceType, Pool
from pytest_colibri.units import Figure, smallest


@dataclass(frozen=True)
class DeviceIdentity:
    """What tells one device from another: UUID first, then PCI address, then name and place in the list.

    ``uuid`` is 32 hexadecimal digits without dashes, ``pci`` is ``dddd:bb:dd.f`` in lower case; either may
    be None. ``index`` is the place in the enumeration of its ``api`` and is no identity by itself.
    """

    api: str
    index: int
    name: str
    uuid: str | None = None
    pci: str | None = None

    def same_device(self, other: DeviceIdentity) -> bool:
        """Tell whether both describe one device, by the strongest identity that both have."""
        if self.uuid is not None and other.uuid is not None:
            return self.uuid == other.uuid
        if self.pci is not None and other.pci is not None:
            return self.pci == other.pci
        return (self.name, self.index) == (other.name, other.index)


@dataclass(frozen=True)
class Heap:
    """One memory heap of a device; budget and usage of this process where the budget extension gives them."""

    index: int
    size_bytes: int
    device_local: bool
    budget_bytes: int | None = None
    usage_bytes: int | None = None


@dataclass(frozen=True)
class MemoryType:
    """One memory type of a device: the heap behind it and what may be done with it."""

    index: int
    heap: int
    device_local: bool
    host_visible: bool
    host_coherent: bool
    host_cached: bool


@dataclass(frozen=True)
class QueueFamily:
    """One queue family: how many queues, and whether they take compute, graphics and transfer work."""

    index: int
    count: int
    compute: bool
    graphics: bool
    transfer: bool


@dataclass(frozen=True)
class Accelerator:
    """A device as one programming interface shows it.

    ``vendor`` is ``intel``, ``amd``, ``nvidia``, ``apple``, ``qualcomm``, ``arm``, ``mesa`` (software) or
    ``0x....`` for one without a name here. ``pool`` is the physical memory behind it, None when unknown.
    ``total`` and ``free`` are what an engine may count on; for a unified pool they bound the share of the
    device, and never add to the RAM. ``processor`` is its architecture (``gfx1201``), None where the
    interface does not name it.
    """

    identity: DeviceIdentity
    vendor: str
    type: DeviceType
    driver: str
    pool: Pool | None
    total: Figure
    free: Figure
    heaps: tuple[Heap, ...] = ()
    memory_types: tuple[MemoryType, ...] = ()
    queue_families: tuple[QueueFamily, ...] = ()
    processor: str | None = None

    @property
    def is_software(self) -> bool:
        """Whether a CPU does its work (llvmpipe, SwiftShader): a CPU device, never a GPU."""
        return self.type == "cpu"

    def describe(self) -> str:
        """Name the device for a person, a CPU device as such."""
        kind = "CPU device, not a GPU" if self.is_software else f"{self.type} GPU"
        return f"{self.identity.name} ({kind}, {self.identity.api}, driver {self.driver})"


@dataclass(frozen=True)
class Memory:
    """The RAM: what there is, what is available now, and what a container's limit leaves of it.

    ``cgroup_available`` is the tightest limit of this process' control groups less what they use (without
    reclaimable file cache); unknown, with the reason as source, where no limit applies.
    """

    total: Figure
    available: Figure
    cgroup_available: Figure

    @property
    def limit(self) -> Figure:
        """The smaller of what the machine and the control group leave; unknown when neither is known."""
        return smallest(self.available, self.cgroup_available)


@dataclass(frozen=True)
class Processor:
    """The cores that count: ``physical_cores`` is at least 1; ``note`` says when it had to be guessed."""

    physical_cores: int
    sockets: int
    source: str
    note: str | None = None


@dataclass(frozen=True)
class Host:
    """One machine. ``notes`` tell what could not be probed and why (a missing driver, a hidden figure)."""

    kind: Literal["live", "emulated"]
    system: str
    architecture: str
    memory: Memory
    processor: Processor
    accelerators: tuple[Accelerator, ...]
    notes: tuple[str, ...] = ()
