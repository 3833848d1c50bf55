"""What a person must know about a plan, in sentences that hold for every backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_colibri.host.devices import physical_devices
from pytest_colibri.host.model import Accelerator, Processor
from pytest_colibri.planner import budgets, division, environment
from pytest_colibri.planner.families import WITHOUT_CODE, family_of
from pytest_colibri.planner.plan import DeviceShare, Plan, PlanRequest
from pytest_colibri.units import Figure, format_bytes

IN_USE_PERCENT = 5


def warnings_of(plan: Plan, planned: Mapping[str, str]) -> tuple[str, ...]:
    """Return every warning of a plan; ``planned`` is the environment before the user's own values."""
    request, devices = plan.request, plan.devices
    return (
        *memory_notes(plan.limit, plan.ram_budget_bytes),
        *clamp_notes(plan),
        *processor_notes(request.host.processor),
        *contradiction_notes(request),
        *request_notes(request),
        *resident_notes(request, devices),
        *family_notes(request, devices),
        *(note for share in devices for note in device_notes(share)),
        *history_notes(request, devices, plan.hot_bytes),
        *disk_notes(plan.cold_bytes),
        *override_notes(planned, request.environment),
    )


def memory_notes(limit: Figure, ram_budget_bytes: int) -> tuple[str, ...]:
    """Say what an explicit RAM budget was not held against, or takes from the reserve."""
    if limit.bytes is None:
        return (
            f"the available memory is unknown ({limit.source}): the RAM budget of "
            f"{format_bytes(ram_budget_bytes)} is taken as asked for",
        )
    if ram_budget_bytes > budgets.automatic_ram_budget(limit.bytes):
        return (
            f"the RAM budget of {format_bytes(ram_budget_bytes)}, kept as asked for, leaves "
            f"{format_bytes(limit.bytes - ram_budget_bytes)} of {limit}",
        )
    return ()


def clamp_notes(plan: Plan) -> tuple[str, ...]:
    """Return a line for each explicit figure that could not be kept."""
    request = plan.request
    in_pool = sum(share.taken_bytes for share in plan.devices if budgets.shares_ram(share.accelerator))
    besides = f", beside the VRAM tier of {format_bytes(in_pool)} in the same memory" if in_pool else ""
    residents = plan.resident_bytes
    others = f", dense weights and attention {format_bytes(residents)}" if residents else ""
    ram = budgets.clamp_warning(
        "RAM",
        request.ram_bytes,
        plan.ram_budget_bytes,
        f"{budgets.POOL_PERCENT} % may be taken of {plan.limit}{besides}",
    )
    vram = budgets.clamp_warning(
        "VRAM",
        request.vram_bytes,
        plan.vram_budget_bytes + residents,
        f"the experts take {format_bytes(request.geometry.expert_bytes)}{others}, the devices can hold "
        f"{format_bytes(sum(division.usable_bytes(plan.devices)))}, and memory shared with the RAM is "
        "counted once",
    )
    return (*ram, *vram, *slots_note(request.slots_per_layer, plan.slots_per_layer))


def slots_note(asked: int | None, granted: int) -> tuple[str, ...]:
    """Say when fewer slots than asked for are planned."""
    if asked is None or granted >= asked:
        return ()
    return (f"slots per layer clamped from {asked} to {granted}: the cache or the experts allow no more",)


def processor_notes(processor: Processor) -> tuple[str, ...]:
    """Say when the number of threads rests on a guess."""
    return (f"physical cores: {processor.note}",) if processor.note else ()


def contradiction_notes(request: PlanRequest) -> tuple[str, ...]:
    """Say where interfaces contradict each other on a device that may plan."""
    asked = {device.identity for device in request.accelerators}
    return tuple(
        doubt
        for physical in physical_devices(request.host.accelerators)
        if any(view.identity in asked for view in physical.views)
        for doubt in physical.doubts
    )


def request_notes(request: PlanRequest) -> tuple[str, ...]:
    """Say why no device plans although the backend wants one."""
    if request.backend == "cpu":
        return ()
    if environment.switched_off(request):
        switch = environment.SWITCHES[request.backend]
        return (f"{switch}=0 is set: no GPU is planned",)
    notes = environment.visible(request).notes
    if not request.accelerators:
        notes = (*notes, f"no supported GPU for the {request.backend} backend: the CPU does all work")
    elif not environment.planned_accelerators(request):
        hidden = ", ".join(device.identity.name for device in request.accelerators)
        notes = (*notes, f"the engine does not see {hidden}: the CPU does all work")
    return notes


def resident_notes(request: PlanRequest, devices: Sequence[DeviceShare]) -> tuple[str, ...]:
    """Say that what the user puts on devices stays in the RAM where no device plans."""
    if devices:
        return ()
    return tuple(
        f"{name}={request.environment[name]} is set, and no device plans: the CPU keeps the {part}"
        for name, part in environment.resident_parts(request).items()
    )


def family_notes(request: PlanRequest, devices: Sequence[DeviceShare]) -> tuple[str, ...]:
    """Say when the public engine of the model's family has no code for the backend."""
    if not devices or request.backend not in WITHOUT_CODE.get(family_of(request.geometry), ()):
        return ()
    return (
        f"the public engine of the family {request.geometry.family} has no code for {request.backend}: with "
        "it, the CPU does all work",
    )


def device_notes(share: DeviceShare) -> tuple[str, ...]:
    """Say what is special about one device: a CPU device, an unknown or a busy memory."""
    device = share.accelerator
    name = device.identity.name
    notes = []
    if device.is_software:
        notes.append(f"{name} is a CPU device, not a GPU: its tier shows correctness, not speed")
    if device.pool is None:
        notes.append(f"{name}: whether it shares the RAM is unknown; its bytes are taken from the RAM")
    if share.usable.bytes is None:
        notes.append(f"{name}: usable memory unknown ({share.usable.source}); it gets no tier")
    elif share.usable.bytes == 0:
        reserve = format_bytes(share.reserve_bytes)
        notes.append(f"{name}: nothing is usable beside its reserve of {reserve} ({device.free}); no tier")
    return (*notes, *in_use_note(device), *staging_note(share))


def in_use_note(device: Accelerator) -> tuple[str, ...]:
    """Say when others hold a part of a device's own memory."""
    free, total = budgets.trusted_free(device).bytes, device.total.bytes
    if budgets.shares_ram(device) or free is None or total is None:
        return ()
    used = total - free
    if used * 100 <= total * IN_USE_PERCENT:
        return ()
    return (
        f"{device.identity.name}: {format_bytes(used)} of {format_bytes(total)} are in use by others already",
    )


def staging_note(share: DeviceShare) -> tuple[str, ...]:
    """Say when the CPU can write only a part of the device's own memory: the rest must be staged."""
    device = share.accelerator
    direct, local = budgets.directly_writable(device).bytes, budgets.largest_local_heap(device).bytes
    if budgets.shares_ram(device) or direct is None or local is None or direct >= local:
        return ()
    return (
        f"{device.identity.name}: {format_bytes(direct)} of {format_bytes(local)} device memory are "
        "host-visible (no Resizable BAR): a tier above that must be staged, or is cut to it by the engine",
    )


def history_notes(request: PlanRequest, devices: Sequence[DeviceShare], hot_bytes: int) -> tuple[str, ...]:
    """Say why a tier starts empty, or with less than its budget."""
    if not request.geometry.layers or request.vram_bytes == 0 or not environment.working_devices(devices):
        return ()
    if not any(count > 0 for count in request.usage.values()):
        return ("no usage history ranks the experts: the VRAM tier starts empty",)
    if not hot_bytes:
        return ("no expert of the usage history is of this model and fits: the VRAM tier starts empty",)
    idle = sum(share.budget_bytes for share in devices) - hot_bytes
    if idle < request.geometry.widest:
        return ()
    return (
        f"the VRAM tier starts with {format_bytes(hot_bytes)}, and {format_bytes(idle)} of its budget are "
        "idle: the usage history ranks no other expert that fits whole",
    )


def disk_notes(cold_bytes: int) -> tuple[str, ...]:
    """Say that misses may reach the disk."""
    if not cold_bytes:
        return ()
    return (f"{format_bytes(cold_bytes)} of experts stay on the disk: cold misses may reach it",)


def override_notes(planned: Mapping[str, str], user: Mapping[str, str]) -> tuple[str, ...]:
    """Name each planned variable that the user's own value replaces."""
    return tuple(
        f"{name}={user[name]} is set by the user and replaces the planned {value}"
        for name, value in planned.items()
        if name in user and user[name] != value
    )
