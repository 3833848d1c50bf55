"""What a planner answers about a machine must be true of it: ours, a checkout's, or that of any program."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from pytest_colibri.judge.model import Settle
from pytest_colibri.judge.planning import PlanCase, PlanTrials
from pytest_colibri.planner.environment import engine_variables
from pytest_colibri.plugin.session import ColibriSession


def test_plan_is_true_of_the_machine(
    plan_question: tuple[str | None, PlanCase],
    models: Callable[[str], Path],
    colibri_session: ColibriSession,
    colibri_plan_trials: PlanTrials,
    colibri_settle: Settle,
    colibri_not_applicable: Callable[[str, str], None],
) -> None:
    profile_name, case = plan_question
    profile, host = colibri_session.machine(profile_name)
    if mismatch := colibri_session.why_not_applicable(case.issue, profile, host):
        colibri_not_applicable(case.issue, mismatch)
    user = {} if colibri_session.emulated else engine_variables(os.environ)
    verdicts = colibri_plan_trials.judge(case, profile, host, models(case.model), user)
    if not verdicts:
        colibri_not_applicable(case.issue, "none of its checks says anything about this machine")
    colibri_settle(f"{profile.name}: {case.name}", verdicts)
