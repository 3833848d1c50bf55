"""What the doctor finds about an engine's binary, which it reads as a file and never runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_colibri.findings import Finding, few
from pytest_colibri.host.devices import PhysicalDevice, physical_devices
from pytest_colibri.host.elf import Elf, NotElf, names_any, read_elf
from pytest_colibri.host.libraries import missing_libraries, this_loader
from pytest_colibri.host.model import Host
from pytest_colibri.profiles.model import Backend

MAX_SCANNED_BYTES = 2**30


@dataclass(frozen=True)
class _Interface:
    """How a program reaches devices: libraries that it links, and functions that no use can do without."""

    backend: Backend
    title: str
    libraries: tuple[str, ...]
    functions: tuple[str, ...]


_INTERFACES = (
    _Interface("vulkan", "Vulkan", ("libvulkan.so",), ("vkCreateInstance", "vkGetInstanceProcAddr")),
    _Interface(
        "cuda",
        "CUDA",
        ("libcuda.so", "libcudart.so", "libcublas.so", "libcublasLt.so"),
        ("cuInit", "cudaMalloc", "cudaGetDeviceCount", "cudaLaunchKernel"),
    ),
    _Interface(
        "rocm",
        "ROCm",
        ("libamdhip64.so", "libhipblas.so", "librocblas.so", "libhsa-runtime64.so"),
        ("hipInit", "hipMalloc", "hipGetDeviceCount", "hipLaunchKernel"),
    ),
)


def engine_findings(path: Path, host: Host, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what can be told of a binary: whether it starts here, and on which devices it can work."""
    try:
        program = read_elf(path)
    except NotElf as error:
        yield Finding("engine.binary", "unknown", f"{error}: libraries and backend cannot be told")
        return
    yield _binary(program, host)
    # The recordings of another machine do not tell its libraries.
    if host.kind == "live":
        yield _libraries(program, host, environment)
    yield from _backends(program, host)


def _binary(program: Elf, host: Host) -> Finding:
    check, built_for = "engine.binary", f"{program.architectures[0]}, {program.bits} bits"
    if {host.system, host.architecture} & {"unknown", ""}:
        return Finding(
            check,
            "unknown",
            f"built for Linux on {built_for}; which system and processor are here is unknown",
        )
    if host.system != "linux" or host.architecture not in program.architectures:
        return Finding(
            check,
            "failed",
            f"built for Linux on {built_for}, and this machine is {host.system} on {host.architecture}",
            remedy="take a binary for this machine, or build it here",
        )
    if not program.is_program:
        return Finding(check, "failed", "a shared library, which cannot be started by itself")
    if not os.access(program.path, os.X_OK):
        return Finding(check, "failed", "the file may not be executed", remedy="chmod +x")
    return Finding(check, "ok", f"a program for Linux on {built_for}")


def _libraries(program: Elf, host: Host, environment: Mapping[str, str]) -> Finding:
    check = "engine.libraries"
    if host.system != "linux" or host.architecture not in program.architectures:
        return Finding(check, "unknown", "the libraries of another kind of machine are not here")
    missing, doubt = missing_libraries(program, this_loader(environment))
    if not missing:
        linked = f"{len(program.needed)} linked libraries resolve, and what they need in turn"
        return Finding(check, "ok", linked if program.needed else "it links no library")
    names = few((f"{one.library} (needed by {one.needed_by})" for one in missing), len(missing))
    if doubt:
        return Finding(check, "unknown", f"not found: {names}; but {doubt}")
    return Finding(
        check,
        "failed",
        f"linked libraries that do not resolve: {names}",
        remedy="install the packages that bring them, or set LD_LIBRARY_PATH to their folder",
    )


def _backends(program: Elf, host: Host) -> Iterator[Finding]:
    devices = physical_devices(host.accelerators)
    built = [
        (interface, linked, named)
        for interface in _INTERFACES
        if (linked := _linked(program, interface)) | (named := _named(program, interface))
    ]
    for interface, linked, named in built:
        yield _backend(interface, linked, named, devices, host)
    if built:
        return
    gpus = [device.views[0].identity.name for device in devices if not device.is_software]
    titles = " or ".join(interface.title for interface in _INTERFACES)
    cpu_only = f"built for the CPU alone: it links no library and names no function of {titles}"
    if gpus:
        yield Finding(
            "engine.backend",
            "warning",
            f"{cpu_only}, and there is {few(gpus, len(gpus))}",
            remedy="build it for a backend that the GPU offers",
        )
    else:
        yield Finding("engine.backend", "ok", cpu_only)


def _linked(program: Elf, interface: _Interface) -> frozenset[str]:
    return frozenset(library for library in program.needed if library.startswith(interface.libraries))


def _named(program: Elf, interface: _Interface) -> frozenset[str]:
    return frozenset(names_any(program.path, interface.functions, MAX_SCANNED_BYTES))


def _backend(
    interface: _Interface,
    linked: frozenset[str],
    named: frozenset[str],
    devices: tuple[PhysicalDevice, ...],
    host: Host,
) -> Finding:
    check, title = "engine.backend", interface.title
    if not named:
        return Finding(
            check,
            "warning",
            f"it links {', '.join(sorted(linked))}, and names no function of {title} that any use needs: "
            "a build option may have no code behind it",
        )
    built_for = f"built for {title} ({', '.join(sorted(linked or named))})"
    seen = [device for device in devices if device.through(interface.backend)]
    gpus = [device for device in seen if not device.is_software]
    if gpus:
        names = [view.identity.name for device in gpus if (view := device.through(interface.backend))]
        return Finding(check, "ok", f"{built_for}, which shows {few(names, len(names))}")
    if seen:
        name = seen[0].views[0].identity.name
        return Finding(
            check,
            "warning",
            f"{built_for}, which shows only {name}, a CPU device: what runs there is no GPU work",
            remedy="install the driver of the GPU, where there is one",
        )
    return _without_device(built_for, title, devices, host)


def _without_device(built_for: str, title: str, devices: tuple[PhysicalDevice, ...], host: Host) -> Finding:
    others = [device.views[0].describe() for device in devices if not device.is_software]
    instead = f"; there is {few(others, len(others))}" if others else ""
    if host.kind == "emulated":
        return Finding(
            "engine.backend", "unknown", f"{built_for}; no recording shows a {title} device{instead}"
        )
    reasons = [note for note in host.notes if note.startswith(title)]
    return Finding(
        "engine.backend",
        "warning",
        f"{built_for}, and this machine has no {title} device{instead}",
        remedy="; ".join(reasons) or f"build it for a backend that the machine has, or install {title}",
    )
