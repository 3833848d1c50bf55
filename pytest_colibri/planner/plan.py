"""A placement plan and the request it answers, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pytest_colibri.container.geometry import Geometry
from pytest_colibri.errors import ColibriError
from pytest_colibri.host.model import Accelerator, Host
from pytest_colibri.profiles.model import Backend
from pytest_colibri.units import Figure

Policy = Literal["quality", "balanced", "experimental-fast"]
KvType = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
Bottleneck = Literal["disk", "mixed", "compute"]

NOT_ASKED = Figure(None, "not asked")


@dataclass(frozen=True)
class PlanRequest:
    """What is to be planned. None means "choose"; an explicit figure is kept, clamped aloud, or refused.

    ``accelerators`` are the devices that may take experts (those that the profile names, never a CPU device
    taken for a GPU); empty for a CPU plan. ``ram_bytes`` and ``vram_bytes`` bound what is put into the RAM
    and onto the devices, ``slots_per_layer`` the RAM cache. ``context`` and ``prompt_width`` count tokens;
    each of ``kv_slots`` caches a whole context in ``kv_type``. ``usage`` maps (layer, expert) to how often it
    was used: the hot experts are taken in that order. ``environment`` holds the user's own variables, which
    win. ``disk_free`` is the free space of the model's file system.
    """

    geometry: Geometry
    host: Host
    backend: Backend
    accelerators: tuple[Accelerator, ...] = ()
    ram_bytes: int | None = None
    vram_bytes: int | None = None
    slots_per_layer: int | None = None
    context: int = 4096
    kv_slots: int = 1
    kv_type: KvType = "f32"
    prompt_width: int = 64
    policy: Policy = "balanced"
    usage: Mapping[tuple[int, int], int] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    disk_free: Figure = NOT_ASKED


@dataclass(frozen=True)
class DeviceShare:
    """What one device gives, in bytes. ``usable`` = free - reserve, or unknown.

    ``number`` is the engine's own number for the device, which a mask may have changed. ``budget_bytes`` is
    for experts; ``resident_bytes`` is what dense weights and attention take beside them.
    """

    accelerator: Accelerator
    number: int
    reserve_bytes: int
    usable: Figure
    budget_bytes: int
    resident_bytes: int

    @property
    def taken_bytes(self) -> int:
        """Everything that the plan puts on the device beside its reserve."""
        return self.budget_bytes + self.resident_bytes


@dataclass(frozen=True)
class Step:
    """One line of the sum that led to the plan, for ``plan --explain``."""

    name: str
    figure: Figure


@dataclass(frozen=True)
class Plan:
    """Which bytes live on which tier, and the environment that makes an engine do so.

    ``limit`` is the physical bound that the budgets must respect; ``unified`` says that the RAM and VRAM
    budgets share it; ``reserve_bytes`` is what the plan leaves of it. ``vram_budget_bytes`` is for experts;
    what else the devices hold stands in ``devices``. ``hot_experts`` are the (layer, expert)
    pairs of the VRAM tier in rank order, ``hot_bytes``, ``warm_bytes`` and ``cold_bytes`` the expert bytes of
    the three tiers. ``bottleneck`` is what bounds the run. ``tune`` maps a variable to (value, reason); names
    that start with ``_`` are hints and are never exported. ``steps`` hold every figure of the sum.
    """

    request: PlanRequest
    unified: bool
    limit: Figure
    reserve_bytes: int
    ram_budget_bytes: int
    dense_bytes: int
    runtime_bytes: int
    cache_bytes: int
    warm_bytes: int
    slots_per_layer: int
    devices: tuple[DeviceShare, ...]
    vram_budget_bytes: int
    hot_bytes: int
    hot_experts: tuple[tuple[int, int], ...]
    cold_bytes: int
    hit_rate: float
    bottleneck: Bottleneck
    tune: Mapping[str, tuple[str, str]]
    environment: Mapping[str, str]
    warnings: tuple[str, ...]
    steps: tuple[Step, ...]

    @property
    def resident_bytes(self) -> int:
        """What dense weights and attention take on the devices, beside the experts."""
        return sum(share.resident_bytes for share in self.devices)


class DoesNotFit(ColibriError):
    """The model cannot run within the limit: says by how many bytes, and why."""

    def __init__(self, missing_bytes: int, because: str) -> None:
        super().__init__(f"does not fit, by {missing_bytes} bytes, because {because}")
        self.missing_bytes = missing_bytes
        self.because = because
