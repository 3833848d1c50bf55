"""The AMD devices of this machine: amdgpu and ``rocm-smi`` on Linux, ``hipInfo`` on Windows."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence

from pytest_colibri.errors import Unavailable, UsageError
from pytest_colibri.host.amdgpu import parse_drm, read_drm
from pytest_colibri.host.devices import combine
from pytest_colibri.host.hipinfo import parse_hipinfo
from pytest_colibri.host.model import Accelerator
from pytest_colibri.host.rocm_smi import ROCM_SMI, parse_rocm_smi
from pytest_colibri.host.tools import printable, run_tool

_Found = tuple[tuple[Accelerator, ...], tuple[str, ...]]

_INSTALL = "install ROCm (Debian, Ubuntu: apt install rocm-smi) to have AMD devices listed"


def probe_amd() -> _Found:
    """Return the AMD devices of this machine, each once, and notes on what hindered the probe."""
    if platform.system() == "Windows":
        return _ask(["hipInfo"], parse_hipinfo, "install AMD's HIP SDK, and have its bin folder in PATH")
    named, notes = _ask(ROCM_SMI, parse_rocm_smi, _INSTALL)
    text = read_drm()
    devices, doubts = combine(named, parse_drm(text) if text else ())
    return devices, (*notes, *(f"ROCm: {doubt}" for doubt in doubts))


def _ask(arguments: Sequence[str], parse: Callable[[str], tuple[Accelerator, ...]], install: str) -> _Found:
    tool = arguments[0]
    try:
        output = run_tool(arguments)
    except Unavailable as error:
        return (), (f"ROCm: {error}; {install}",)
    if output.status != 0:
        return (), (f"ROCm: {tool} ended with status {output.status}: {printable(output.errors)}",)
    try:
        return parse(output.text), ()
    except UsageError as error:
        return (), (f"ROCm: {error}",)
