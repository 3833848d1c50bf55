"""What the doctor finds about a machine: memory, cores, and each physical device once."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_colibri.findings import Finding
from pytest_colibri.host.devices import PhysicalDevice, physical_devices
from pytest_colibri.host.model import Host, Memory, Processor
from pytest_colibri.planner import budgets
from pytest_colibri.units import format_bytes

_POOLS = {
    "unified": "shares the RAM",
    "discrete": "has memory of its own",
    None: "whether it shares the RAM is unknown",
}


def machine_findings(host: Host) -> Iterator[Finding]:
    """Yield a finding for memory, for cores, and for each device."""
    yield _memory(host.memory)
    yield _cores(host.processor)
    devices = physical_devices(host.accelerators)
    for device in devices:
        yield _cpu_device(device) if device.is_software else _gpu(device)
    if all(device.is_software for device in devices):
        yield Finding(
            "accelerator.gpu",
            "warning",
            "no supported GPU was found: the CPU does all work",
            remedy="where there is one, install its driver; the notes tell what could not be asked",
        )


def _memory(memory: Memory) -> Finding:
    figures = {
        "total": memory.total,
        "available": memory.available,
        "control group": memory.cgroup_available,
        "limit": memory.limit,
    }
    if memory.limit.bytes is None:
        return Finding(
            "host.memory",
            "unknown",
            f"the available memory is unknown ({memory.limit.source})",
            figures,
            remedy="state the RAM budget explicitly",
        )
    automatic = budgets.automatic_ram_budget(memory.limit.bytes)
    return Finding(
        "host.memory",
        "ok",
        f"{format_bytes(memory.limit.bytes)} are available, of which a plan takes at most "
        f"{format_bytes(automatic)} by itself",
        figures,
    )


def _cores(processor: Processor) -> Finding:
    sentence = (
        f"physical cores: {processor.physical_cores}, sockets: {processor.sockets} ({processor.source})"
    )
    if processor.note:
        return Finding("host.cores", "warning", f"{sentence}; {processor.note}")
    return Finding("host.cores", "ok", sentence)


def _cpu_device(device: PhysicalDevice) -> Finding:
    return Finding("accelerator.cpu", "ok", _views(device), {"total": device.total, "free": device.free})


def _gpu(device: PhysicalDevice) -> Finding:
    check, best = "accelerator.gpu", device.views[0]
    sentence = f"{_views(device)}; {_POOLS[best.pool]}"
    figures = {"total": device.total, "free": device.free}
    if device.doubts:
        return Finding(check, "warning", "; ".join((sentence, *device.doubts)), figures)
    if best.pool != "unified" and device.free.bytes is None:
        return Finding(
            check,
            "unknown",
            f"{sentence}; its free memory is unknown ({device.free.source}), so it gets no tier",
            figures,
        )
    return Finding(check, "ok", sentence, figures)


def _views(device: PhysicalDevice) -> str:
    return "; also ".join(view.describe() for view in device.views)
