"""Rules about the environment that makes an engine follow the plan."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_colibri.claims.plan import PlanStatement
from pytest_colibri.judge.plan_rules.found import CHOICES, is_switched_off, working_devices
from pytest_colibri.judge.plan_rules.pool import available_bytes
from pytest_colibri.judge.plan_rules.rule import rule, stated
from pytest_colibri.planner.plan import PlanRequest
from pytest_colibri.units import GB

AFFINITY = ("OMP_PROC_BIND", "OMP_PLACES")
GPU_VARIABLES = frozenset(
    {
        *CHOICES,
        "COLI_CUDA",
        "COLI_CUDA_PIPE",
        "COLI_METAL",
        "COLI_VULKAN",
        "COLI_VK_EXPERTS",
        "CUDA_DEVICE_ORDER",
        "CUDA_EXPERT_GB",
    }
)
EXPORT_STEP_BYTES = GB // 1000


def has_user_values(request: PlanRequest) -> bool:
    """Tell whether the user set variables."""
    return bool(request.environment)


def exported_bytes(text: str) -> int | None:
    """Return an exported number of GB in bytes, None for text that is no such number."""
    whole, _, decimals = text.partition(".")
    if not text.isascii() or not whole.isdigit() or not (decimals == "" or decimals.isdigit()):
        return None
    return int(whole) * GB + int(decimals[:9].ljust(9, "0"))


def exported(statement: PlanStatement, request: PlanRequest, name: str) -> str | None:
    """Return what the planner itself exports under a name; the user's own values are his."""
    return None if name in request.environment else statement.environment.get(name)


@rule("exported budgets are the planned ones")
def environment_keeps_budgets(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """What is exported is the plan, to a thousandth of a GB."""
    bounds = {"RAM_GB": statement.ram_budget_bytes, "CUDA_EXPERT_GB": statement.vram_budget_bytes}
    for name, budget in bounds.items():
        value = exported(statement, request, name)
        if value is None:
            continue
        count = exported_bytes(value)
        if count is None or not budget - EXPORT_STEP_BYTES < count < budget + EXPORT_STEP_BYTES:
            yield f"{name}={value} is no figure of the budget of {budget} B"
    experts, hot = exported(statement, request, "COLI_VK_EXPERTS"), statement.hot_count
    if experts is not None and experts != str(stated(hot, "the number of hot experts")):
        yield f"COLI_VK_EXPERTS={experts}, and {hot} hot experts are planned"


@rule("exported budgets are rounded down")
def exports_are_rounded_down(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """No budget grows on export."""
    bounds = {"RAM_GB": statement.ram_budget_bytes, "CUDA_EXPERT_GB": statement.vram_budget_bytes}
    for name, budget in bounds.items():
        value = exported(statement, request, name)
        count = None if value is None else exported_bytes(value)
        if count is not None and count > budget:
            yield f"{name}={value} is more than the budget of {budget} B"


def has_known_cores(request: PlanRequest) -> bool:
    """Tell whether the cores are known, and not guessed."""
    return request.host.processor.note is None


@rule("exported RAM is there")
def exported_ram_is_there(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """No engine is told more RAM than is available, or than was asked for."""
    value = exported(statement, request, "RAM_GB")
    count = stated(None if value is None else exported_bytes(value), "RAM_GB")
    memory = request.host.memory.limit
    if memory.bytes is not None and count > available_bytes(request):
        yield f"RAM_GB={value}, and {memory} is available"
    if request.ram_bytes is not None and count > request.ram_bytes + EXPORT_STEP_BYTES:
        yield f"RAM_GB={value}, and {request.ram_bytes} B were asked for"


@rule("physical cores are counted", applies=has_known_cores)
def cores_are_physical(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """Cores are distinct (core, socket) pairs: siblings of simultaneous multithreading count once."""
    cores, processor = stated(statement.physical_cores, "physical cores"), request.host.processor
    if cores != processor.physical_cores:
        yield f"{cores} physical cores, and {processor.source} shows {processor.physical_cores}"


@rule("sockets are counted", applies=has_known_cores)
def sockets_are_counted(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """Sockets are those of the processors that are online."""
    sockets, processor = stated(statement.sockets, "sockets"), request.host.processor
    if sockets != processor.sockets:
        yield f"{sockets} sockets, and {processor.source} shows {processor.sockets}"


def leaves_threads_open(request: PlanRequest) -> bool:
    """Tell whether the number of threads is for the planner to choose."""
    return has_known_cores(request) and "OMP_NUM_THREADS" not in request.environment


@rule("one thread per physical core", applies=leaves_threads_open)
def threads_are_physical_cores(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """There is one thread for each physical core."""
    cores = request.host.processor.physical_cores
    threads = stated(statement.environment.get("OMP_NUM_THREADS"), "a number of threads")
    if threads != str(cores):
        yield f"OMP_NUM_THREADS={threads}, and there are {cores} physical cores"


@rule("thread affinity is left alone")
def affinity_is_left_alone(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """No affinity is exported: it put all threads on one core."""
    for name in AFFINITY:
        value = exported(statement, request, name)
        if value is not None:
            yield f"{name}={value} is exported; thread affinity must be left alone"


@rule("the user's variables win", applies=has_user_values)
def environment_keeps_user_values(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """What the user set explicitly wins."""
    for name, value in request.environment.items():
        given = statement.environment.get(name, value)
        if given != value:
            yield f"{name}={given} instead of {value}, which the user set"


@rule("hints are not exported")
def environment_exports_no_hints(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """A name that starts with ``_`` is a hint for a person."""
    for name, value in statement.environment.items():
        if name.startswith("_") and name not in request.environment:
            yield f"the hint {name}={value} is exported"


@rule("exported devices work")
def environment_asks_for_planned_devices(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """A GPU is asked for only where a device plans, and numbers name devices only that get work."""
    devices = working_devices(statement)
    values = {name: exported(statement, request, name) for name in sorted(GPU_VARIABLES)}
    asking = [name for name, value in values.items() if value not in (None, "0")]
    if asking and not devices:
        yield f"{', '.join(asking)} exported, and no device with usable memory plans"
    for name in CHOICES:
        value = values[name]
        if value is None:
            continue
        working = {str(stated(device.number, f"the engine's number for {device.name}")) for device in devices}
        if not set(value.split(",")) <= working:
            yield f"{name}={value}, and the devices that get work are {', '.join(sorted(working)) or 'none'}"


@rule("a backend switched off is left off", applies=is_switched_off)
def switched_off_exports_nothing(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """Where the user switched the backend off, nothing is exported for it."""
    values = {name: exported(statement, request, name) for name in sorted(GPU_VARIABLES)}
    for name, value in values.items():
        if value not in (None, "0"):
            yield f"{name}={value} is exported, and the user switched the backend off"


@rule("quality is told as it is")
def policy_preserves_quality(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:  # noqa: ARG001
    """Every policy but experimental-fast preserves quality."""
    policy = stated(statement.policy, "a policy")
    preserved = stated(statement.quality_preserving, "whether it preserves quality")
    if preserved != (policy != "experimental-fast"):
        yield f"the policy {policy} is said to {'preserve' if preserved else 'change'} quality"


def has_unknown_disk(request: PlanRequest) -> bool:
    """Tell whether the free space of the model's file system is unknown."""
    return request.disk_free.bytes is None


@rule("unknown disk space is not invented", applies=has_unknown_disk)
def disk_is_not_invented(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """Free disk space that nothing tells is not stated."""
    if statement.disk_bytes is not None:
        yield f"{statement.disk_bytes} B of free disk space, and it is {request.disk_free}"
