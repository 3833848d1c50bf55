"""A run stays within its memory plan, and leaves the machine what the plan left it."""

from __future__ import annotations

import pytest

from pytest_colibri.judge.dispatch import judge_device_memory
from pytest_colibri.judge.memory import judge_floor, judge_peak
from pytest_colibri.judge.model import Settle
from pytest_colibri.judge.trial import Trial

pytestmark = pytest.mark.colibri_engine


def test_peak_stays_within_the_plan(trial: Trial, colibri_settle: Settle) -> None:
    colibri_settle(trial.case, [judge_peak(trial.plan, trial.memory)])


def test_machine_keeps_its_reserve(trial: Trial, colibri_settle: Settle) -> None:
    colibri_settle(trial.case, [judge_floor(trial.plan, trial.memory)])


@pytest.mark.colibri_tier("vram")
def test_device_memory_stays_within_its_budget(trial: Trial, colibri_settle: Settle) -> None:
    colibri_settle(trial.case, [judge_device_memory(trial.plan, trial.sighting)])
