"""A machine that is not here: the recordings of its profile, read by the parsers of the live probes."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_colibri.errors import UsageError
from pytest_colibri.host.amd import parse_rocm_smi
from pytest_colibri.host.apple import parse_system_profiler
from pytest_colibri.host.cpus import parse_lscpu, parse_mac_cores
from pytest_colibri.host.memory import parse_cgroup, parse_meminfo, parse_vm_stat
from pytest_colibri.host.model import Accelerator, Host, Memory, Processor
from pytest_colibri.host.nvidia import parse_nvidia_smi
from pytest_colibri.host.vulkan import parse_vulkan
from pytest_colibri.profiles.model import Profile, Recording
from pytest_colibri.units import Figure, smallest


def emulate_host(profile: Profile) -> Host:
    """Return the machine that the recordings of a profile show; what none of them shows is unknown.

    Notes tell the provenance of each recording. Raises UsageError for a profile without recordings, with two
    of one tool, or with one that its parser refuses.
    """
    if not profile.recordings:
        raise UsageError(
            f"{profile.path}: profile {profile.name} has no recordings, so it cannot be emulated"
        )
    texts: dict[str, str] = {recording.tool: recording.text for recording in profile.recordings}
    if len(texts) < len(profile.recordings):
        raise UsageError(f"{profile.path}: a tool has two recordings; give one of each")
    try:
        memory = _memory(texts)
        processor = _processor(texts)
        accelerators = _accelerators(texts, memory)
    except UsageError as error:
        raise UsageError(f"{profile.path}: recording of {error}") from error
    return Host(
        kind="emulated",
        system=next(iter(profile.match.systems), "unknown"),
        architecture=next(iter(profile.match.architectures), "unknown"),
        memory=memory,
        processor=processor,
        accelerators=accelerators,
        notes=tuple(_provenance(recording) for recording in profile.recordings),
    )


def _memory(texts: Mapping[str, str]) -> Memory:
    unknown = Figure(None, "no recording of the memory")
    total, available = unknown, unknown
    if "meminfo" in texts:
        total, available = parse_meminfo(texts["meminfo"])
    elif "vm_stat" in texts:
        total, available = parse_vm_stat(texts["vm_stat"])
    groups = []
    if "cgroup-v1" in texts:
        groups.append(parse_cgroup(texts["cgroup-v1"], 1))
    if "cgroup-v2" in texts:
        groups.append(parse_cgroup(texts["cgroup-v2"], 2))
    return Memory(total, available, smallest(*groups) if groups else Figure(None, "no recording of a cgroup"))


def _processor(texts: Mapping[str, str]) -> Processor:
    if "lscpu" in texts:
        return parse_lscpu(texts["lscpu"])
    if "vm_stat" in texts:
        return parse_mac_cores(texts["vm_stat"])
    return Processor(1, 1, "no recording", "no recording tells the number of cores; 1 is taken")


def _accelerators(texts: Mapping[str, str], memory: Memory) -> tuple[Accelerator, ...]:
    found: tuple[Accelerator, ...] = ()
    if "vulkan" in texts:
        found += parse_vulkan(texts["vulkan"])
    if "nvidia-smi" in texts:
        found += parse_nvidia_smi(texts["nvidia-smi"])
    if "rocm-smi" in texts:
        found += parse_rocm_smi(texts["rocm-smi"])
    if "system_profiler" in texts:
        found += parse_system_profiler(texts["system_profiler"], memory.total)
    return found


def _provenance(recording: Recording) -> str:
    link = f", {recording.link}" if recording.link else ""
    return f"{recording.tool}: {recording.provenance}{link}"
