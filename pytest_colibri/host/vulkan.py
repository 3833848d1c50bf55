"""The Vulkan devices of a machine.

The probe runs in a child process, ``python -m pytest_colibri.host.vulkan``: a driver that crashes or hangs
ends the child only. The child prints one JSON object, which is also the form of recordings:

* ``loader``: version of the Vulkan loader
* ``devices``: list of objects with

  * ``index``, ``name``, ``vendor_id``, ``device_id``, ``type`` (``discrete``, ``integrated``, ``virtual``,
    ``cpu``, ``other``), ``api_version``
  * ``driver``: ``name`` and ``info`` (text), ``id`` (VkDriverId) and ``version`` (as the driver packs it)
  * ``device_uuid``, ``driver_uuid`` (32 hexadecimal digits), ``pci`` (``dddd:bb:dd.f``); null where unknown
  * ``heaps``: ``size_bytes``, ``flags`` (VkMemoryHeapFlags), ``budget_bytes`` and ``usage_bytes`` (null
    without VK_EXT_memory_budget)
  * ``memory_types``: ``heap``, ``flags`` (VkMemoryPropertyFlags)
  * ``queue_families``: ``count``, ``flags`` (VkQueueFlags)
  * ``limits``: those of VkPhysicalDeviceLimits that bound compute work

or, where nothing can be listed, ``detail`` and ``error``: ``no-package``, ``no-loader``, ``no-driver`` or
``failed``.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from pytest_colibri.errors import Unavailable, UsageError
from pytest_colibri.host.figures import bound, within
from pytest_colibri.host.model import Accelerator, DeviceIdentity, Heap, MemoryType, QueueFamily
from pytest_colibri.host.tools import bounded, printable, run_tool
from pytest_colibri.profiles.model import DeviceType, Pool
from pytest_colibri.units import Figure

_VENDORS = {
    0x1002: "amd",
    0x106B: "apple",
    0x10DE: "nvidia",
    0x13B5: "arm",
    0x1414: "microsoft",
    0x5143: "qualcomm",
    0x8086: "intel",
    0x10005: "mesa",
}
_TYPES: tuple[DeviceType, ...] = (
    "other",
    "integrated",
    "discrete",
    "virtual",
    "cpu",
)  # as VkPhysicalDeviceType
_POOLS: Mapping[DeviceType, Pool] = {"cpu": "unified", "integrated": "unified", "discrete": "discrete"}
_PROCESSOR = re.compile(r"\bgfx[0-9a-f]{3,5}\b", re.IGNORECASE)
_DOZEN = 23  # VkDriverId of Mesa's driver over Direct3D 12
_SOFTWARE_NAMES = re.compile(r"llvmpipe|swiftshader", re.IGNORECASE)
_LIMITS = (
    "maxStorageBufferRange",
    "minStorageBufferOffsetAlignment",
    "maxComputeSharedMemorySize",
    "maxComputeWorkGroupCount",
    "maxComputeWorkGroupInvocations",
    "maxComputeWorkGroupSize",
    "maxMemoryAllocationCount",
    "maxPushConstantsSize",
    "nonCoherentAtomSize",
)
_HEAP_DEVICE_LOCAL = 0x1
_MEMORY_DEVICE_LOCAL, _MEMORY_HOST_VISIBLE, _MEMORY_HOST_COHERENT, _MEMORY_HOST_CACHED = 0x1, 0x2, 0x4, 0x8
_QUEUE_GRAPHICS, _QUEUE_COMPUTE, _QUEUE_TRANSFER = 0x1, 0x2, 0x4
_MAX_ITEMS = 64

_INSTALL = {
    "no-package": "the Python package vulkan is missing: pip install vulkan",
    "no-loader": "no Vulkan loader: install it (Debian, Ubuntu: apt install libvulkan1 mesa-vulkan-drivers; "
    "Fedora: dnf install vulkan-loader mesa-vulkan-drivers; macOS: brew install vulkan-loader molten-vk; "
    "Windows: the driver of the GPU's vendor brings it)",
    "no-driver": "no Vulkan driver: install the one of the GPU's vendor, or Mesa's (Debian, Ubuntu: "
    "apt install mesa-vulkan-drivers), and see whether VK_DRIVER_FILES or VK_ICD_FILENAMES hides it",
    "failed": "the Vulkan loader failed",
}


def probe_vulkan(timeout_s: float = 20) -> tuple[tuple[Accelerator, ...], tuple[str, ...]]:
    """Return the Vulkan devices of this machine, and notes on what hindered the probe and what to do."""
    package_folder = Path(__file__).parents[2]
    python_path = os.pathsep.join(filter(None, (str(package_folder), os.environ.get("PYTHONPATH"))))
    try:
        output = run_tool(
            # -P keeps the user's modules out; the folder, settings of layers and (on Windows) libraries.
            [sys.executable, "-P", "-m", "pytest_colibri.host.vulkan"],
            timeout_s=timeout_s,
            environment={**os.environ, "PYTHONPATH": python_path},
            folder=Path(sys.executable).parent,
        )
    except Unavailable as error:
        return (), (f"Vulkan probe: {error}",)
    if output.status is None:
        return (), (f"Vulkan: a driver did not answer within {timeout_s:g} s; the probe was stopped",)
    if output.status != 0:
        return (), (f"Vulkan: the probe {_ending(output.status)}; {_last_line(output.errors)}",)
    return _read_answer(output.text)


def parse_vulkan(json_text: str) -> tuple[Accelerator, ...]:
    """Return the devices of a recording or of the live probe. Raises UsageError for any other text."""
    devices = tuple(_device(entry) for entry in _Entry(_load(json_text), "vulkan").entries("devices"))
    return _without_repeated_uuids(devices)


def _read_answer(text: str) -> tuple[tuple[Accelerator, ...], tuple[str, ...]]:
    try:
        answer = _load(text)
        if "error" in answer:
            return (), (f"Vulkan: {_INSTALL[answer['error']]} ({printable(answer['detail'])})",)
        return parse_vulkan(text), ()
    except UsageError as error:
        return (), (f"Vulkan: the answer of the probe is refused: {error}",)


def _ending(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}: a Vulkan driver crashed"
    return f"ended with status {status}"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return printable(lines[-1]) if lines else "it wrote no message"


def _load(text: str) -> dict[str, Any]:
    try:
        answer = json.loads(bounded(text, "vulkan"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"vulkan: not JSON as pytest_colibri.host.vulkan prints it: {error}") from error
    if not isinstance(answer, dict):
        raise UsageError("vulkan: the text must be one JSON object")
    return answer


class _Entry:
    """One JSON object whose values are checked when they are read; ``where`` names it in errors."""

    def __init__(self, values: object, where: str) -> None:
        if not isinstance(values, dict):
            raise UsageError(f"{where}: must be an object")
        self._values, self._where = values, where

    def number(self, key: str) -> int:
        value = self._values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
            raise UsageError(f"{self._where}.{key}: must be a whole number from 0 to 2^64 - 1")
        return value

    def optional_number(self, key: str) -> int | None:
        return None if self._values.get(key) is None else self.number(key)

    def text(self, key: str) -> str:
        value = self._values.get(key)
        if not isinstance(value, str):
            raise UsageError(f"{self._where}.{key}: must be text")
        return printable(value)

    def optional_match(self, key: str, pattern: str) -> str | None:
        value = self._values.get(key)
        if value is not None and not (isinstance(value, str) and re.fullmatch(pattern, value)):
            raise UsageError(f"{self._where}.{key}: must be null or match {pattern}")
        return value

    def entry(self, key: str) -> _Entry:
        return _Entry(self._values.get(key), f"{self._where}.{key}")

    def entries(self, key: str) -> list[_Entry]:
        items = self._values.get(key)
        if not isinstance(items, list) or len(items) > _MAX_ITEMS:
            raise UsageError(f"{self._where}.{key}: must be a list of at most {_MAX_ITEMS} objects")
        return [_Entry(item, f"{self._where}.{key}[{place}]") for place, item in enumerate(items)]


def _device(entry: _Entry) -> Accelerator:
    identity = DeviceIdentity(
        api="vulkan",
        index=entry.number("index"),
        name=entry.text("name"),
        uuid=_uuid(entry),
        pci=entry.optional_match("pci", "[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}[.][0-7]"),
    )
    vendor_id = entry.number("vendor_id")
    driver = entry.entry("driver")
    processor = _PROCESSOR.search(identity.name)
    device_type = _device_type(entry, identity.name)
    heaps = tuple(_heap(index, heap) for index, heap in enumerate(entry.entries("heaps")))
    pool = _POOLS.get(device_type)
    total, free = _figures(heaps, pool)
    return Accelerator(
        identity=identity,
        vendor=_VENDORS.get(vendor_id, f"{vendor_id:#06x}"),
        type=device_type,
        driver=f"{driver.text('name')} {driver.text('info')}".strip() or "unknown",
        pool=pool,
        total=total,
        free=free,
        heaps=heaps,
        memory_types=tuple(
            _memory_type(index, kind, len(heaps)) for index, kind in enumerate(entry.entries("memory_types"))
        ),
        queue_families=tuple(
            _queue_family(index, family) for index, family in enumerate(entry.entries("queue_families"))
        ),
        processor=processor[0].lower() if processor else None,
    )


def _uuid(entry: _Entry) -> str | None:
    """Return the UUID; Dozen hashes vendor and device IDs into one, which tells a model and no card."""
    uuid = entry.optional_match("device_uuid", "[0-9a-f]{32}")
    return None if entry.entry("driver").number("id") == _DOZEN else uuid


def _device_type(entry: _Entry, name: str) -> DeviceType:
    """Return the type; a software renderer behind a virtual GPU computes on the CPU whatever it says."""
    said = entry.text("type")
    if _SOFTWARE_NAMES.search(name):
        return "cpu"
    for known in _TYPES:
        if said == known:
            return known
    raise UsageError(f"vulkan device {name}: type {said!r} is none of {', '.join(_TYPES)}")


def _figures(heaps: tuple[Heap, ...], pool: Pool | None) -> tuple[Figure, Figure]:
    """Return total and free of the largest device-local heap.

    Heaps are never summed: without Resizable BAR a second one is a window onto the first, and budgets of
    several heaps may stand for the same bytes.
    """
    local = [heap for heap in heaps if heap.device_local]
    if not local:
        unknown = Figure(None, "the Vulkan device has no device-local heap")
        return unknown, unknown
    heap = max(local, key=lambda heap: heap.size_bytes)
    total = Figure(heap.size_bytes, f"Vulkan heap {heap.index}")
    if heap.budget_bytes is not None:
        budget = within(total, Figure(heap.budget_bytes, f"Vulkan budget of heap {heap.index}"))
        if budget.bytes is None:
            return total, budget
        return total, Figure(max(0, budget.bytes - (heap.usage_bytes or 0)), budget.source)
    if pool == "unified":
        return total, bound(total)
    return total, Figure(None, "the driver has no VK_EXT_memory_budget")


def _heap(index: int, entry: _Entry) -> Heap:
    return Heap(
        index=index,
        size_bytes=entry.number("size_bytes"),
        device_local=bool(entry.number("flags") & _HEAP_DEVICE_LOCAL),
        budget_bytes=entry.optional_number("budget_bytes"),
        usage_bytes=entry.optional_number("usage_bytes"),
    )


def _memory_type(index: int, entry: _Entry, heap_count: int) -> MemoryType:
    heap, flags = entry.number("heap"), entry.number("flags")
    if heap >= heap_count:
        raise UsageError(f"vulkan memory type {index}: heap {heap} does not exist, there are {heap_count}")
    return MemoryType(
        index=index,
        heap=heap,
        device_local=bool(flags & _MEMORY_DEVICE_LOCAL),
        host_visible=bool(flags & _MEMORY_HOST_VISIBLE),
        host_coherent=bool(flags & _MEMORY_HOST_COHERENT),
        host_cached=bool(flags & _MEMORY_HOST_CACHED),
    )


def _queue_family(index: int, entry: _Entry) -> QueueFamily:
    flags = entry.number("flags")
    return QueueFamily(
        index=index,
        count=entry.number("count"),
        compute=bool(flags & _QUEUE_COMPUTE),
        graphics=bool(flags & _QUEUE_GRAPHICS),
        # Vulkan lets a driver leave the transfer flag out where graphics or compute imply it.
        transfer=bool(flags & (_QUEUE_TRANSFER | _QUEUE_COMPUTE | _QUEUE_GRAPHICS)),
    )


def _without_repeated_uuids(devices: tuple[Accelerator, ...]) -> tuple[Accelerator, ...]:
    """Drop a UUID that tells no device from another.

    MoltenVK gives one UUID to several cards, and a driver that is registered twice lists a device twice: one
    driver that repeats a UUID, without a PCI address that confirms it, identifies nothing. Two drivers that
    share a UUID show one card.
    """
    seen = Counter((device.identity.uuid, device.driver) for device in devices)
    places: dict[str | None, set[str | None]] = {}
    for device in devices:
        places.setdefault(device.identity.uuid, set()).add(device.identity.pci)

    def is_identity(device: Accelerator) -> bool:
        one_place = len(places[device.identity.uuid]) == 1
        return one_place and (
            device.identity.pci is not None or seen[device.identity.uuid, device.driver] == 1
        )

    return tuple(
        device if is_identity(device) else replace(device, identity=replace(device.identity, uuid=None))
        for device in devices
    )


def _list_devices() -> dict[str, Any]:
    """Ask the loader for everything; runs in the child only."""
    try:
        import vulkan as vk
    except ModuleNotFoundError as error:
        return {"error": "no-package", "detail": str(error)}
    except OSError:
        return {"error": "no-loader", "detail": "libvulkan cannot be loaded"}
    try:
        instance = _create_instance(vk)
    except (vk.VkErrorIncompatibleDriver, vk.VkErrorInitializationFailed) as error:
        return {"error": "no-driver", "detail": type(error).__name__}
    except (vk.VkException, vk.VkError) as error:
        return {"error": "failed", "detail": type(error).__name__}
    try:
        handles = vk.vkEnumeratePhysicalDevices(instance)
        devices = [_describe(vk, index, handle) for index, handle in enumerate(handles)]
    except vk.VkErrorInitializationFailed as error:
        return {"error": "no-driver", "detail": type(error).__name__}
    finally:
        vk.vkDestroyInstance(instance, None)
    if not devices:
        return {"error": "no-driver", "detail": "the loader lists no device"}
    return {"loader": _version(vk.vkEnumerateInstanceVersion()), "devices": devices}


def _create_instance(vk: Any) -> Any:
    """Create an instance; layered drivers such as MoltenVK are listed only where portability is asked for."""
    portability = "VK_KHR_portability_enumeration"
    offered = {extension.extensionName for extension in vk.vkEnumerateInstanceExtensionProperties(None)}
    asked = [portability] if portability in offered else []
    return vk.vkCreateInstance(
        vk.VkInstanceCreateInfo(
            flags=vk.VK_INSTANCE_CREATE_ENUMERATE_PORTABILITY_BIT_KHR if asked else 0,
            pApplicationInfo=vk.VkApplicationInfo(apiVersion=vk.VK_MAKE_VERSION(1, 1, 0)),
            ppEnabledExtensionNames=asked,
        ),
        None,
    )


def _describe(vk: Any, index: int, handle: Any) -> dict[str, Any]:
    extensions = {item.extensionName for item in vk.vkEnumerateDeviceExtensionProperties(handle, None)}
    properties = vk.vkGetPhysicalDeviceProperties(handle)
    families = vk.vkGetPhysicalDeviceQueueFamilyProperties(handle)
    return {
        "index": index,
        "name": properties.deviceName,
        "vendor_id": properties.vendorID,
        "device_id": properties.deviceID,
        "type": _TYPES[properties.deviceType] if properties.deviceType < len(_TYPES) else "other",
        "api_version": _version(properties.apiVersion),
        **_identify(vk, handle, properties, extensions),
        **_memory(vk, handle, properties, extensions),
        "queue_families": [{"count": family.queueCount, "flags": family.queueFlags} for family in families],
        "limits": {name: _plain(getattr(properties.limits, name)) for name in _LIMITS},
    }


def _identify(vk: Any, handle: Any, properties: Any, extensions: set[str]) -> dict[str, Any]:
    """Return driver, UUIDs and PCI address; a Vulkan 1.0 device has no query for them."""
    driver, ids, pci = (
        vk.VkPhysicalDeviceDriverProperties(),
        vk.VkPhysicalDeviceIDProperties(),
        vk.VkPhysicalDevicePCIBusInfoPropertiesEXT(),
    )
    has_query = properties.apiVersion >= vk.VK_MAKE_VERSION(1, 1, 0)
    has_driver = (
        properties.apiVersion >= vk.VK_MAKE_VERSION(1, 2, 0) or "VK_KHR_driver_properties" in extensions
    )
    has_pci = has_query and "VK_EXT_pci_bus_info" in extensions
    if has_query:
        chain = [ids, *([driver] if has_driver else []), *([pci] if has_pci else [])]
        for first, second in pairwise(chain):
            first.pNext = vk.ffi.addressof(second)
        vk.vkGetPhysicalDeviceProperties2(
            handle, vk.ffi.addressof(vk.VkPhysicalDeviceProperties2(pNext=chain[0]))
        )
    return {
        "driver": {
            "name": vk.ffi.string(driver.driverName).decode("utf-8", "replace"),
            "info": vk.ffi.string(driver.driverInfo).decode("utf-8", "replace"),
            "id": driver.driverID,
            "version": properties.driverVersion,
        },
        "device_uuid": bytes(ids.deviceUUID).hex() if has_query else None,
        "driver_uuid": bytes(ids.driverUUID).hex() if has_query else None,
        "pci": f"{pci.pciDomain:04x}:{pci.pciBus:02x}:{pci.pciDevice:02x}.{pci.pciFunction:x}"
        if has_pci
        else None,
    }


def _memory(vk: Any, handle: Any, properties: Any, extensions: set[str]) -> dict[str, Any]:
    has_budget = "VK_EXT_memory_budget" in extensions and properties.apiVersion >= vk.VK_MAKE_VERSION(1, 1, 0)
    budget = vk.VkPhysicalDeviceMemoryBudgetPropertiesEXT()
    if has_budget:
        query = vk.VkPhysicalDeviceMemoryProperties2(pNext=budget)
        vk.vkGetPhysicalDeviceMemoryProperties2(handle, vk.ffi.addressof(query))
    memory = vk.vkGetPhysicalDeviceMemoryProperties(handle)
    return {
        "heaps": [
            {
                "size_bytes": memory.memoryHeaps[index].size,
                "flags": memory.memoryHeaps[index].flags,
                "budget_bytes": budget.heapBudget[index] if has_budget else None,
                "usage_bytes": budget.heapUsage[index] if has_budget else None,
            }
            for index in range(memory.memoryHeapCount)
        ],
        "memory_types": [
            {"heap": memory.memoryTypes[index].heapIndex, "flags": memory.memoryTypes[index].propertyFlags}
            for index in range(memory.memoryTypeCount)
        ],
    }


def _plain(value: Any) -> int | list[int]:
    return value if isinstance(value, int) else list(value)


def _version(packed: int) -> str:
    return f"{packed >> 22 & 0x7F}.{packed >> 12 & 0x3FF}.{packed & 0xFFF}"


def _main() -> None:
    """Print the answer; drivers that write to standard output find standard error there."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with answer:
        json.dump(_list_devices(), answer, indent=1)
        answer.write("\n")


if __name__ == "__main__":
    _main()
