"""One Vulkan device, chosen by identity, with one compute queue."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import vulkan as vk

from pytest_colibri.engine.request import DEVICE_SELECTORS
from pytest_colibri.errors import HostMismatch, Unavailable
from pytest_colibri.host.model import DeviceIdentity

API_VERSION = vk.VK_MAKE_VERSION(1, 1, 0)
FENCE_TIMEOUT_NS = 600 * 10**9
PORTABILITY_ENUMERATION = "VK_KHR_portability_enumeration"
PORTABILITY_SUBSET = "VK_KHR_portability_subset"
PCI_BUS_INFO = "VK_EXT_pci_bus_info"


@dataclass(frozen=True)
class PhysicalDevice:
    """A device as the loader lists it."""

    handle: Any
    identity: DeviceIdentity
    api_version: int
    extensions: frozenset[str]


class VulkanDevice:
    """An opened device. ``close`` destroys everything that was put on ``resources``, in reverse order."""

    def __init__(self, selector: str | None) -> None:
        self.resources = ExitStack()
        try:
            self._open(selector)
        except BaseException:
            self.close()
            raise

    def _open(self, selector: str | None) -> None:
        instance = _create_instance()
        self.resources.callback(vk.vkDestroyInstance, instance, None)
        physical = choose(selector, list_devices(instance))
        self.identity = physical.identity
        # Its nested structures point into this one, which must therefore live as long as they are read.
        self._properties = vk.vkGetPhysicalDeviceProperties(physical.handle)
        self.memory = vk.vkGetPhysicalDeviceMemoryProperties(physical.handle)
        self.unified = _is_unified(self._properties.deviceType, self.memory)
        family = _compute_family(physical)
        self.handle = self._create_device(physical, family)
        self.resources.callback(vk.vkDestroyDevice, self.handle, None)
        self._queue = vk.vkGetDeviceQueue(self.handle, family, 0)
        self._fence = vk.vkCreateFence(self.handle, vk.VkFenceCreateInfo(), None)
        self.resources.callback(vk.vkDestroyFence, self.handle, self._fence, None)
        self._command_buffer = self._create_command_buffer(family)
        self.submits = 0

    @property
    def limits(self) -> Any:
        """VkPhysicalDeviceLimits of the device."""
        return self._properties.limits

    def _create_device(self, physical: PhysicalDevice, family: int) -> Any:
        queue = vk.VkDeviceQueueCreateInfo(queueFamilyIndex=family, queueCount=1, pQueuePriorities=[1.0])
        extensions = sorted(physical.extensions & {PORTABILITY_SUBSET})
        create = vk.VkDeviceCreateInfo(
            queueCreateInfoCount=1,
            pQueueCreateInfos=[queue],
            enabledExtensionCount=len(extensions),
            ppEnabledExtensionNames=extensions,
        )
        return vk.vkCreateDevice(physical.handle, create, None)

    def _create_command_buffer(self, family: int) -> Any:
        flags = vk.VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT
        create = vk.VkCommandPoolCreateInfo(flags=flags, queueFamilyIndex=family)
        pool = vk.vkCreateCommandPool(self.handle, create, None)
        self.resources.callback(vk.vkDestroyCommandPool, self.handle, pool, None)
        allocate = vk.VkCommandBufferAllocateInfo(
            commandPool=pool, level=vk.VK_COMMAND_BUFFER_LEVEL_PRIMARY, commandBufferCount=1
        )
        return vk.vkAllocateCommandBuffers(self.handle, allocate)[0]

    def begin_commands(self) -> Any:
        """Begin the one command buffer anew; nothing that it recorded before is still running."""
        begin = vk.VkCommandBufferBeginInfo(flags=vk.VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT)
        vk.vkBeginCommandBuffer(self._command_buffer, begin)
        return self._command_buffer

    def submit_commands(self) -> None:
        """End the command buffer, submit it, and wait until the device has done it."""
        vk.vkEndCommandBuffer(self._command_buffer)
        submit = vk.VkSubmitInfo(commandBufferCount=1, pCommandBuffers=[self._command_buffer])
        vk.vkQueueSubmit(self._queue, 1, [submit], self._fence)
        self.submits += 1
        vk.vkWaitForFences(self.handle, 1, [self._fence], vk.VK_TRUE, FENCE_TIMEOUT_NS)
        vk.vkResetFences(self.handle, 1, [self._fence])

    def close(self) -> None:
        """Destroy the device and all that was made on it."""
        self.resources.close()


def _create_instance() -> Any:
    portable = PORTABILITY_ENUMERATION in {
        extension.extensionName for extension in vk.vkEnumerateInstanceExtensionProperties(None)
    }
    application = vk.VkApplicationInfo(
        pApplicationName="pytest-colibri", pEngineName="reference", apiVersion=API_VERSION
    )
    create = vk.VkInstanceCreateInfo(
        # Without it the loader hides MoltenVK, which implements a portable subset only.
        flags=vk.VK_INSTANCE_CREATE_ENUMERATE_PORTABILITY_BIT_KHR if portable else 0,
        pApplicationInfo=application,
        enabledExtensionCount=int(portable),
        ppEnabledExtensionNames=[PORTABILITY_ENUMERATION] if portable else [],
    )
    try:
        return vk.vkCreateInstance(create, None)
    except vk.VkErrorIncompatibleDriver:
        raise Unavailable("no Vulkan driver on this machine; install the driver of the device") from None


def list_devices(instance: Any) -> list[PhysicalDevice]:
    """Return every device that the loader shows, in its order. Raises Unavailable when there is none."""
    try:
        handles = vk.vkEnumeratePhysicalDevices(instance)
    except vk.VkErrorInitializationFailed:
        handles = ()
    if not len(handles):
        raise Unavailable("no Vulkan device on this machine; install the driver of the device")
    return [_describe(index, handle) for index, handle in enumerate(handles)]


def _describe(index: int, handle: Any) -> PhysicalDevice:
    properties = vk.vkGetPhysicalDeviceProperties(handle)
    extensions = frozenset(
        extension.extensionName for extension in vk.vkEnumerateDeviceExtensionProperties(handle, None)
    )
    uuid = pci = None
    if properties.apiVersion >= API_VERSION:
        uuid = _uuid(handle)
        pci = _pci(handle) if PCI_BUS_INFO in extensions else None
    identity = DeviceIdentity("vulkan", index, properties.deviceName, uuid, pci)
    return PhysicalDevice(handle, identity, properties.apiVersion, extensions)


def _uuid(handle: Any) -> str:
    extra = vk.VkPhysicalDeviceIDProperties()
    vk.vkGetPhysicalDeviceProperties2(handle, vk.VkPhysicalDeviceProperties2(pNext=extra))
    return bytes(extra.deviceUUID).hex()


def _pci(handle: Any) -> str:
    extra = vk.VkPhysicalDevicePCIBusInfoPropertiesEXT()
    vk.vkGetPhysicalDeviceProperties2(handle, vk.VkPhysicalDeviceProperties2(pNext=extra))
    return f"{extra.pciDomain:04x}:{extra.pciBus:02x}:{extra.pciDevice:02x}.{extra.pciFunction:x}"


def choose(selector: str | None, devices: Sequence[PhysicalDevice]) -> PhysicalDevice:
    """Return the one device that ``selector`` names. Raises HostMismatch, naming what there is."""
    present = "; ".join(
        f"index:{device.identity.index} name:{device.identity.name} uuid:{device.identity.uuid}"
        for device in devices
    )
    if selector is None:
        raise HostMismatch(f"the Vulkan backend needs a device by name; this machine has {present}")
    kind, _, wanted = selector.partition(":")
    assert kind in DEVICE_SELECTORS
    found = [device for device in devices if _matches(device.identity, kind, wanted)]
    if not found:
        raise HostMismatch(f"there is no Vulkan device {selector}; this machine has {present}")
    if len(found) > 1:
        raise HostMismatch(f"{selector} names {len(found)} devices; this machine has {present}")
    if found[0].api_version < API_VERSION:
        raise HostMismatch(f"{found[0].identity.name} speaks Vulkan 1.0 only; 1.1 is needed")
    return found[0]


def _matches(identity: DeviceIdentity, kind: str, wanted: str) -> bool:
    if kind == "uuid":
        return identity.uuid == wanted.replace("-", "").lower()
    if kind == "pci":
        return identity.pci == wanted.lower()
    return wanted == (identity.name if kind == "name" else str(identity.index))


def _compute_family(physical: PhysicalDevice) -> int:
    families = vk.vkGetPhysicalDeviceQueueFamilyProperties(physical.handle)
    for index, family in enumerate(families):
        if family.queueFlags & vk.VK_QUEUE_COMPUTE_BIT:
            return index
    raise HostMismatch(f"{physical.identity.name} has no compute queue")


def _is_unified(device_type: int, memory: Any) -> bool:
    """Whether device and host share one physical memory."""
    if device_type in (vk.VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU, vk.VK_PHYSICAL_DEVICE_TYPE_CPU):
        return True
    heaps = [memory.memoryHeaps[index] for index in range(memory.memoryHeapCount)]
    return all(heap.flags & vk.VK_MEMORY_HEAP_DEVICE_LOCAL_BIT for heap in heaps)
