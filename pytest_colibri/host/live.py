"""The machine that this runs on."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping

from pytest_colibri.host.amd import probe_amd
from pytest_colibri.host.apple import probe_apple
from pytest_colibri.host.cpus import probe_processor
from pytest_colibri.host.memory import probe_memory
from pytest_colibri.host.model import Accelerator, Host, Memory
from pytest_colibri.host.nvidia import probe_nvidia
from pytest_colibri.host.vulkan import probe_vulkan

_Found = tuple[tuple[Accelerator, ...], tuple[str, ...]]

_PROBES: Mapping[str, Callable[[Memory], _Found]] = {
    "vulkan": lambda _: probe_vulkan(),
    "cuda": lambda _: probe_nvidia(),
    "rocm": lambda _: probe_amd(),
    "metal": lambda memory: probe_apple(memory.total),
}
ALL_APIS = frozenset(_PROBES)


def probe_host(apis: frozenset[str]) -> Host:
    """Probe this machine; devices only through the interfaces in ``apis``, a part of ALL_APIS.

    An empty set, or ``cpu``, probes memory and cores only. The notes of the host tell what cannot be probed.
    """
    memory = probe_memory()
    found = [_PROBES[api](memory) for api in sorted(apis - {"cpu"})]
    return Host(
        kind="live",
        system=platform.system().lower(),
        architecture=platform.machine().lower(),
        memory=memory,
        processor=probe_processor(),
        accelerators=tuple(device for devices, _ in found for device in devices),
        notes=(*_surroundings(), *(note for _, notes in found for note in notes)),
    )


def _surroundings() -> tuple[str, ...]:
    if "microsoft" in platform.release().lower():
        return ("WSL: the memory is that of the virtual machine, of which .wslconfig sets the size",)
    return ()
