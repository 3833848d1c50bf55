"""A seeded fault stands for every report that a planner decides, and each check of the report can fail."""

from __future__ import annotations

import pytest
from issue_faults import IssueTrials, checks_of, planner_issues
from planner_faults import FAULTS, faults_of

ISSUES = {issue.id: issue for issue in planner_issues()}


@pytest.fixture(scope="session")
def issue_trials(tmp_path_factory):
    return IssueTrials(tmp_path_factory.mktemp("issue-trials"))


def test_faults_stand_for_reports_of_the_registry():
    assert {report for fault in FAULTS.values() for report in fault.reports} == ISSUES.keys()


@pytest.mark.parametrize("issue", ISSUES)
def test_the_clean_planner_does_not_reproduce_a_report(issue, issue_trials):
    assert issue_trials.outcome(ISSUES[issue]).state == "not_reproduced"


@pytest.mark.parametrize("issue", ISSUES)
def test_each_fault_reproduces_its_report_and_together_they_break_all_its_checks(issue, issue_trials):
    outcomes = {name: issue_trials.outcome(ISSUES[issue], fault) for name, fault in faults_of(issue).items()}
    assert {name: outcome.state for name, outcome in outcomes.items()} == dict.fromkeys(
        outcomes, "reproduced"
    )
    unbroken = checks_of(ISSUES[issue]) - {
        broken for outcome in outcomes.values() for broken in outcome.broken
    }
    # On a machine that is too small by the report itself, no refusal is wrong.
    right = {"refusal_is_right"} if ISSUES[issue].machine.available_at_most is not None else set()
    assert {check for _, check in unbroken} == right


def test_a_planner_that_gives_no_answer_says_nothing_about_a_report_on_something_else(issue_trials):
    outcome = issue_trials.outcome(ISSUES["case-25"], FAULTS["ends at a family that it does not know"])
    assert outcome.state == "inconclusive"
    assert not outcome.broken
