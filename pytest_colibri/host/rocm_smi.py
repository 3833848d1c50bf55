"""AMD devices as ``rocm-smi`` lists them.

Recordings are the output of ``rocm-smi --showmeminfo vram gtt --showproductname --showbus --csv``.
"""

from __future__ import annotations

import csv
import re

from pytest_colibri.errors import UsageError
from pytest_colibri.host.figures import less
from pytest_colibri.host.model import Accelerator, DeviceIdentity
from pytest_colibri.host.tools import bounded, printable
from pytest_colibri.profiles.model import DeviceType, Pool
from pytest_colibri.units import Figure

ROCM_SMI = ("rocm-smi", "--showmeminfo", "vram", "gtt", "--showproductname", "--showbus", "--csv")

# The table of processors in LLVM's user guide of the AMDGPU target; gfx942 is both (MI300A, MI300X).
_INTEGRATED = frozenset(
    {"gfx902", "gfx909", "gfx90c", "gfx1013", "gfx1033", "gfx1035", "gfx1036", "gfx1103"}
    | {"gfx1150", "gfx1151", "gfx1152", "gfx1153"}
)
_DISCRETE = frozenset(
    {"gfx900", "gfx906", "gfx908", "gfx90a", "gfx950", "gfx1010", "gfx1011", "gfx1012", "gfx1030", "gfx1031"}
    | {"gfx1032", "gfx1034", "gfx1100", "gfx1101", "gfx1102", "gfx1200", "gfx1201"}
)
# AMD's product names, for processors that are not in the table and old tools that do not show them.
_INTEGRATED_NAME = re.compile(r"Graphics$|\bMI300A\b")
_DISCRETE_NAME = re.compile(r"\bRX\b|\bInstinct\b|\bPRO\b", re.IGNORECASE)


def parse_rocm_smi(text: str) -> tuple[Accelerator, ...]:
    """Return the devices of the CSV part of the text; ``rocm-smi`` writes warnings around it.

    The pool of an integrated device is GTT, the share of the RAM that the driver maps: its VRAM is a small
    carve-out. Raises UsageError when no table is found.
    """
    lines = bounded(text, "rocm-smi").splitlines()
    header = next((place for place, line in enumerate(lines) if line.startswith("device,")), None)
    if header is None:
        raise UsageError("rocm-smi: no line starts with 'device,'; use rocm-smi --csv")
    try:
        rows = list(csv.DictReader(lines[header:]))
    except csv.Error as error:
        raise UsageError(f"rocm-smi: {error}") from error
    return tuple(_device(row) for row in rows if re.fullmatch(r"card\d{1,4}", row["device"] or ""))


def _device(row: dict[str, str | None]) -> Accelerator:
    index = int((row["device"] or "").removeprefix("card"))
    name = _column(row, "Card Series", "Card series", "Device Name", "Card Model", "Card model")
    identity = DeviceIdentity("rocm", index, printable(name or "AMD GPU"), None, _pci(row))
    processor = _column(row, "GFX Version")
    device_type, pool = kind_of(processor, name or "")
    memory = "GTT" if pool == "unified" else "VRAM"
    total = _figure(row, f"{memory} Total Memory (B)")
    used = _figure(row, f"{memory} Total Used Memory (B)")
    return Accelerator(
        identity, "amd", device_type, "amdgpu", pool, total, less(total, used), processor=processor
    )


def kind_of(gfx: str | None, name: str) -> tuple[DeviceType, Pool | None]:
    """Return type and pool of an AMD device from its processor (``gfx1030``) and, failing that, its name."""
    if gfx in _INTEGRATED or (gfx not in _DISCRETE and _INTEGRATED_NAME.search(name)):
        return "integrated", "unified"
    if gfx in _DISCRETE or _DISCRETE_NAME.search(name):
        return "discrete", "discrete"
    return "other", None


def _figure(row: dict[str, str | None], key: str) -> Figure:
    value = _column(row, key)
    if value is None or not re.fullmatch(r"\d{1,18}", value):
        return Figure(None, f"rocm-smi gives no {key}")
    return Figure(int(value), f"rocm-smi {key}")


def _pci(row: dict[str, str | None]) -> str | None:
    address = (_column(row, "PCI Bus") or "").lower()
    return address if re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", address) else None


def _column(row: dict[str, str | None], *names: str) -> str | None:
    for name in names:
        value = (row.get(name) or "").strip()
        if value and value != "N/A":
            return value
    return None
