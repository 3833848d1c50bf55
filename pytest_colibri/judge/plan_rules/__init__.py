"""What holds for every plan, whoever made it.

Nothing here asks a planner again, so that a rule which the planner breaks is not broken here as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from pytest_colibri.claims.plan import PlanStatement
from pytest_colibri.judge.plan_rules import (
    devices,
    environment,
    family,
    machine,
    pool,
    ram,
    requests,
    residency,
    runtime,
    tiers,
    tuning,
    warnings,
)
from pytest_colibri.judge.plan_rules.refusal import refusal_is_right, why_refusal_is_open
from pytest_colibri.judge.plan_rules.rule import Rule, Unstated
from pytest_colibri.planner.plan import PlanRequest

__all__ = ["RULES", "broken_rules", "refusal_is_right", "why_refusal_is_open"]


def _rules_of(module: ModuleType) -> tuple[Rule, ...]:
    return tuple(value for value in vars(module).values() if isinstance(value, Rule))


MODULES = (
    *(machine, pool, devices, tiers),
    *(requests, ram, runtime, family, residency),
    *(environment, tuning, warnings),
)

RULES: Mapping[str, Rule] = {rule.name: rule for module in MODULES for rule in _rules_of(module)}


def broken_rules(statement: PlanStatement, request: PlanRequest) -> Mapping[str, str]:
    """Map the name of each rule that a plan breaks to the sentences that say how.

    Rules that say nothing here, or need a figure that the plan does not state, are left out.
    """
    broken = {}
    for rule in RULES.values():
        faults = _faults(rule, statement, request) if rule.applies(request) else ()
        if faults:
            broken[rule.name] = "; ".join(faults)
    return broken


def _faults(rule: Rule, statement: PlanStatement, request: PlanRequest) -> tuple[str, ...]:
    try:
        return rule.broken_by(statement, request)
    except Unstated:
        return ()
