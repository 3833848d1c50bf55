"""Which of the devices that we found a planner means, and what it puts there."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_colibri.claims.plan import DeviceStatement, PlanStatement
from pytest_colibri.host.model import Accelerator
from pytest_colibri.judge.plan_rules.rule import stated
from pytest_colibri.planner.plan import PlanRequest
from pytest_colibri.units import Figure

MASKS = {"cuda": ("CUDA_VISIBLE_DEVICES",), "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")}


def shares_ram(device: Accelerator) -> bool:
    """Tell whether a device may take its bytes from the RAM; where that is unknown, it may."""
    return device.pool != "discrete"


def known_devices(request: PlanRequest) -> tuple[Accelerator, ...]:
    """Return the devices of the request, then the others that its backend shows on the machine."""
    others = (device for device in request.host.accelerators if device.identity.api == request.backend)
    return (*request.accelerators, *(device for device in others if device not in request.accelerators))


def mask_of(request: PlanRequest) -> str | None:
    """Return the user's mask of visible devices, None without one."""
    user = request.environment
    return next((user[name] for name in MASKS.get(request.backend, ()) if name in user), None)


def engine_numbers(request: PlanRequest) -> Mapping[int, Accelerator]:
    """Map the engine's number of each device that it can see to the device.

    Under a mask that is the place in it; an entry that names no device hides itself and all that follow.
    """
    known, mask = known_devices(request), mask_of(request)
    if mask is None:
        return {device.identity.index: device for device in reversed(known)}
    visible: dict[int, Accelerator] = {}
    for number, entry in enumerate(mask.split(",")):
        named = [device for device in known if _names(entry.strip().lower(), device)]
        if len(named) != 1 or named[0] in visible.values():
            break
        visible[number] = named[0]
    return visible


def _names(entry: str, device: Accelerator) -> bool:
    start = entry.removeprefix("gpu-").replace("-", "")
    if entry.isascii() and entry.isdigit():
        return device.identity.index == int(entry)
    return start != "" and (device.identity.uuid or "").startswith(start)


def planned_devices(
    statement: PlanStatement, request: PlanRequest
) -> tuple[tuple[DeviceStatement, Accelerator | None], ...]:
    """Pair each device of the plan with the one that its number stands for, None where none does.

    A device without a number is the only one of its name.
    """
    numbers = engine_numbers(request)

    def meant(device: DeviceStatement) -> Accelerator | None:
        if device.number is not None:
            return numbers.get(device.number)
        named = [one for one in known_devices(request) if one.identity.name == device.name]
        return named[0] if len(named) == 1 else None

    return tuple((device, meant(device)) for device in statement.devices)


def taken_bytes(device: DeviceStatement) -> int | None:
    """Return what the plan puts on a device beside its reserve, None where it does not say."""
    if device.budget_bytes is None:
        return 0 if device.usable_bytes == 0 else None
    return device.budget_bytes + (device.resident_bytes or 0)


def shared_bytes(statement: PlanStatement, request: PlanRequest) -> int:
    """Return the least that the plan's devices take from the RAM.

    Where it does not say how much each device takes, those with memory of their own take all they can.
    """
    shared = _shared_devices(statement, request)
    taken = [taken_bytes(device) for device in shared]
    if None not in taken:
        return sum(count or 0 for count in taken)
    own = sum(device.usable_bytes or 0 for device in statement.devices if device not in shared)
    total = stated(statement.vram_budget_bytes, "a VRAM budget") + (statement.resident_bytes or 0)
    return max(0, total - own)


def shared_reserve_bytes(statement: PlanStatement, request: PlanRequest) -> int:
    """Return what devices that take bytes from the RAM leave there beside them, for their own use."""
    shared = _shared_devices(statement, request)
    return sum(device.reserve_bytes or 0 for device in shared if taken_bytes(device))


def _shared_devices(statement: PlanStatement, request: PlanRequest) -> list[DeviceStatement]:
    devices = planned_devices(statement, request)
    return [device for device, found in devices if found is None or shares_ram(found)]


def largest_own_heap(device: Accelerator) -> Figure:
    """Return the largest heap of a device with memory of its own: heaps are not to be summed."""
    sizes = [heap.size_bytes for heap in device.heaps if heap.device_local]
    return Figure(max(sizes) if sizes and not shares_ram(device) else None, "device-local heaps")
