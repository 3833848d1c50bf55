"""Any program can be a planner under test: it answers, refuses, or fails with a sentence that says how."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

import psutil
import pytest

from pytest_colibri.container.tiny import write_tiny_model
from pytest_colibri.errors import UsageError
from pytest_colibri.host.emulated import emulate_host
from pytest_colibri.host.stage import Stage
from pytest_colibri.profiles.loader import find_profile
from pytest_colibri.subjects.planner import PlannerRequest
from pytest_colibri.subjects.planner_program import STDERR_TAIL, ProgramPlanner, planner_program
from pytest_colibri.subjects.reference_planner import ReferencePlanner

PAGE = Path(__file__).parents[2] / "docs" / "planner-protocol.md"
PLAN = '{"plan": {"version": 2}, "environment": {"RAM_GB": "1.000"}}'


def program(code: str, timeout_s: float = 10) -> ProgramPlanner:
    return ProgramPlanner("mine", "a test", (sys.executable, "-c", code), timeout_s=timeout_s)


def says(text: str, status: int = 0) -> ProgramPlanner:
    return program(f"print({text!r}); raise SystemExit({status})")


@pytest.fixture
def request_here(tmp_path: Path) -> PlannerRequest:
    return PlannerRequest(tmp_path, "cuda")


@pytest.fixture
def documented_planner(tmp_path: Path) -> ProgramPlanner:
    block = re.search(r"<!-- file: planner\.py -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block
    (tmp_path / "planner.py").write_text(block[1])
    return planner_program(f"{sys.executable} {tmp_path / 'planner.py'}")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    if os.name != "posix":
        pytest.skip("a stage replays tools by scripts")
    stage = Stage(find_profile("nvidia-cuda"), tmp_path_factory.mktemp("stage"))
    if not stage.is_complete:
        pytest.skip(stage.reach)
    return stage


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "int4-grouped")


def test_the_documented_planner_plans_for_the_staged_machine(
    documented_planner: ProgramPlanner, stage: Stage, model: Path
) -> None:
    available = emulate_host(stage.profile).memory.available.bytes
    assert available is not None
    answer = documented_planner.ask(PlannerRequest(model, "cpu", environment={"PIN": "x"}), stage)
    assert answer.plan is not None, answer
    ram = answer.plan["tiers"]["ram"]  # type: ignore[index]
    assert ram == {"available_bytes": available, "budget_bytes": available * 88 // 100}
    assert answer.environment == {"PIN": "x", "RAM_GB": f"{available * 88 // 100 // 10**6 / 1000:.3f}"}


def test_the_documented_planner_refuses_what_does_not_fit(
    documented_planner: ProgramPlanner, stage: Stage, model: Path
) -> None:
    answer = documented_planner.ask(PlannerRequest(model, "cpu", ram_bytes=1000), stage)
    assert answer.refused is not None
    assert answer.refused.endswith("bytes of model do not fit 1000 bytes of memory")


def test_the_page_names_each_key_of_a_request(tmp_path: Path) -> None:
    reads = program("import json, sys; print(json.dumps({'refused': ' '.join(json.load(sys.stdin))}))")
    keys = reads.ask(PlannerRequest(tmp_path, "cpu")).refused
    assert keys is not None
    table = PAGE.read_text().partition("## The request")[2].partition("## The answer")[0]
    named = [
        name for line in re.findall(r"^\| (`.+?) \|", table, re.M) for name in re.findall(r"`(\w+)`", line)
    ]
    assert named == keys.split()


def test_a_plan_comes_with_its_environment(request_here: PlannerRequest) -> None:
    answer = says(PLAN).ask(request_here)
    assert (answer.plan, answer.environment, answer.failed) == ({"version": 2}, {"RAM_GB": "1.000"}, None)


def test_the_user_s_variables_replace_those_of_this_process(
    request_here: PlannerRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLI_GPU", "3")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1")
    tells = program(
        "import json, os; names = ('COLI_GPU', 'RAM_GB', 'ROCR_VISIBLE_DEVICES')\n"
        "print(json.dumps({'refused': str([os.environ.get(name) for name in names])}))"
    )
    answer = tells.ask(PlannerRequest(request_here.model, "cuda", environment={"RAM_GB": "9"}))
    assert answer.refused == "[None, '9', '1']"


def test_masks_of_this_machine_are_no_part_of_a_stage(
    stage: Stage, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1")
    tells = program("import os; print('{\"refused\": \"mask %s\"}' % os.environ.get('ROCR_VISIBLE_DEVICES'))")
    assert tells.ask(PlannerRequest(model, "rocm"), stage).refused == "mask None"
    asked = PlannerRequest(model, "rocm", environment={"ROCR_VISIBLE_DEVICES": "0"})
    assert tells.ask(asked, stage).refused == "mask 0"


@pytest.mark.parametrize("status", [0, 1, 2])
def test_a_refusal_may_have_any_status(status: int, request_here: PlannerRequest) -> None:
    answer = says('{"refused": "does not fit, by 9 bytes"}', status).ask(request_here)
    assert (answer.refused, answer.failed) == ("does not fit, by 9 bytes", None)


def test_what_a_planner_has_no_input_for_is_no_refusal(request_here: PlannerRequest) -> None:
    answer = says('{"unsupported": "no kv_slots"}').ask(request_here)
    assert (answer.unsupported, answer.refused) == ("no kv_slots", None)


@pytest.mark.parametrize(
    ("code", "failed"),
    [
        ("pass", "the planner wrote nothing to standard output"),
        ("print('hello')", "the planner wrote no JSON: 'hello'"),
        ("print('[1]')", "the planner wrote no JSON object: '[1]'"),
        ("print('[' * 100000)", "the planner wrote no JSON: "),
        (
            "print('{\"plan\":' + '[' * 900 + ']' * 900 + '}')",
            "the planner wrote JSON that nests deeper than 32: ",
        ),
        ("print('{\"plan\": NaN}')", "the planner wrote no JSON: "),
        ("print('x' * 5000000)", "the planner wrote more than 4 MiB to standard output"),
        ("import os; os.write(1, bytes([255, 254]))", "the planner wrote no JSON: "),
        ("print('{}')", "the planner answered with none of plan, refused, unsupported, not one"),
        (
            'print(\'{"plan": {}, "refused": "no"}\')',
            "the planner answered with plan and refused of plan, refused, unsupported, not one",
        ),
        ('print(\'{"refused": " "}\')', "the planner gives no sentence as 'refused'"),
        ("print('{\"refused\": 1}')", "the planner gives no sentence as 'refused'"),
        ("print('{\"plan\": 1}')", "the planner gives a plan that is no object"),
        ('print(\'{"plan": {"version": 1}}\')', "the planner gives a plan of version 1; 2 is understood"),
        ('print(\'{"plan": {"version": 2}}\')', "the planner gives no environment of names and texts"),
        (
            'print(\'{"plan": {"version": 2}, "environment": {"A": 1}}\')',
            "the planner gives no environment of names and texts",
        ),
        ("import sys; sys.exit('no\\nreason')", "the planner ended with status 1: reason"),
        (
            f"print({PLAN!r}); raise SystemExit(3)",
            "the planner ended with status 3: nothing on standard error",
        ),
        ("print('{'); raise SystemExit(3)", "the planner ended with status 3: nothing on standard error"),
    ],
)
def test_anything_else_is_a_failure_that_is_told(
    code: str, failed: str, request_here: PlannerRequest
) -> None:
    answer = program(code).ask(request_here)
    assert answer.failed is not None
    assert answer.failed.startswith(failed)
    assert (answer.plan, answer.refused, answer.unsupported) == (None, None, None)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_signal_is_told(request_here: PlannerRequest) -> None:
    answer = program("import os; os.kill(os.getpid(), 11)").ask(request_here)
    assert answer.failed == "the planner ended by signal 11: nothing on standard error"


def test_a_planner_that_hangs_is_ended_with_its_children(
    request_here: PlannerRequest, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)"
    )
    answer = program(code, timeout_s=2).ask(request_here)
    assert answer.failed == "the planner gave no answer within 2 seconds"
    assert_ends(int(pid_file.read_text()))


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_is_bounded_and_ended(stream: str, request_here: PlannerRequest) -> None:
    code = f"import sys\nwhile True: sys.{stream}.write('x' * 65536)"
    answer = program(code, timeout_s=2).ask(request_here)
    assert answer.failed == "the planner gave no answer within 2 seconds"
    assert len(answer.stderr) <= STDERR_TAIL


@pytest.mark.skipif(os.name != "posix", reason="process groups")
def test_a_child_that_left_the_group_does_not_hold_up_the_answer(request_here: PlannerRequest) -> None:
    code = (
        "import json, subprocess, sys\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "child = subprocess.Popen(sleep, start_new_session=True)\n"
        "print(json.dumps({'refused': str(child.pid)}))"
    )
    refused = program(code, timeout_s=50).ask(request_here).refused
    assert refused is not None
    child = psutil.Process(int(refused))
    child.kill()
    assert_ends(child.pid)


def test_sentences_of_a_planner_cannot_write_to_the_terminal(request_here: PlannerRequest) -> None:
    for outcome in ("refused", "unsupported"):
        answer = says(f'{{"{outcome}": "\\u001b[2Jno memory \\ud800"}}').ask(request_here)
        assert getattr(answer, outcome) == "?[2Jno memory ?"


@pytest.mark.skipif(os.name != "posix", reason="process groups")
def test_a_planner_leaves_no_child_behind(request_here: PlannerRequest) -> None:
    code = (
        "import json, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(json.dumps({'refused': str(child.pid)}))"
    )
    refused = program(code).ask(request_here).refused
    assert refused is not None
    assert_ends(int(refused))


def assert_ends(pid: int) -> None:
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "still running"
        time.sleep(0.02)


def test_the_end_of_standard_error_is_kept(request_here: PlannerRequest) -> None:
    answer = program(f"import sys; sys.stderr.write('a' * 9999 + 'z'); print({PLAN!r})").ask(request_here)
    assert answer.stderr == "a" * (STDERR_TAIL - 1) + "z"


def test_files_in_the_working_folder_go_with_it(request_here: PlannerRequest) -> None:
    code = "import json, os; open('x', 'w').close(); print(json.dumps({'refused': os.getcwd()}))"
    folder = program(code).ask(request_here).refused
    assert folder is not None
    assert not Path(folder).exists()


@pytest.mark.parametrize("line", ["", "no-such-program-here", "'unclosed"])
def test_a_program_that_is_not_there(line: str) -> None:
    with pytest.raises(UsageError, match="--planner"):
        planner_program(line)


def test_a_script_is_named_and_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my planner.py").write_text(f"print({PLAN!r})")
    monkeypatch.chdir(tmp_path)
    planner = planner_program(f"{sys.executable} 'my planner.py'")
    assert planner.name == "my planner.py"
    assert planner.ask(PlannerRequest(tmp_path, "cpu")).plan == {"version": 2}


def test_the_embedded_planner_is_a_subject_too(stage: Stage, model: Path) -> None:
    answer = ReferencePlanner().ask(PlannerRequest(model, "cuda", physical_cores=3), stage)
    assert answer.plan is not None, answer
    plan = json.loads(json.dumps(answer.plan))
    assert plan["cpu"]["physical_cores"] == 3
    assert [device["name"] for device in plan["tiers"]["vram"]["devices"]] == ["NVIDIA GeForce RTX 3090"]
    assert answer.environment == plan["environment"]
    none = ReferencePlanner().ask(PlannerRequest(model, "cuda", gpu_indices=(5,)), stage)
    assert none.plan is not None
    assert json.loads(json.dumps(none.plan))["tiers"]["vram"]["devices"] == []


def test_the_embedded_planner_refuses_with_its_sentence(stage: Stage, model: Path, tmp_path: Path) -> None:
    refused = ReferencePlanner().ask(PlannerRequest(model, "cuda", ram_bytes=1000), stage).refused
    assert refused is not None
    assert refused.startswith("does not fit, by ")
    no_model = ReferencePlanner().ask(PlannerRequest(tmp_path, "cpu"), stage).refused
    assert no_model is not None
    assert "config.json" in no_model


def test_the_embedded_planner_plans_for_this_machine(model: Path) -> None:
    answer = ReferencePlanner().ask(PlannerRequest(model, "cpu"))
    assert answer.plan is not None, answer
    assert json.loads(json.dumps(answer.plan))["tiers"]["vram"]["devices"] == []


def test_a_planner_is_not_told_which_question_it_is_asked(request_here: PlannerRequest) -> None:
    code = (
        "import os, json; "
        "print(json.dumps({'refused': ' '.join(n for n in os.environ if n.startswith('PYTEST_')) or 'none'}))"
    )
    assert ProgramPlanner("mine", "a test", (sys.executable, "-c", code)).ask(request_here).refused == "none"
