"""Rules about the family of a model: what it caches is counted by its own rules.

They are those of ``planner/families.py``, which ``tests/planner/test_family_rules.py`` works out by hand.
"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_colibri.claims.plan import PlanStatement
from pytest_colibri.errors import ColibriError
from pytest_colibri.judge.plan_rules.rule import rule, stated
from pytest_colibri.planner import runtime
from pytest_colibri.planner.plan import PlanRequest


def _runtime_bytes(request: PlanRequest) -> int | None:
    """Return what a run needs beside weights and cached experts, None without rules for the family."""
    try:
        return sum(part.bytes or 0 for part in runtime.runtime_parts(request).values())
    except ColibriError:
        return None


def has_memory_rules(request: PlanRequest) -> bool:
    """Tell whether it is known how the memory of this model grows."""
    return _runtime_bytes(request) is not None


@rule("runtime holds caches and workspace", applies=has_memory_rules)
def runtime_holds_caches(statement: PlanStatement, request: PlanRequest) -> Iterator[str]:
    """The runtime has room for every slot's cache and state, those of an indexer too, and the workspace."""
    counted, needed = stated(statement.runtime_bytes, "the runtime"), _runtime_bytes(request) or 0
    if counted < needed:
        yield (
            f"runtime of {counted} B, and {request.kv_slots} slots of {request.context} tokens of "
            f"{request.geometry.family} need {needed} B with their workspace, by {needed - counted} B more"
        )
