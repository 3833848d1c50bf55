"""Does the memory plan hold? Before a run by its own figures, after a run by what was sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pytest_colibri.claims.plan import PlanStatement, read_plan
from pytest_colibri.judge.model import Verdict
from pytest_colibri.judge.plan_rules import broken_rules
from pytest_colibri.planner.budgets import shares_ram
from pytest_colibri.planner.exchange import plan_to_json
from pytest_colibri.planner.plan import Plan
from pytest_colibri.units import format_bytes
from pytest_colibri.witness.evidence import MemoryEvidence, MemorySample

ENDED_TOO_SOON = "the process ended before the memory was sampled"


def planned_peak_bytes(plan: Plan) -> int:
    """Return the most RAM that the plan lets an engine use, the device's share of a unified pool included."""
    cache = plan.slots_per_layer * plan.request.geometry.bytes_per_slot
    shared = sum(share.taken_bytes for share in plan.devices if shares_ram(share.accelerator))
    return plan.dense_bytes + plan.runtime_bytes + cache + shared


def statement_of(plan: Plan) -> PlanStatement:
    """Return what a plan of this package states, read as that of any planner, and which experts are hot."""
    statement = read_plan(plan_to_json(plan), plan.environment)
    return replace(statement, hot_experts=plan.hot_experts)


def broken_rules_of(plan: Plan) -> Mapping[str, str]:
    """Map each rule that a plan of this package breaks to how it does."""
    return broken_rules(statement_of(plan), plan.request)


def judge_plan(plan: Plan) -> Verdict:
    """Judge the plan's budgets against the machine, before an engine is started."""
    title, place = "budgets fit the machine", "plan"
    pools = "one pool" if plan.unified else "RAM"
    advertised = f"RAM {format_bytes(plan.ram_budget_bytes)} + VRAM {format_bytes(plan.vram_budget_bytes)}"
    witnessed = f"{pools}: {plan.limit}, reserve {format_bytes(plan.reserve_bytes)}"
    violations = broken_rules_of(plan).values()
    witness = f"{plan.request.host.kind} host"
    if violations:
        return Verdict("broken", title, place, advertised, witnessed, witness, reason="; ".join(violations))
    return Verdict("held", title, place, advertised, witnessed, witness)


def judge_peak(plan: Plan, memory: MemoryEvidence) -> Verdict:
    """Judge the highest memory of the engine's process tree against the plan.

    The resident set counts pages that several processes share more than once, so that only a proportional
    figure taken at the same time can excuse one that is too high.
    """
    title = "peak memory"
    planned = planned_peak_bytes(plan)
    advertised = f"at most {format_bytes(planned)}"
    if not memory.samples:
        return Verdict("unwitnessed", title, "plan", advertised, "", memory.witness, reason=ENDED_TOO_SOON)
    peak = max(memory.samples, key=_least_possible_bytes)
    over = _least_possible_bytes(peak) - planned
    measure = "RSS" if peak.proportional_bytes is None else "PSS"
    witnessed = f"{format_bytes(_least_possible_bytes(peak))} ({measure} of the process tree)"
    if over > 0:
        reason = f"{format_bytes(over)} more than planned"
        return Verdict("broken", title, "plan", advertised, witnessed, memory.witness, reason=reason)
    return Verdict("held", title, "plan", advertised, witnessed, memory.witness)


def _least_possible_bytes(sample: MemorySample) -> int:
    return sample.tree_bytes if sample.proportional_bytes is None else sample.proportional_bytes


def judge_floor(plan: Plan, memory: MemoryEvidence) -> Verdict:
    """Judge whether the memory that others may need stayed free, through the whole run.

    A fall that the process tree does not show, of more than the whole plan, is nobody's: the engine may hold
    memory that no process owns, or another program may have taken it.
    """
    title = "available memory"
    advertised = f"never below {format_bytes(memory.floor_bytes)}"
    least = memory.least_available_bytes
    if least is None:
        missing = "no source gives the available memory of this machine"
        reason = missing if memory.samples else ENDED_TOO_SOON
        return Verdict("unwitnessed", title, "plan", advertised, "", memory.witness, reason=reason)
    witnessed = f"least {format_bytes(least)}"
    if memory.stopped_at_floor or least < memory.floor_bytes:
        reason = "the engine was stopped at the floor" if memory.stopped_at_floor else "the floor was crossed"
        return Verdict("broken", title, "plan", advertised, witnessed, memory.witness, reason=reason)
    fall = (memory.samples[0].available_bytes or least) - least
    if fall - memory.peak_tree_bytes > planned_peak_bytes(plan):
        reason = (
            f"{format_bytes(fall)} less became available, and the process tree shows no more than "
            f"{format_bytes(memory.peak_tree_bytes)} of it: who took the rest is not known"
        )
        return Verdict("unwitnessed", title, "plan", advertised, witnessed, memory.witness, reason=reason)
    return Verdict("held", title, "plan", advertised, witnessed, memory.witness)
