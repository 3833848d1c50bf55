"""What the doctor says of a model on a machine: what the planner says, and nothing else."""

from __future__ import annotations

from pytest_colibri.errors import HostMismatch, UsageError
from pytest_colibri.findings import Finding, State
from pytest_colibri.planner.plan import DoesNotFit, Plan, PlanRequest
from pytest_colibri.planner.reference import plan, refuse_bad_figures
from pytest_colibri.units import Figure, format_bytes

CHECK = "placement.plan"


def placement(request: PlanRequest) -> tuple[tuple[Finding, ...], Plan | None]:
    """Return what is found of whether the model fits, and the plan, None where there is none.

    Raises UsageError for figures that no planner could answer.
    """
    refuse_bad_figures(request)
    try:
        answer = plan(request)
    except DoesNotFit as error:
        return (Finding(CHECK, "failed", str(error)),), None
    except HostMismatch as error:
        return (Finding(CHECK, "unknown", str(error)),), None
    except UsageError as error:
        lacking = Finding("container.config", "failed", str(error))
        return (lacking, no_placement("the rules of the family need more than config.json says")), None
    state: State = "warning" if answer.warnings else "ok"
    return (Finding(CHECK, state, _sentence(answer), _figures(answer)),), answer


def no_placement(because: str) -> Finding:
    """Return the finding for a model that cannot be asked about."""
    return Finding(CHECK, "unknown", f"no plan: {because}")


def _sentence(answer: Plan) -> str:
    budgets = f"RAM budget {format_bytes(answer.ram_budget_bytes)}"
    if answer.devices:
        budgets += f", VRAM budget {format_bytes(answer.vram_budget_bytes)}"
    fits = (
        f"it fits: {budgets}, {answer.slots_per_layer} slots per sparse layer, projected hit rate "
        f"{answer.hit_rate}, limited by {answer.bottleneck}"
    )
    return "; ".join((fits, *answer.warnings))


def _figures(answer: Plan) -> dict[str, Figure]:
    return {step.name: step.figure for step in answer.steps}
