"""Routed experts on a Vulkan device of any vendor, with compute shaders of our own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_colibri.errors import Unavailable

if TYPE_CHECKING:
    from pytest_colibri.engine.vulkan.backend import VulkanExperts


def open_vulkan(selector: str | None, batch_rows: int, staged: bool = False) -> VulkanExperts:
    """Open the device that ``selector`` names, for batches of up to ``batch_rows`` expert rows.

    ``staged`` forces copies through a staging buffer where the memory is shared and none would be needed.
    Raises Unavailable without a Vulkan loader or driver, HostMismatch where the device is not there.
    """
    try:
        from pytest_colibri.engine.vulkan.backend import VulkanExperts
    except ImportError:
        raise Unavailable("the python package vulkan is not installed: pip install vulkan") from None
    except OSError:
        raise Unavailable(
            "no Vulkan loader on this machine; install libvulkan1 (or your system's equal) and a driver"
        ) from None
    return VulkanExperts(selector, batch_rows, staged)
