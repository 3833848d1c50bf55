"""An engine computes what the model says, whichever tier serves the experts."""

from __future__ import annotations

import pytest

from pytest_colibri.judge.model import Settle
from pytest_colibri.judge.tokens import judge_generated, judge_scored
from pytest_colibri.judge.trial import Trial

pytestmark = pytest.mark.colibri_engine


def test_generated_tokens(finished_trial: Trial, colibri_settle: Settle) -> None:
    wanted, source = finished_trial.tokens_wanted
    prompt_length = len(finished_trial.case.reference.prompt)
    verdict = judge_generated(finished_trial.statement, prompt_length, wanted, source)
    colibri_settle(finished_trial.case, [verdict])


def test_scored_positions(finished_trial: Trial, colibri_settle: Settle) -> None:
    wanted, source = finished_trial.tokens_wanted
    colibri_settle(finished_trial.case, [judge_scored(finished_trial.statement, wanted, source)])


def test_reference_tokens_on_the_cpu(finished_trial: Trial, colibri_settle: Settle) -> None:
    """The embedded engine on the CPU, whose routing says what a tier must dispatch, is right itself."""
    reference = finished_trial.case.reference
    if not reference.generated:
        pytest.skip("no other program has computed the tokens of this model")
    verdict = judge_generated(
        finished_trial.reference.statement,
        len(reference.prompt),
        reference.generated,
        reference.source,
        title="reference on the CPU",
    )
    colibri_settle(finished_trial.case, [verdict])
