"""NVIDIA devices, through NVML or ``nvidia-smi``.

Recordings are the output of ``nvidia-smi --format=csv,noheader,nounits`` with ``--query-gpu=`` and
``index,name,uuid,pci.bus_id,memory.total,memory.free``; UUID and bus may be left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pytest_colibri.errors import Unavailable, UsageError
from pytest_colibri.host.devices import combine
from pytest_colibri.host.figures import within
from pytest_colibri.host.jetson import parse_device_tree, read_device_tree
from pytest_colibri.host.model import Accelerator, DeviceIdentity
from pytest_colibri.host.tools import bounded, printable, run_tool
from pytest_colibri.units import MIB, Figure

_QUERY = "index,name,uuid,pci.bus_id,memory.total,memory.free"
_INSTALL = "no NVIDIA driver: install it from NVIDIA or the distribution; it brings NVML and nvidia-smi"
_SHARED = ("[N/A]", "[Not Supported]")
_HIDDEN = "[Insufficient Permissions]"
_SLICED = "slices of their own (MIG is enabled)"


def probe_nvidia() -> tuple[tuple[Accelerator, ...], tuple[str, ...]]:
    """Return the NVIDIA devices of this machine, and notes on what hindered the probe.

    NVML and nvidia-smi are both asked, and their figures compared. A Jetson of old has neither: its device
    tree names it.
    """
    listed, notes = _probe_nvidia_smi()
    try:
        devices, sliced = _probe_nvml()
    except Unavailable as error:
        if listed or notes:
            return listed, notes
        jetson = parse_device_tree(read_device_tree())
        return jetson, () if jetson else (f"CUDA: {_INSTALL} ({error})",)
    combined, doubts = combine(devices, listed)
    return tuple(
        _with_memory(device, _SLICED, _SLICED) if device.identity.index in sliced else device
        for device in combined
    ), tuple(f"CUDA: {doubt}" for doubt in doubts)


def _probe_nvidia_smi() -> tuple[tuple[Accelerator, ...], tuple[str, ...]]:
    """Return what nvidia-smi lists and why it does not; nothing of both where it is not installed."""
    try:
        output = run_tool(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"])
    except Unavailable:
        return (), ()
    if output.status != 0:
        message = printable(output.text.strip() or output.errors.strip() or "no message")
        return (), (f"CUDA: nvidia-smi ended with status {output.status}: {message}",)
    try:
        return parse_nvidia_smi(output.text), ()
    except UsageError as error:
        return (), (f"CUDA: {error}",)


def parse_nvidia_smi(text: str) -> tuple[Accelerator, ...]:
    """Return the devices of the CSV text. Raises UsageError for lines of another shape.

    ``[N/A]`` memory means a chip that shares the RAM; any other word in brackets, such as
    ``[Insufficient Permissions]``, tells nothing.
    """
    lines = bounded(text, "nvidia-smi").splitlines()
    return tuple(_device(line) for line in lines if line.strip())


def _device(line: str) -> Accelerator:
    # A name may hold commas, so that the columns are taken from both ends.
    columns = [column.strip() for column in line.split(",")]
    if len(columns) < 4 or not re.fullmatch(r"\d{1,4}", columns[0]):
        raise UsageError(f"nvidia-smi: {line[:80]!r} does not have the columns {_QUERY}")
    index, *middle, total, free = columns
    middle = [column for column in middle if column not in _SHARED]
    pci = _pci(middle[-1]) if middle else None
    middle = middle[:-1] if pci else middle
    uuid = _uuid(middle[-1]) if middle else None
    name = ", ".join(middle[:-1] if uuid else middle)
    if not name:
        raise UsageError(f"nvidia-smi: {line[:80]!r} has no name")
    identity = DeviceIdentity("cuda", int(index), printable(name), uuid, pci)
    return _accelerator(identity, "nvidia", _memory_column(total, "total"), _memory_column(free, "free"))


def _memory_column(column: str, which: str) -> Figure | str:
    """Return the figure, or the word that stands in its place."""
    if re.fullmatch(r"\[[\w /-]{1,60}\]", column):
        return column
    if not re.fullmatch(r"\d{1,9}", column):
        raise UsageError(f"nvidia-smi: memory.{which} {column[:40]!r} is no number of MiB")
    return Figure(int(column) * MIB, f"nvidia-smi memory.{which}")


def _accelerator(
    identity: DeviceIdentity, driver: str, total: Figure | str, free: Figure | str
) -> Accelerator:
    unknown = Figure(None, "not asked")
    device = Accelerator(identity, "nvidia", "other", driver, None, unknown, unknown)
    return _with_memory(device, total, free)


def _with_memory(device: Accelerator, total: Figure | str, free: Figure | str) -> Accelerator:
    """Return the device with its memory, and with the type and the pool that the memory tells."""
    if isinstance(total, Figure):
        free = free if isinstance(free, Figure) else Figure(None, f"the driver gives free memory as {free}")
        return replace(device, type="discrete", pool="discrete", total=total, free=within(total, free))
    unknown = Figure(None, f"the driver gives memory as {total}")
    if total in _SHARED:
        return replace(device, type="integrated", pool="unified", total=unknown, free=unknown)
    return replace(device, type="other", pool=None, total=unknown, free=unknown)


def _probe_nvml() -> tuple[tuple[Accelerator, ...], frozenset[int]]:
    """Return the devices, and the indices of those whose memory MIG gives away in slices."""
    with nvml_library() as nvml:
        driver = f"nvidia {nvml.nvmlSystemGetDriverVersion()}"
        indices = range(nvml.nvmlDeviceGetCount())
        devices = tuple(_nvml_device(nvml, index, driver) for index in indices)
        sliced = (index for index in indices if is_sliced(nvml, nvml.nvmlDeviceGetHandleByIndex(index)))
        return devices, frozenset(sliced)


@contextmanager
def nvml_library() -> Iterator[Any]:
    """Open NVML through its Python binding, and close it. Raises Unavailable with the reason, also for a
    failure of NVML within the context that nothing else caught."""
    try:
        import pynvml
    except ModuleNotFoundError as error:
        raise Unavailable("the Python package nvidia-ml-py is missing") from error
    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise Unavailable(f"NVML: {error}") from error


def _nvml_device(nvml: Any, index: int, driver: str) -> Accelerator:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    identity = nvml_identity(nvml, handle, index)
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError_NotSupported:
        return _accelerator(identity, driver, _SHARED[0], _SHARED[0])
    except nvml.NVMLError_NoPermission:
        return _accelerator(identity, driver, _HIDDEN, _HIDDEN)
    return _accelerator(identity, driver, Figure(memory.total, "NVML"), Figure(memory.free, "NVML"))


def nvml_identity(nvml: Any, handle: Any, index: int) -> DeviceIdentity:
    """Return the identity of a device that NVML holds at ``index``."""
    return DeviceIdentity(
        "cuda",
        index,
        printable(nvml.nvmlDeviceGetName(handle)),
        _uuid(nvml.nvmlDeviceGetUUID(handle)),
        _pci(nvml.nvmlDeviceGetPciInfo(handle).busId),
    )


def is_sliced(nvml: Any, handle: Any) -> bool:
    """Tell whether MIG gives the device away in slices."""
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:
        return False
    return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)


def _uuid(text: str) -> str | None:
    digits = text.removeprefix("GPU-").replace("-", "").lower()
    return digits if re.fullmatch("[0-9a-f]{32}", digits) else None


def _pci(text: str) -> str | None:
    match = re.fullmatch(r"([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", text.lower())
    return f"{int(match[1], 16):04x}:{match[2]}" if match else None
