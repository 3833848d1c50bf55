"""Which of the devices that we found a planner means, and what it puts there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_colibri.claims.plan import DeviceStatement, PlanStatement
from pytest_colibri.container.families import BY_MODEL_TYPE
from pytest_colibri.host.model import Accelerator
from pytest_colibri.judge.plan_rules.rule import Unstated, stated
from pytest_colibri.planner.families import WITHOUT_CODE
from pytest_colibri.planner.plan import PlanRequest
from pytest_colibri.units import GB, Figure, smallest

DEVICE_RESERVE_BYTES = 2 * GB
MASKS = {"cuda": ("CUDA_VISIBLE_DEVICES",), "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")}
CHOICES = ("COLI_GPUS", "COLI_GPU")
SWITCHES = {"cuda": "COLI_CUDA", "rocm": "COLI_CUDA", "vulkan": "COLI_VULKAN", "metal": "COLI_METAL"}


def shares_ram(device: Accelerator) -> bool:
    """Tell whether a device may take its bytes from the RAM; where that is unknown, it may."""
    return device.pool != "discrete"


def is_switched_off(request: PlanRequest) -> bool:
    """Tell whether the user turned the backend off."""
    return request.environment.get(SWITCHES.get(request.backend, "")) == "0"


def asks_for_gpu(request: PlanRequest) -> bool:
    """Tell whether a GPU is to work."""
    return request.backend != "cpu" and not is_switched_off(request)


def lacks_code(request: PlanRequest) -> bool:
    """Tell whether the public engine of the model's family has no code for the backend."""
    family = BY_MODEL_TYPE.get(request.geometry.family)
    return family is not None and request.backend in WITHOUT_CODE.get(family.name, ())


def known_devices(request: PlanRequest) -> tuple[Accelerator, ...]:
    """Return the devices of the request, then the others that its backend shows on the machine."""
    asked = [device.identity for device in request.accelerators]
    others = (device for device in request.host.accelerators if device.identity.api == request.backend)
    return (*request.accelerators, *(device for device in others if device.identity not in asked))


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


def visible_accelerators(request: PlanRequest) -> tuple[Accelerator, ...]:
    """Return the GPUs of the request that the engine can see and the user chose; none where none may work."""
    if not asks_for_gpu(request) or lacks_code(request):
        return ()
    choice = next((request.environment[name] for name in CHOICES if request.environment.get(name)), None)
    chosen = None if choice is None else {entry.strip() for entry in choice.split(",")}
    return tuple(
        device
        for number, device in engine_numbers(request).items()
        if device in request.accelerators
        and not device.is_software
        and (chosen is None or str(number) in chosen)
    )


def usable_accelerators(request: PlanRequest) -> tuple[Accelerator, ...]:
    """Return the GPUs that must get work: visible, with memory beside a reserve.

    Those that share the RAM are left out where another has memory of its own. So is an AMD chip of unknown
    memory, since what its tools give is no budget.
    """
    visible = visible_accelerators(request)
    working = [device for device in visible if _has_room(device, request)]
    own = tuple(device for device in working if not shares_ram(device))
    return own or tuple(
        device
        for device in working
        if device.pool == "unified" and (device.vendor != "amd" or device.free.bytes is not None)
    )


def free_memory(device: Accelerator) -> Figure:
    """Return what is free on a device, bounded by its largest heap; more than its total is no figure."""
    if device.free.bytes is None or smallest(device.free, device.total) != device.free:
        return Figure(None, device.free.source)
    return smallest(device.free, largest_own_heap(device))


def share_of(device: Accelerator) -> Figure:
    """Return the most that a device may hold: what is free, or its total where that is not told."""
    return smallest(free_memory(device), device.total)


def tier_bound(device: Accelerator, request: PlanRequest) -> Figure:
    """Return what there is for a tier: one that shares the RAM need not report what is free."""
    if not shares_ram(device):
        return free_memory(device)
    pool = request.host.memory.limit
    return pool if pool.bytes is None else smallest(share_of(device), pool)


def _has_room(device: Accelerator, request: PlanRequest) -> bool:
    return (tier_bound(device, request).bytes or 0) > DEVICE_RESERVE_BYTES


def meant_device(device: DeviceStatement, request: PlanRequest) -> Accelerator | None:
    """Return the device that a number of the plan stands for, without one the only device of its name."""
    if device.number is not None:
        return engine_numbers(request).get(device.number)
    named = [one for one in known_devices(request) if one.identity.name == device.name]
    return named[0] if len(named) == 1 else None


def planned_devices(
    statement: PlanStatement, request: PlanRequest
) -> tuple[tuple[DeviceStatement, Accelerator | None], ...]:
    """Pair each device of the plan with the one that is meant, None where that is none, and it gets nothing.

    Raises Unstated where a device gets something, and nothing tells which one is meant.
    """
    pairs = tuple((device, meant_device(device, request)) for device in statement.devices)
    for device, found in pairs:
        if found is None and usable_bytes(device, statement):
            raise Unstated(f"the plan does not state which device {device.name} is")
    return pairs


def taken_bytes(device: DeviceStatement) -> int | None:
    """Return what the plan puts on a device beside its reserve, None where it does not say."""
    if device.budget_bytes is None:
        return 0 if device.usable_bytes == 0 else None
    return device.budget_bytes + (device.resident_bytes or 0)


def usable_bytes(device: DeviceStatement, statement: PlanStatement) -> int:
    """Return what the plan can put on a device: what it calls usable, else at least what it puts there."""
    if device.usable_bytes is not None:
        return device.usable_bytes
    taken = taken_bytes(device)
    if taken is None and statement.vram_budget_bytes == 0:
        return 0
    return stated(taken, f"what {device.name} has usable")


def working_devices(statement: PlanStatement) -> tuple[DeviceStatement, ...]:
    """Return the devices that the plan gives work to.

    Those that take something, as far as it says; where none does, the first with usable memory. Of devices
    of which it does not say so, those work that it exports as the engine's choice.
    """
    choice = next((statement.environment[name] for name in CHOICES if name in statement.environment), None)
    chosen = None if choice is None else choice.split(",")
    usable = tuple(device for device in statement.devices if usable_bytes(device, statement))
    working = tuple(
        device
        for device in usable
        if taken_bytes(device) or (taken_bytes(device) is None and _is_chosen(device, chosen))
    )
    return working or usable[:1]


def _is_chosen(device: DeviceStatement, chosen: Sequence[str] | None) -> bool:
    return chosen is None or device.number is None or str(device.number) in chosen


def shared_bytes(statement: PlanStatement, request: PlanRequest) -> int:
    """Return the least that the plan's devices take from the RAM.

    That is what it puts on those that share it, and what is left of its VRAM budget once devices with memory
    of their own took all they can.
    """
    shared = _shared_devices(statement, request)
    if not shared and not any(map(shares_ram, request.accelerators)):
        return 0
    own = sum(usable_bytes(device, statement) for device in statement.devices if device not in shared)
    total = statement.vram_budget_bytes + (statement.resident_bytes or 0)
    return max(total - own, sum(taken_bytes(device) or 0 for device in shared))


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
