"""An engine says what can be read, and leaves alone what is not its own."""

from __future__ import annotations

import pytest

from pytest_colibri.judge.ending import judge_model_folder, judge_protocol
from pytest_colibri.judge.model import Settle
from pytest_colibri.judge.trial import Trial

pytestmark = pytest.mark.colibri_engine


def test_events_can_be_read(finished_trial: Trial, colibri_settle: Settle) -> None:
    colibri_settle(finished_trial.case, [judge_protocol(finished_trial.statement)])


def test_model_folder_is_left_alone(trial: Trial, colibri_settle: Settle) -> None:
    colibri_settle(trial.case, [judge_model_folder(trial.model_changes)])
