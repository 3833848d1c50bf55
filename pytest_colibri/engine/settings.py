"""What the environment asks of the engine: the variables that a plan exports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pytest_colibri.errors import UsageError
from pytest_colibri.units import GB

OTHER_BACKENDS = ("COLI_CUDA", "COLI_METAL")


@dataclass(frozen=True)
class Settings:
    """``device_experts`` bounds the experts on the device, ``ram_bytes`` dense weights and cache.

    None is no bound.
    """

    backend: Literal["cpu", "vulkan"]
    device_experts: int | None
    ram_bytes: int | None


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Read the environment. Raises UsageError for a bad value and for a backend that is not ours."""
    for name in OTHER_BACKENDS:
        if _switch(environment, name):
            raise UsageError(f"{name}=1 is asked for; this engine computes on cpu and vulkan (COLI_VULKAN=1)")
    backend: Literal["cpu", "vulkan"] = "vulkan" if _switch(environment, "COLI_VULKAN") else "cpu"
    return Settings(backend, _device_experts(environment), _ram_bytes(environment))


def _switch(environment: Mapping[str, str], name: str) -> bool:
    value = environment.get(name, "0")
    if value not in ("", "0", "1"):
        raise UsageError(f"{name} must be 0 or 1, not {value!r:.40}")
    return value == "1"


def _device_experts(environment: Mapping[str, str]) -> int | None:
    value = environment.get("COLI_VK_EXPERTS")
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 9):
        raise UsageError(f"COLI_VK_EXPERTS must be a count of experts, not {value!r:.40}")
    return int(value)


def _ram_bytes(environment: Mapping[str, str]) -> int | None:
    value = environment.get("RAM_GB")
    if value is None:
        return None
    try:
        gigabytes = float(value)
    except ValueError:
        gigabytes = math.nan
    if not 0 < gigabytes < 10**6:
        raise UsageError(f"RAM_GB must be a number of GB (10^9 bytes) above 0, not {value!r:.40}")
    return round(gigabytes * GB)
