"""The plan on which an engine is run must fit the machine; a broken one is not run."""

from __future__ import annotations

import pytest

from pytest_colibri.errors import ColibriError
from pytest_colibri.judge.memory import judge_plan
from pytest_colibri.judge.model import Settle, Verdict
from pytest_colibri.judge.trial import Case, Trials
from pytest_colibri.planner.plan import DoesNotFit

TITLE = "budgets fit the machine"


@pytest.mark.colibri_engine
def test_budgets_fit_the_machine(case: Case, colibri_trials: Trials, colibri_settle: Settle) -> None:
    try:
        verdict = judge_plan(colibri_trials.plan(case))
    except DoesNotFit as refusal:
        verdict = Verdict("not_claimed", TITLE, "plan", "", "", "", reason=str(refusal))
    except ColibriError as error:
        verdict = Verdict("unwitnessed", TITLE, "plan", "", "", "", reason=str(error))
    colibri_settle(case, [verdict])
