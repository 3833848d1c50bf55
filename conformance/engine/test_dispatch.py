"""An announced GPU tier dispatches: seen from outside, on its device, in its phase, piece by piece."""

from __future__ import annotations

import pytest

from pytest_colibri.judge.dispatch import (
    judge_counters,
    judge_device,
    judge_expert_tier,
    judge_placement,
    judge_residency,
)
from pytest_colibri.judge.model import Settle
from pytest_colibri.judge.trial import Trial, Trials
from pytest_colibri.planner.tiers import bytes_of_experts

pytestmark = [pytest.mark.colibri_engine, pytest.mark.colibri_tier("vram")]


def test_device_is_the_one_asked_for(
    finished_trial: Trial, colibri_trials: Trials, colibri_settle: Settle
) -> None:
    wanted = colibri_trials.accelerators[0]
    verdict = judge_device(finished_trial.statement, wanted, finished_trial.sighting)
    colibri_settle(finished_trial.case, [verdict])


def test_expert_tier_dispatches(placed_trial: Trial, colibri_trials: Trials, colibri_settle: Settle) -> None:
    trial = placed_trial
    wanted, shaders = colibri_trials.accelerators[0], colibri_trials.subject.shaders
    verdicts = judge_expert_tier(trial.statement, wanted, shaders, trial.sighting, trial.due)
    colibri_settle(trial.case, verdicts)


def test_planned_experts_are_on_the_device(placed_trial: Trial, colibri_settle: Settle) -> None:
    trial = placed_trial
    colibri_settle(trial.case, [judge_placement(trial.statement, trial.plan.hot_experts)])


def test_residents_are_allocated(placed_trial: Trial, colibri_trials: Trials, colibri_settle: Settle) -> None:
    trial = placed_trial
    wanted, sizes = colibri_trials.accelerators[0], bytes_of_experts(trial.plan.request.geometry)
    colibri_settle(trial.case, [judge_residency(trial.statement, wanted, sizes, trial.sighting)])


def test_own_counters_are_true(finished_trial: Trial, colibri_trials: Trials, colibri_settle: Settle) -> None:
    trial = finished_trial
    verdicts = judge_counters(trial.statement, colibri_trials.subject.shaders, trial.sighting)
    colibri_settle(trial.case, verdicts)


@pytest.fixture
def placed_trial(finished_trial: Trial) -> Trial:
    """Return a trial whose plan puts experts on the device; there is no tier to judge in any other."""
    if not finished_trial.plan.hot_experts:
        pytest.skip("no expert was planned for the device in this case")
    return finished_trial
