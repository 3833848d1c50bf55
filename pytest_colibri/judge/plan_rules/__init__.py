"""What holds for every plan, whoever made it.

Nothing here asks a planner again, so that a rule which the planner breaks is not broken here as well.
"""

from __future__ import annotations

from collections.abc import Mapping

from pytest_colibri.judge.plan_rules import pool
from pytest_colibri.judge.plan_rules.rule import Rule

RULES: Mapping[str, Rule] = {each.name: each for each in (pool.pool_is_counted_once,)}
