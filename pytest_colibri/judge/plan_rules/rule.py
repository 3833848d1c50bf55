"""What a rule for plans is: a sentence that must hold, and where it applies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from pytest_colibri.claims.plan import PlanStatement
from pytest_colibri.planner.plan import PlanRequest

Value = TypeVar("Value")

Faults = Callable[[PlanStatement, PlanRequest], Iterator[str]]
Applies = Callable[[PlanRequest], bool]


@dataclass(frozen=True)
class Rule:
    """One rule: ``faults`` yields a sentence with both figures for each way in which a plan breaks it.

    It is given what the planner states, and the request with the machine, the model and the devices as they
    were found without asking that planner. It raises Unstated where the plan lacks a figure that it needs.
    ``applies`` tells for which requests the rule says anything: where it does not, holding it would be no
    achievement. ``title`` is how reports call the rule.
    """

    name: str
    title: str
    faults: Faults
    applies: Applies

    def broken_by(self, statement: PlanStatement, request: PlanRequest) -> tuple[str, ...]:
        """Return how the plan breaks the rule; Unstated where it does not, as far as it states figures."""
        found: list[str] = []
        try:
            found.extend(self.faults(statement, request))
        except Unstated:
            if not found:
                raise
        return tuple(found)


class Unstated(Exception):
    """The plan does not state a figure, so that a rule can be neither held nor broken."""


def rule(title: str, applies: Applies = lambda _: True) -> Callable[[Faults], Rule]:
    """Make a rule of a function, whose name is that of the rule."""

    def made(faults: Faults) -> Rule:
        return Rule(faults.__name__, title, faults, applies)

    return made


def stated(value: Value | None, what: str) -> Value:
    """Return a figure that a rule needs; raises Unstated where the plan has none."""
    if value is None:
        raise Unstated(f"the plan does not state {what}")
    return value
