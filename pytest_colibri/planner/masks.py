"""Masks: which devices a driver shows an engine, and by which numbers.

``CUDA_VISIBLE_DEVICES`` and ``HIP_VISIBLE_DEVICES`` restrict the devices and number them anew, in the order
of the mask. As in the drivers, an entry that names no device hides itself and all that follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_colibri.host.model import Accelerator
from pytest_colibri.profiles.model import Backend

MASKS: Mapping[Backend, tuple[str, ...]] = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
}
CHOICES = ("COLI_GPUS", "COLI_GPU")


Numbered = tuple[tuple[int, Accelerator], ...]


@dataclass(frozen=True)
class Visible:
    """The devices that an engine sees, each with the number it has for it, and what a person must know."""

    devices: Numbered
    notes: tuple[str, ...] = ()


def visible_devices(
    backend: Backend, known: Sequence[Accelerator], environment: Mapping[str, str]
) -> Visible:
    """Apply the masks and choices of the user's environment to all devices that are ``known``."""
    visible = Visible(tuple((device.identity.index, device) for device in known))
    if backend not in MASKS:
        return visible
    mask = next((name for name in MASKS[backend] if name in environment), None)
    if mask is not None:
        visible = _masked(mask, environment[mask], known)
    choice = next((name for name in CHOICES if environment.get(name)), None)
    return visible if choice is None else _chosen(choice, environment[choice], visible)


def _masked(name: str, mask: str, known: Sequence[Accelerator]) -> Visible:
    devices: list[Accelerator] = []
    entries = _entries(mask)
    notes = () if entries else (f"{name} is empty: no device is visible",)
    for entry in entries:
        device = _named(entry, known)
        if device is None or device in devices:
            notes = (f"{name}={mask}: {_end_of_mask(entry, repeated=device is not None)}",)
            break
        devices.append(device)
    return Visible(tuple(enumerate(devices)), notes)


def _end_of_mask(entry: str, *, repeated: bool) -> str:
    if entry.startswith("-"):
        return f"{entry} ends the list of visible devices"
    fault = "is named twice" if repeated else "was not found"
    return f"the device {entry} {fault}; it and all that follow are not visible"


def _named(entry: str, known: Sequence[Accelerator]) -> Accelerator | None:
    """Return the device with this index, or the only one whose UUID starts so."""
    if entry.isascii() and entry.isdigit():
        return next((device for device in known if device.identity.index == int(entry)), None)
    start = entry.lower().removeprefix("gpu-").replace("-", "")
    fitting = [device for device in known if start and (device.identity.uuid or "").startswith(start)]
    return fitting[0] if len(fitting) == 1 else None


def _chosen(name: str, choice: str, visible: Visible) -> Visible:
    """Keep the devices that the user chose for the engine, by the numbers that the mask gave them."""
    numbers = [int(entry) if entry.isascii() and entry.isdigit() else entry for entry in _entries(choice)]
    kept = tuple((number, device) for number, device in visible.devices if number in numbers)
    missing = set(numbers) - {number for number, _ in kept}
    notes = tuple(
        f"{name}={choice}: the device {number} was not found" for number in numbers if number in missing
    )
    return Visible(kept, (*visible.notes, *notes))


def _entries(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(",")] if text.strip() else []
