"""Metal devices of a Mac, through ``system_profiler``.

Recordings are the output of ``system_profiler SPDisplaysDataType -json``.
"""

from __future__ import annotations

import json
import platform

from pytest_colibri.errors import Unavailable, UsageError
from pytest_colibri.host.figures import bound
from pytest_colibri.host.model import Accelerator, DeviceIdentity
from pytest_colibri.host.tools import bounded, printable, run_tool
from pytest_colibri.units import Figure

_MAX_DEVICES = 16
_GIB = 2**30


def probe_apple(memory_total: Figure) -> tuple[tuple[Accelerator, ...], tuple[str, ...]]:
    """Return the Metal devices of this machine, and notes on what hindered the probe."""
    if platform.system() != "Darwin":
        return (), ("Metal: only macOS has it",)
    try:
        output = run_tool(["system_profiler", "SPDisplaysDataType", "-json"], timeout_s=30)
        return parse_system_profiler(output.text, memory_total), ()
    except (Unavailable, UsageError) as error:
        return (), (f"Metal: {error}",)


def parse_system_profiler(json_text: str, memory_total: Figure) -> tuple[Accelerator, ...]:
    """Return the devices of the text; the GPU of an Apple chip shares the RAM, of which it gets a part.

    The tool does not tell that part (Metal's recommendedMaxWorkingSetSize): it is estimated from the total.
    Devices of other vendors are named only. Raises UsageError for any other text.
    """
    try:
        entries = json.loads(bounded(json_text, "system_profiler"))["SPDisplaysDataType"]
        described = [(str(entry["sppci_model"]), str(entry["spdisplays_vendor"])) for entry in entries]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise UsageError(
            "system_profiler: not the output of system_profiler SPDisplaysDataType -json"
        ) from error
    if len(described) > _MAX_DEVICES:
        raise UsageError(f"system_profiler: {len(described)} devices, at most {_MAX_DEVICES} are read")
    return tuple(
        _device(index, printable(name), vendor.lower(), memory_total)
        for index, (name, vendor) in enumerate(described)
    )


def _device(index: int, name: str, vendor_text: str, memory_total: Figure) -> Accelerator:
    identity = DeviceIdentity("metal", index, name)
    if "apple" in vendor_text:
        total = _working_set(memory_total)
        return Accelerator(identity, "apple", "integrated", "metal", "unified", total, bound(total))
    vendor = next((known for known in ("amd", "intel", "nvidia") if known in vendor_text), "unknown")
    unknown = Figure(None, "system_profiler gives no memory of this device")
    return Accelerator(identity, vendor, "other", "metal", None, unknown, unknown)


def _working_set(memory_total: Figure) -> Figure:
    """Estimate recommendedMaxWorkingSetSize: machines report 2/3 of up to 32 GiB, 3/4 of more."""
    if memory_total.bytes is None:
        return memory_total
    part, whole = (2, 3) if memory_total.bytes <= 32 * _GIB else (3, 4)
    return Figure(memory_total.bytes * part // whole, f"estimate: {part}/{whole} of {memory_total.source}")
