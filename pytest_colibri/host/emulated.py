"""A machine that is not here: the recordings of its profile, read by the parsers of the live probes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from pytest_colibri.errors import UsageError
from pytest_colibri.host.amdgpu import parse_drm
from pytest_colibri.host.apple import parse_system_profiler
from pytest_colibri.host.cpus import parse_cim_cores, parse_lscpu, parse_mac_cores
from pytest_colibri.host.devices import combine
from pytest_colibri.host.hipinfo import parse_hipinfo
from pytest_colibri.host.jetson import parse_device_tree
from pytest_colibri.host.memory import NO_CGROUP, parse_cgroup, parse_cim, parse_meminfo, parse_vm_stat
from pytest_colibri.host.model import Accelerator, Host, Memory, Processor
from pytest_colibri.host.nvidia import parse_nvidia_smi
from pytest_colibri.host.rocm_smi import parse_rocm_smi
from pytest_colibri.host.vulkan import parse_vulkan
from pytest_colibri.profiles.model import Profile, Recording, Tool
from pytest_colibri.units import Figure, smallest


def emulate_host(profile: Profile) -> Host:
    """Return the machine that the recordings of a profile show; what none of them shows is unknown.

    Notes tell the provenance of each recording. Raises UsageError for a profile without recordings, with two
    of one tool, or with recordings of nonsense: one line for each, with its place.
    """
    if not profile.recordings:
        raise UsageError(
            f"{profile.path}: profile {profile.name} has no recordings, so it cannot be emulated"
        )
    texts: dict[str, str] = {recording.tool: recording.text for recording in profile.recordings}
    if len(texts) < len(profile.recordings):
        raise UsageError(f"{profile.path}: a tool has two recordings; give one of each")
    nonsense = [
        f"{recording.place or profile.path}: recording of {fault}"
        for recording in profile.recordings
        if (fault := _fault(recording))
    ]
    if nonsense:
        raise UsageError("\n".join(nonsense))
    memory = _memory(texts)
    accelerators, doubts = _accelerators(texts, memory)
    return Host(
        kind="emulated",
        system=next(iter(profile.match.systems), "unknown"),
        architecture=next(iter(profile.match.architectures), "unknown"),
        memory=memory,
        processor=_processor(texts),
        accelerators=accelerators,
        notes=(*map(_provenance, profile.recordings), *doubts),
    )


def _memory(texts: Mapping[str, str]) -> Memory:
    unknown = Figure(None, "no recording of the memory")
    total, available = unknown, unknown
    if "meminfo" in texts:
        total, available = parse_meminfo(texts["meminfo"])
    elif "vm_stat" in texts:
        total, available = parse_vm_stat(texts["vm_stat"])
    if available.bytes is None and "cim" in texts:
        # The meminfo of MSYS2 does not tell what is available; Windows itself does.
        total, available = parse_cim(texts["cim"])
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
    if "cim" in texts:
        return parse_cim_cores(texts["cim"])
    return Processor(1, 1, "no recording", "no recording tells the number of cores; 1 is taken")


def _accelerators(
    texts: Mapping[str, str], memory: Memory
) -> tuple[tuple[Accelerator, ...], tuple[str, ...]]:
    parsers = _device_parsers(memory.total)
    found = {tool: parse(texts[tool]) if tool in texts else () for tool, parse in parsers.items()}
    amd, doubts = combine(found["rocm-smi"] or found["hipinfo"], found["amd-sysfs"])
    cuda = found["nvidia-smi"] or found["device-tree"]
    return (*found["vulkan"], *cuda, *amd, *found["system_profiler"]), doubts


def _device_parsers(memory_total: Figure) -> Mapping[Tool, Callable[[str], tuple[Accelerator, ...]]]:
    return {
        "vulkan": parse_vulkan,
        "nvidia-smi": parse_nvidia_smi,
        "device-tree": parse_device_tree,
        "rocm-smi": parse_rocm_smi,
        "amd-sysfs": parse_drm,
        "hipinfo": parse_hipinfo,
        "system_profiler": partial(parse_system_profiler, memory_total=memory_total),
    }


_PARSERS: Mapping[Tool, tuple[Callable[[str], object], ...]] = {
    "meminfo": (parse_meminfo,),
    "cgroup-v1": (partial(parse_cgroup, version=1),),
    "cgroup-v2": (partial(parse_cgroup, version=2),),
    "vm_stat": (parse_vm_stat, parse_mac_cores),
    "cim": (parse_cim, parse_cim_cores),
    "lscpu": (parse_lscpu,),
    **{tool: (parse,) for tool, parse in _device_parsers(Figure(None, "not asked")).items()},
}


def _fault(recording: Recording) -> str | None:
    """Return what is wrong with a recording, by its tool: it is refused, or tells nothing at all."""
    try:
        told = [parse(recording.text) for parse in _PARSERS[recording.tool]]
    except UsageError as error:
        return str(error)
    return None if _tells_anything(told) else f"{recording.tool}: no probe can read anything from it"


def _tells_anything(told: object) -> bool:
    if isinstance(told, Figure):
        return told.bytes is not None or told is NO_CGROUP
    if isinstance(told, Processor):
        return told.note is None
    return any(map(_tells_anything, told)) if isinstance(told, (list, tuple)) else True


def _provenance(recording: Recording) -> str:
    link = f", {recording.link}" if recording.link else ""
    return f"{recording.tool}: {recording.provenance}{link}"
