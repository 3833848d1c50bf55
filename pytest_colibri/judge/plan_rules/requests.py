"""Rules about what was asked for: kept, or clamped aloud, and never raised again."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_colibri.claims.plan import PlanStatement
from pytest_colibri.judge.plan_rules.rule import rule, stated
from pytest_colibri.judge.plan_rules.telling import names_figures
from pytest_colibri.planner.plan import PlanRequest


def asks_for_ram(request: PlanRequest) -> bool:
    """Tell whether a RAM budget is asked for."""
    return request.ram_bytes is not None


def asks_for_vram(request: PlanRequest) -> bool:
    """Tell whether a VRAM budget is asked for."""
    return request.vram_bytes is not None


def asks_for_slots(request: PlanRequest) -> bool:
    """Tell whether a number of slots is asked for."""
    return request.slots_per_layer is not None


@rule("RAM budget asked for is kept", applies=asks_for_ram)
def explicit_ram_holds(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """An explicit RAM budget is never exceeded; one that is not met has a warning with both figures."""
    granted = statement.ram_budget_bytes
    yield from _compare("RAM", request.ram_bytes or 0, granted, statement)


@rule("VRAM budget asked for is kept", applies=asks_for_vram)
def explicit_vram_holds(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """An explicit VRAM budget bounds all that devices take; one not met has a warning with both figures."""
    granted = statement.vram_budget_bytes + (statement.resident_bytes or 0)
    yield from _compare("VRAM", request.vram_bytes or 0, granted, statement)


def _compare(what: str, asked: int, granted: int, statement: PlanStatement) -> Iterator[str]:
    if granted > asked:
        yield f"{what} budget of {granted} B exceeds the {asked} B asked for"
    figures = (asked, granted) if granted else (asked,)  # nothing has many names
    if granted < asked and not names_figures(statement.warnings, *figures):
        yield f"{what} budget of {granted} B instead of {asked} B, and no warning names both"


@rule("slots asked for are kept", applies=asks_for_slots)
def explicit_slots_hold(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """No more slots are planned than asked for."""
    slots = stated(statement.slots_per_layer, "slots per layer")
    if slots > (request.slots_per_layer or 0):
        yield f"{slots} slots per layer exceed the {request.slots_per_layer} asked for"


@rule("context is stated")
def context_is_stated(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """The plan says for how many tokens of context it was made: those that were asked for."""
    if stated(statement.context, "for which context it was made") != request.context:
        yield f"made for a context of {statement.context} tokens, and {request.context} were asked for"
