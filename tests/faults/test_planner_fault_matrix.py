"""Every check of plans is proven able to fail: a planner with a fault, and the checks that must catch it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import planner_faults
import pytest
from issue_faults import planner_issues
from planner_faults import FAULTS, GLM, SMALL, Machine, matrix, of, verdicts

from pytest_colibri.judge.planning import CHECKS, REFUSAL
from pytest_colibri.profiles.loader import find_profile, profile_names

MACHINES = {name: fault.machine for name, fault in FAULTS.items()}
EMULATED = [name for name in profile_names() if find_profile(name).recordings]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_by_the_checks_that_name_it(fault):
    assert set(FAULTS[fault].caught_by) <= matrix()[fault].keys()


@pytest.mark.parametrize("fault", FAULTS)
def test_the_planner_without_the_fault_breaks_nothing_there(fault):
    assert verdicts(MACHINES[fault]) == {}


def test_every_check_has_a_fault_that_it_must_catch():
    assert {check for fault in FAULTS.values() for check in fault.caught_by} == set(CHECKS)


@pytest.mark.parametrize("model", [GLM, SMALL], ids=["glm", "small"])
@pytest.mark.parametrize("profile", EMULATED)
def test_the_planner_breaks_no_rule_on_any_machine_of_a_profile(profile, model):
    assert verdicts(of(profile, model)) == {}


def test_a_fault_is_gone_after_it_was_applied():
    fault = FAULTS["forgets the KV cache"]
    assert verdicts(fault.machine, fault) != {}
    assert verdicts(fault.machine) == {}


def test_a_refusal_of_what_fits_is_no_clean_answer():
    fault = FAULTS["refuses what fits"]
    assert "may be taken of" in verdicts(fault.machine, fault)[REFUSAL]


def test_a_refusal_of_what_cannot_fit_is_right():
    assert verdicts(Machine(profile="host-3gb")) == {}


def test_both_matrices_are_printed_by_one_command():
    script = Path(planner_faults.__file__)
    printed = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=True, cwd=script.parent
    ).stdout.splitlines()
    reports, pairs = len(planner_issues()), sum(len(fault.reports) for fault in FAULTS.values())
    assert printed[-1] == (
        f"{len(FAULTS)} of {len(FAULTS)} faults caught; {reports} of {reports} reports reproduced by their "
        "fault, and none by the clean planner"
    )
    assert len(printed) == len([*CHECKS, *"12", *FAULTS, "", "", printed[-1]]) + reports + pairs
