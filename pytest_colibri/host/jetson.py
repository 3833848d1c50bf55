"""NVIDIA Jetson boards, whose older systems have neither NVML nor nvidia-smi: the device tree names them.

Recordings are the output of ``tr '\\0' '\\n' < FILE`` for ``/proc/device-tree/model`` and
``/proc/device-tree/compatible``.
"""

from __future__ import annotations

from pathlib import Path

from pytest_colibri.host.model import Accelerator, DeviceIdentity
from pytest_colibri.host.tools import bounded, printable
from pytest_colibri.units import Figure

_FOLDER = Path("/proc/device-tree")
_READ_BYTES = 4096


def read_device_tree() -> str:
    """Return the model and the compatible names of this board, one a line; empty where there are none."""
    texts = []
    for name in ("model", "compatible"):
        try:
            with (_FOLDER / name).open("rb") as file:
                texts.append(file.read(_READ_BYTES).decode("utf-8", "replace"))
        except OSError:
            return ""
    return "\0".join(texts).replace("\0", "\n")


def parse_device_tree(text: str) -> tuple[Accelerator, ...]:
    """Return the GPU of a Tegra chip, which shares the RAM; none for another board."""
    lines = [line for line in bounded(text, "device-tree").splitlines() if line]
    if not any(line.startswith("nvidia,tegra") for line in lines):
        return ()
    unknown = Figure(None, "a Tegra chip has no memory of its own")
    identity = DeviceIdentity("cuda", 0, printable(lines[0]))
    return (Accelerator(identity, "nvidia", "integrated", "nvgpu", "unified", unknown, unknown),)
