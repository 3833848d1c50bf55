"""Rules about the environment that makes an engine follow the plan."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_colibri.claims.plan import PlanStatement
from pytest_colibri.judge.plan_rules.rule import rule, stated
from pytest_colibri.planner.plan import PlanRequest
from pytest_colibri.units import GB

AFFINITY = ("OMP_PROC_BIND", "OMP_PLACES")
CHOICES = ("COLI_GPU", "COLI_GPUS")
GPU_VARIABLES = frozenset(
    {
        *CHOICES,
        "COLI_CUDA",
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
    if not (whole.isascii() and whole.isdigit()) or not (decimals == "" or decimals.isdigit()):
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
        budget, count = stated(budget, f"a budget for {name}"), exported_bytes(value)
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
        if count is not None and count > stated(budget, f"a budget for {name}"):
            yield f"{name}={value} is more than the budget of {budget} B"


@rule("one thread per physical core")
def threads_are_physical_cores(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """There is one thread for each physical core."""
    if "OMP_NUM_THREADS" in request.environment:
        return
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


@rule("exported devices can work")
def environment_asks_for_planned_devices(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """A GPU is asked for only where a device plans, and indices name planned devices only."""
    usable = {str(device.number) for device in statement.devices if device.usable_bytes}
    values = {name: exported(statement, request, name) for name in sorted(GPU_VARIABLES)}
    asking = {name: value for name, value in values.items() if value not in (None, "0")}
    if asking and not usable:
        yield f"{', '.join(asking)} exported, and no device with usable memory plans"
    for name in CHOICES:
        value = values[name]
        if value is not None and not set(value.split(",")) <= usable:
            yield f"{name}={value}, and the usable devices are {', '.join(sorted(usable)) or 'none'}"
