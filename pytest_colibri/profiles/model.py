"""What a hardware profile says, as frozen values; the YAML form is described by ``schema.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Backend = Literal["cpu", "vulkan", "cuda", "rocm", "metal"]
DeviceType = Literal["discrete", "integrated", "virtual", "cpu", "other"]
Pool = Literal["unified", "discrete"]
Tier = Literal["vram", "ram", "disk"]
Provenance = Literal["recorded", "reported", "constructed"]
Tool = Literal[
    "meminfo",
    "cgroup-v1",
    "cgroup-v2",
    "vm_stat",
    "cim",
    "lscpu",
    "nvidia-smi",
    "device-tree",
    "rocm-smi",
    "amd-sysfs",
    "hipinfo",
    "vulkan",
    "system_profiler",
]


@dataclass(frozen=True)
class DeviceMatch:
    """What a device must be to fit a profile; an empty tuple or None asks for nothing.

    ``vendors`` and ``types`` list allowed values; ``names`` and ``drivers`` are shell patterns (``*``, ``?``)
    compared without case, of which one must match.
    """

    vendors: tuple[str, ...] = ()
    types: tuple[DeviceType, ...] = ()
    names: tuple[str, ...] = ()
    drivers: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostMatch:
    """What a machine must be to fit a profile; ``device`` is None for a profile without accelerator.

    ``systems`` and ``architectures`` hold names as ``platform.system()`` and ``platform.machine()`` give
    them, in lower case (``linux``, ``darwin``, ``windows``; ``x86_64``, ``aarch64``, ``arm64``).
    """

    systems: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    device: DeviceMatch | None = None


@dataclass(frozen=True)
class Recording:
    """The output of one tool on a machine of this kind, replayed when the host is emulated.

    ``text`` is the output as the tool wrote it. ``link`` names the public report of a ``reported`` one.
    ``place`` is where a profile gives it, as ``FILE:LINE:COLUMN``.
    """

    tool: Tool
    provenance: Provenance
    text: str
    link: str | None = None
    place: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Profile:
    """A machine that a reporter may have: how to recognise it, and what it is claimed to do.

    ``pool`` tells whether the accelerator shares the RAM: None without accelerator, and where the profile
    takes devices of either kind, since then the device decides. ``tiers`` are those that an engine is claimed
    to have there. ``environment`` holds variables for the engine, which win over what a planner exports.
    ``path`` is the file that the profile was read from. One that is not ``auto`` describes a single machine,
    and is taken by name only.
    """

    name: str
    title: str
    backend: Backend
    match: HostMatch
    pool: Pool | None
    tiers: tuple[Tier, ...]
    environment: Mapping[str, str]
    recordings: tuple[Recording, ...]
    path: Path
    auto: bool = True
