"""What ``pytest-colibri plan`` can be asked for, of the reference planner and of others."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from pytest_colibri.cli import main
from pytest_colibri.container.hollow import write_hollow_model

ECHO = """\
import json, sys
request = json.load(sys.stdin)
print(json.dumps({"plan": {"version": 2, "request": request}, "environment": {}}))
"""
FOUR_CARDS = ["--profile=rtx-a6000-four", "--emulate"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_hollow_model(tmp_path / "model", "glm-mixed"))


def planned(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    assert main(["plan", *arguments]) == 0
    plan: dict[str, dict[str, object]] = json.loads(capsys.readouterr().out)
    return plan


@pytest.mark.parametrize(
    ("option", "key", "value"),
    [
        ("--kv-slots=3", "kv_slots", 3),
        ("--kv-type=q8_0", "kv_type", "q8_0"),
        ("--prompt-width=2048", "prompt_width", 2048),
        ("--slots=7", "slots_per_layer", 7),
        ("--context=32768", "context", 32768),
    ],
)
def test_what_is_asked_for_stands_in_the_plan(
    model: str, option: str, key: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned([model, *FOUR_CARDS, option], capsys)["request"][key] == value


def test_options_change_the_sum(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    def figure(name: str, *options: str) -> int:
        plan = planned([model, *FOUR_CARDS, *options], capsys)
        steps: list[dict[str, object]] = plan["steps"]  # type: ignore[assignment]
        found = next(step["bytes"] for step in steps if step["name"] == name)
        assert isinstance(found, int)
        return found

    one_slot = figure("runtime: KV cache")
    assert figure("runtime: KV cache", "--kv-slots=3") == 3 * one_slot
    assert figure("runtime: KV cache", "--kv-type=f16") == one_slot // 2
    assert figure("expert cache", "--slots=7") == 7 * figure("one slot in every layer")
    assert figure("NVIDIA RTX A6000: reserve", "--prompt-width=8192") > 2 * 10**9


def test_a_policy_is_planned(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned([model, *FOUR_CARDS, "--policy=experimental-fast"], capsys)
    assert plan["policy"] == {"name": "experimental-fast", "quality_preserving": False}
    assert plan["environment"]["COLI_POLICY"] == "experimental-fast"


def test_only_the_named_devices_take_experts(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned([model, *FOUR_CARDS, "--gpu=3,1"], capsys)
    devices: list[dict[str, object]] = plan["tiers"]["vram"]["devices"]  # type: ignore[index]
    assert {device["index"] for device in devices} == {1, 3}


@pytest.mark.skipif(sys.platform != "linux", reason="a program sees a recorded machine on Linux only")
def test_another_planner_gets_the_same_request(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "echo.py"
    program.write_text(ECHO)
    options = ["--kv-slots=3", "--prompt-width=2048", "--gpu=3,1", "--policy=quality", "--kv-type=f16"]
    answer = planned([model, *FOUR_CARDS, f"--planner={sys.executable} {program}", *options], capsys)
    request = answer["plan"]["request"]
    assert isinstance(request, dict)
    assert request["model"] == model
    assert (request["kv_slots"], request["prompt_width"]) == (3, 2048)
    assert (request["gpu_indices"], request["policy"], request["kv_type"]) == ([3, 1], "quality", "f16")


@pytest.mark.parametrize(
    ("arguments", "status", "what"),
    [
        (
            [*FOUR_CARDS, "--gpu=7"],
            7,
            "no device 7 that fits the profile rtx-a6000-four; found: 0 (",
        ),
        (["--profile=cpu", "--gpu=0"], 4, "the profile cpu plans for the CPU alone"),
        ([*FOUR_CARDS, "--planner=true", "--slots=3"], 4, "--slots: the planner protocol has no input"),
    ],
)
def test_what_cannot_be_asked(
    model: str, arguments: list[str], status: int, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", model, *arguments]) == status
    assert what in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "what"),
    [
        ("--gpu=", "no list of indices"),
        ("--gpu=0,,1", "no list of indices"),
        ("--gpu=-1", "no list of indices"),
        ("--kv-slots=0", "no count from 1"),
        ("--slots=many", "no count from 1"),
        ("--kv-type=f8", "invalid choice: 'f8'"),
        ("--policy=fast", "invalid choice: 'fast'"),
    ],
)
def test_bad_values_are_usage_errors(option: str, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["plan", "model", option])
    assert ending.value.code == 4
    assert what in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_every_option_stands_in_the_documentation(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
    table = page[page.index(f"| option of `{command}` |") :].split("\n\n")[0]
    cells = " ".join(line.split(" | ")[0] for line in table.splitlines())
    assert set(re.findall(r"--[a-z-]+", cells)) - {"---"} == options
