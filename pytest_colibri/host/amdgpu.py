"""AMD devices as the Linux driver amdgpu shows them in ``/sys/class/drm``.

Recordings are the output of ``tail -n +1`` for the files that FILES names, in each ``card*/device``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pytest_colibri.errors import UsageError
from pytest_colibri.host.figures import less
from pytest_colibri.host.model import Accelerator, DeviceIdentity
from pytest_colibri.host.tools import printed_files
from pytest_colibri.profiles.model import DeviceType, Pool
from pytest_colibri.units import Figure

FILES = (
    "vendor",
    "device",
    "uevent",
    "mem_info_vram_total",
    "mem_info_vram_used",
    "mem_info_gtt_total",
    "mem_info_gtt_used",
)
_AMD = "0x1002"
_READ_BYTES = 4096

# PCI device IDs, as the PCI ID repository lists them: APUs one by one, cards by their range.
_INTEGRATED = frozenset(
    {0x13C0, 0x13FE, 0x1435, 0x143F, 0x1506, 0x150E, 0x1586, 0x15BF, 0x15C8, 0x15D8, 0x15DD, 0x15E7}
    | {0x1636, 0x1638, 0x163F, 0x164C, 0x164D, 0x164E, 0x1681, 0x1900, 0x1901, 0x1114, 0x74A0}
)
_DISCRETE = range(0x6600, 0x7600)


def read_drm(folder: Path = Path("/sys/class/drm")) -> str:
    """Return the files of each card of this machine as ``tail -n +1`` prints them; empty without cards."""
    parts = []
    for device in sorted(folder.glob("card*/device")):
        for name in FILES:
            try:
                with (device / name).open("rb") as file:
                    text = file.read(_READ_BYTES).decode("utf-8", "replace")
            except OSError:
                continue
            parts.append(f"==> {device.relative_to(folder) / name} <==\n{text}")
    return "\n".join(parts)


def parse_drm(text: str) -> tuple[Accelerator, ...]:
    """Return the AMD devices of the text by PCI address; display chips and cards of others are passed over.

    The pool of an APU is GTT, the share of the RAM that the driver maps: its VRAM is a small carve-out.
    Raises UsageError for text without any card.
    """
    folders = printed_files(text, "amd-sysfs")
    cards = {folder: files for folder, files in folders.items() if "vendor" in files}
    if not cards:
        raise UsageError("amd-sysfs: no '==> card0/device/vendor <==' in the text")
    amd = [files for files in cards.values() if files["vendor"].strip() == _AMD]
    return tuple(_device(index, files) for index, files in enumerate(sorted(amd, key=_address)))


def _device(index: int, files: Mapping[str, str]) -> Accelerator:
    text = files.get("device", "").strip()
    device_id = int(text, 16) if re.fullmatch("0x[0-9a-f]{4}", text) else None
    device_type, pool = _kind(device_id)
    memory = "gtt" if pool == "unified" else "vram"
    total = _figure(files, f"mem_info_{memory}_total")
    free = less(total, _figure(files, f"mem_info_{memory}_used"))
    name = "AMD GPU" if device_id is None else f"AMD GPU 1002:{device_id:04x}"
    identity = DeviceIdentity("rocm", index, name, None, _address(files) or None)
    return Accelerator(identity, "amd", device_type, "amdgpu", pool, total, free)


def _kind(device_id: int | None) -> tuple[DeviceType, Pool | None]:
    if device_id in _INTEGRATED:
        return "integrated", "unified"
    if device_id in _DISCRETE:
        return "discrete", "discrete"
    return "other", None


def _figure(files: Mapping[str, str], name: str) -> Figure:
    text = files.get(name, "").strip()
    if not re.fullmatch(r"\d{1,18}", text):
        return Figure(None, f"amdgpu gives no {name}")
    return Figure(int(text), f"amdgpu {name}")


def _address(files: Mapping[str, str]) -> str:
    slot = re.search(
        r"^PCI_SLOT_NAME=([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])$", files.get("uevent", ""), re.MULTILINE
    )
    return slot[1] if slot else ""
