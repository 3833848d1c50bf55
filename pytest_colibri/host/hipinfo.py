"""AMD devices as HIP's ``hipInfo`` lists them; on Windows nothing else tells their memory.

Recordings are its output.
"""

from __future__ import annotations

import re

from pytest_colibri.errors import UsageError
from pytest_colibri.host.figures import within
from pytest_colibri.host.model import Accelerator, DeviceIdentity
from pytest_colibri.host.rocm_smi import kind_of
from pytest_colibri.host.tools import bounded, printable
from pytest_colibri.units import Figure

_GIB = 2**30
_MAX_DEVICES = 64


def parse_hipinfo(text: str) -> tuple[Accelerator, ...]:
    """Return the devices of the text. Raises UsageError for text without ``device#`` lines.

    What it calls the free memory of an APU is no budget, so that an APU is named and its memory is unknown.
    """
    parts = re.split(r"^device#\s+(\d{1,4})\s*$", bounded(text, "hipinfo"), flags=re.MULTILINE)
    indices, blocks = parts[1::2], parts[2::2]
    if not 0 < len(blocks) <= _MAX_DEVICES:
        raise UsageError(f"hipinfo: {len(blocks)} lines 'device#', allowed are 1 to {_MAX_DEVICES}")
    return tuple(_device(int(index), block) for index, block in zip(indices, blocks, strict=True))


def _device(index: int, block: str) -> Accelerator:
    name = printable(_value(block, "Name", "[^\n]*") or "AMD GPU")
    processor = _value(block, "gcnArchName", r"gfx[0-9a-f]{3,5}")
    device_type, pool = kind_of(processor, name)
    if _value(block, "isIntegrated", r"\d") == "1":
        device_type, pool = "integrated", "unified"
    identity = DeviceIdentity("rocm", index, name, None, _address(block))
    if pool == "unified":
        total = free = Figure(None, "hipInfo's figures of an APU are no budget")
    else:
        total, free = _figure(block, "memInfo.total"), _figure(block, "memInfo.free")
    return Accelerator(
        identity, "amd", device_type, "hip", pool, total, within(total, free), processor=processor
    )


def _figure(block: str, key: str) -> Figure:
    value = _value(block, key, r"\d{1,6}\.\d\d(?= GB\b)")
    if value is None:
        return Figure(None, f"hipInfo gives no {key}")
    # Its GB are 2^30 bytes, in two decimals.
    return Figure(round(float(value) * _GIB), f"hipInfo {key}")


def _address(block: str) -> str | None:
    numbers = [_value(block, key, r"\d{1,5}") for key in ("pciDomainID", "pciBusID", "pciDeviceID")]
    if None in numbers:
        return None
    domain, bus, device = (int(number or 0) for number in numbers)
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def _value(block: str, key: str, pattern: str) -> str | None:
    line = re.search(rf"^{re.escape(key)}:[ \t]*({pattern})", block, re.MULTILINE)
    return line[1] if line else None
