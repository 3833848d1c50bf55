"""The command ``pytest-colibri``: its answers, and a sentence and a status for what it cannot do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_colibri.cli import main
from pytest_colibri.container.tiny import write_tiny_model

PLANNER = """\
import json, pathlib, re, sys
request = json.load(sys.stdin)
available = 1024 * int(re.search(r"MemAvailable: +(\\d+)", pathlib.Path("/proc/meminfo").read_text())[1])
if (request["ram_bytes"] or 0) > available:
    sys.exit(print(json.dumps({"refused": f"only {available} bytes are there"})))
plan = {"version": 2, "tiers": {"ram": {"available_bytes": available}}}
print(json.dumps({"plan": plan, "environment": {}}))
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_tiny_model(tmp_path / "model", "int4-row"))


@pytest.fixture
def planner(tmp_path: Path) -> str:
    path = tmp_path / "planner.py"
    path.write_text(PLANNER)
    return f"{sys.executable} {path}"


def test_plan_of_this_machine(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, "--profile=cpu", "--ram=5GB"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["tiers"]["ram"]["budget_bytes"] == 5 * 10**9
    assert plan["tiers"]["disk"]["available_bytes"] > 0


@pytest.mark.skipif(sys.platform != "linux", reason="a program sees a recorded /proc/meminfo on Linux only")
def test_another_planner_is_asked_for_a_machine_that_is_not_here(
    model: str, planner: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", model, "--profile=host-3gb", "--emulate", f"--planner={planner}"]
    assert main(arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["plan"]["tiers"]["ram"]["available_bytes"] < 4 * 10**9, "it saw the recording"
    assert main([*arguments, "--ram=100GB"]) == 7
    assert "refuses: only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "what"),
    [
        (["--planner=no-such-program-here"], 4, "no such program"),
        (["--colibri=no-such-folder"], 4, "no c/resource_plan.py"),
        (["--planner=x", "--explain"], 4, "--explain"),
        (["--ram=much"], 4, "write a number and one of"),
        (["--ram=1MB"], 7, "does not fit"),
        (["--profile=auto", "--emulate"], 4, "needs a named profile"),
        (["--profile=intel-vulkan"], 7, "needs a Vulkan device of vendor intel"),
    ],
)
def test_what_cannot_be_done(
    model: str, arguments: list[str], status: int, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", model, "--profile=cpu", *arguments]) == status
    assert what in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [[], ["nonsense"], ["plan"], ["plan", "m", "--context=0"], ["plan", "m", "--planner=x", "--colibri=y"]],
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main(arguments)
    assert ending.value.code == 4
    assert "usage: pytest-colibri" in capsys.readouterr().err


def test_a_profile_with_recordings_of_nonsense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "box.yaml"
    file.write_text(
        "name: box\ntitle: A box\nbackend: cpu\nmatch: {}\ntiers: [ram, disk]\nrecordings:\n"
        "  - {tool: meminfo, provenance: constructed, text: hello}\n"
        "  - {tool: nvidia-smi, provenance: constructed, text: hello}\n"
    )
    assert main(["profiles", str(file)]) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(
        f"pytest-colibri: {file}:7:52: recording of meminfo: no probe can read anything from it\n"
        f"{file}:8:55: recording of nvidia-smi: 'hello' does not have the columns"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_output_that_cannot_be_written() -> None:
    with Path("/dev/full").open("wb") as full:
        process = subprocess.run(
            [sys.executable, "-m", "pytest_colibri.cli", "profiles", "cpu"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert process.returncode == 1
    assert "the output cannot be written" in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="a shell of POSIX closes the output")
def test_output_that_is_closed() -> None:
    process = subprocess.run(
        ["/bin/sh", "-c", 'exec "$0" -m pytest_colibri.cli profiles >&-', sys.executable],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert process.returncode == 1
    assert process.stderr == "pytest-colibri: the output cannot be written: standard output is closed\n"


def test_names_that_the_encoding_of_the_output_lacks() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "pytest_colibri.cli", "model"],
        env={**os.environ, "PYTHONIOENCODING": "cp1252"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "\\u91cf" in process.stdout


@pytest.mark.parametrize("command", [["plan", "{}"], ["doctor", "{}"], ["doctor", "--engine={}"]])
def test_a_path_that_the_system_refuses(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = "a" * 5000
    assert main([part.format(path) for part in command]) == 4
    said = capsys.readouterr()
    assert said.out == ""
    assert path in said.err
    assert "output" not in said.err


def test_errors_do_not_reach_the_terminal_raw(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    (Path(model) / "\x1b[31mred.safetensors").write_bytes(b"")
    assert main(["plan", model, "--profile=cpu"]) == 4
    said = capsys.readouterr().err
    assert "?[31mred.safetensors" in said
    assert "\x1b" not in said
