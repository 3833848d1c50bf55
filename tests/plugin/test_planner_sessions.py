"""Sessions that judge planners: on recorded machines, for one report, or for all of both."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from pytest_colibri.host.stage import Stage
from pytest_colibri.judge.issues import read_issues
from pytest_colibri.profiles.loader import find_profile, profile_names
from pytest_colibri.suite import registry_file

PLANNER = Path(__file__).parent / "planners" / "simple.py"
GB10 = ("--profile=gb10-114gb", "--emulate")


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)


def line(result: pytest.RunResult, start: str) -> str:
    found = [line for line in result.stdout.lines if line.startswith(start)]
    assert len(found) == 1, result.stdout.str() + result.stderr.str()
    return found[0]


def ask(pytester: pytest.Pytester, fault: str, *arguments: str) -> pytest.RunResult:
    if not Stage(find_profile("gb10-114gb"), pytester.path / "stage").is_complete:
        pytest.skip("this system lets no program see recorded files")
    return run(pytester, *GB10, f"--colibri-planner={sys.executable} {PLANNER} {fault}", *arguments)


def test_a_planner_with_the_reported_fault_reproduces_the_report(pytester: pytest.Pytester) -> None:
    result = ask(pytester, "counts the pool twice", "--issue=653")
    assert result.ret == 1
    assert "RAM 100.5 GB" in line(result, "issue 653, planner: reproduced: ")
    assert "no engine runs on an emulated host" in line(result, "issue 653, engine: inconclusive: ")
    assert line(result, "gb10-114gb: ") == (
        "gb10-114gb: issues: 1 reproduced, on an emulated host: this speaks of plans only (exit status 1)"
    )


def test_a_planner_without_it_does_not(pytester: pytest.Pytester) -> None:
    result = ask(pytester, "none", "--issue=653")
    assert result.ret == 0
    assert line(result, "issue 653, planner: not_reproduced: ")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("prints garbage", "wrote no JSON: 'RAM: plenty'"),
        ("crashes", "ended with status 1: RuntimeError: no plan today"),
        ("refuses", "need 19.7 GB, and 100.5 GB may be taken of 114.2 GB"),
    ],
)
def test_a_planner_that_gives_no_plan_settles_nothing(
    pytester: pytest.Pytester, fault: str, reason: str
) -> None:
    result = ask(pytester, fault, "--issue=653")
    assert result.ret == 6
    assert reason in line(result, "issue 653, planner: inconclusive: ")


@pytest.mark.parametrize("fault", ["prints garbage", "crashes", "refuses"])
def test_beside_a_report_no_plan_is_broken(pytester: pytest.Pytester, fault: str) -> None:
    assert ask(pytester, fault, "-k", "glm-mixed and automatic").ret == 1


def test_a_planner_that_states_little_is_judged_by_that(pytester: pytest.Pytester) -> None:
    result = ask(pytester, "none", "-k", "glm-mixed and automatic")
    verdicts = json.loads((pytester.path / "colibri-evidence.json").read_text())["verdicts"]
    states = {row["claim"]: row["state"] for row in verdicts}
    assert states["one pool is counted once"] == "held"
    assert states["every sparse layer has a slot"] == "not_claimed"
    assert result.ret == 1, "it exports no threads"


def test_several_reports_end_with_the_worst(pytester: pytest.Pytester) -> None:
    result = ask(pytester, "counts the pool twice", "--issue=653", "--issue=767", "--issue=487")
    assert result.ret == 1
    assert "issues: 1 reproduced, 1 inconclusive, 1 not_reproduced" in line(result, "gb10-114gb: ")


def test_the_embedded_planner_is_judged_alike(pytester: pytest.Pytester) -> None:
    result = run(pytester, *GB10, "--issue=653", "--issue=487")
    assert result.ret == 0, result.stdout.str()
    assert "issues: 2 not_reproduced" in line(result, "gb10-114gb: ")
    bundle = json.loads((pytester.path / "colibri-evidence.json").read_text())
    assert [issue["state"] for issue in bundle["issues"]] == [
        "not_reproduced",
        "inconclusive",
        "not_reproduced",
    ]
    assert {plan["case"] for plan in bundle["plans"]} == {
        "gb10-114gb: 653: glm-mixed",
        "gb10-114gb: 487: glm-mixed",
    }


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_a_report_of_which_questions_are_left_out_is_not_settled(
    pytester: pytest.Pytester, workers: tuple[str, ...]
) -> None:
    everywhere = ("--profile=all", "--emulate", "--issue=325", *workers)
    result = run(pytester, *everywhere, "-k", "not nvidia-cuda")
    assert result.ret == 6
    assert "questions left out: 1; of the others: " in line(result, "issue 325, planner: inconclusive: ")
    assert run(pytester, *everywhere).ret == 0


def test_reports_on_engines_are_inconclusive(pytester: pytest.Pytester) -> None:
    numbers = ("766", "767", "687", "856", "885", "848", "783", "887", "892", "813", "585")
    result = run(pytester, "--profile=all", "--emulate", *(f"--issue={number}" for number in numbers))
    assert result.ret == 6
    for number in numbers:
        assert "it would have to: " in line(result, f"issue {number}, engine: inconclusive: ")
    assert "issues: 11 inconclusive" in line(result, "all: ")


def test_a_report_on_an_engine_asks_for_its_machine_too(pytester: pytest.Pytester) -> None:
    result = run(pytester, *GB10, "--issue=848")
    assert result.ret == 7
    assert line(result, "issue 848, engine: not_applicable: it is about vulkan, and the profile is for cuda")


def test_a_report_on_another_kind_of_machine_is_not_applicable(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--profile=intel-vulkan", "--emulate", "--issue=759")
    assert result.ret == 7
    reason = "it is about cuda, and the profile is for vulkan"
    assert reason in line(result, "issue 759, planner: not_applicable: ")
    result = run(pytester, "--profile=nvidia-cuda", "--emulate", "--issue=759")
    assert result.ret == 7
    assert "unified memory" in line(result, "issue 759, planner: not_applicable: ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((*GB10, "--issue=795"), "--issue=795: unknown; nearest: 759"),
        (("--issue=759",), "--colibri-issue needs a machine: give --profile=NAME"),
        (("--profile=all",), "--profile=all needs --emulate"),
        ((*GB10, "--colibri=.", "--colibri-planner=true"), "name two planners: give one"),
        ((*GB10, "--colibri=."), "no c/resource_plan.py there; give the top folder of a colibri checkout"),
        (
            (*GB10, "--colibri-planner=no-such-planner"),
            "--colibri-planner='no-such-planner': no such program",
        ),
        (("--profile=",), "--colibri-profile: give a NAME, or leave the option out"),
    ],
)
def test_bad_options(pytester: pytest.Pytester, arguments: tuple[str, ...], expected: str) -> None:
    result = run(pytester, *arguments)
    assert result.ret == 4
    assert expected in result.stderr.str()
    assert "Traceback" not in result.stderr.str()


def test_issues_have_an_environment_twin(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLIBRI_ISSUE", "653 487")
    result = run(pytester, *GB10)
    assert "colibri: options: profile=gb10-114gb, emulate=True, issue=653, issue=487" in result.stdout.lines
    assert "issues: 2 not_reproduced" in line(result, "gb10-114gb: ")


def test_every_profile_and_every_report(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--profile=all", "--emulate", "-n2")
    assert result.ret == 0, result.stdout.str()
    conclusion = line(result, "all: ")
    count = re.fullmatch(
        r"all: (\d+) verdicts held, on an emulated host: this speaks of plans only \(exit status 0\)",
        conclusion,
    )
    assert count, conclusion
    bundle = json.loads((pytester.path / "colibri-evidence.json").read_text())
    assert int(count[1]) == len(bundle["verdicts"]) - sum(
        row["state"] == "not_claimed" for row in bundle["verdicts"]
    )
    assert {machine["profile"]["name"] for machine in bundle["machines"]} == set(profile_names())
    assert {plan["profile"] for plan in bundle["plans"]} == set(profile_names())
    asked = {issue.id for issue in read_issues(registry_file()) if issue.planner}
    assert {row["issue"] for row in bundle["verdicts"]} - {""} == asked


def test_a_checkout_is_judged_on_this_machine_by_its_planner_alone(pytester: pytest.Pytester) -> None:
    checkout = pytester.mkdir("checkout") / "c"
    checkout.mkdir()
    (checkout / "resource_plan.py").write_text(
        "def build_plan(model, ram_gb=0, context=4096, gpu_indices=None, vram_gb=0):\n"
        "    raise ValueError('this model does not fit')\n"
    )
    result = run(pytester, "--profile=cpu", f"--colibri={checkout.parent}", "-k", "glm-small and automatic")
    assert "left out: 98 engine checks, since only a planner is judged" in result.stdout.lines
    assert result.ret in (1, 6), "it refuses what would fit, unless this machine is small"
