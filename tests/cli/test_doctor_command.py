"""The command ``pytest-colibri doctor``: its statuses, what it withholds, and that it changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_colibri.cli import main
from pytest_colibri.container.tiny import write_tiny_model
from pytest_colibri.findings import STATES
from pytest_colibri.witness.drivers import driver_witnesses

EMULATED = ("--profile=nvidia-cuda", "--emulate")

Breaks = Callable[[Path], object]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", "int4-row")


def cut(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 1000)


def unknown_family(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")


def stray_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}', encoding="utf-8")


def no_rule(folder: Path) -> None:
    """Leave out of the configuration what a plan needs."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    del config["kv_lora_rank"]
    path.write_text(json.dumps(config), encoding="utf-8")


def damaged_history(folder: Path) -> None:
    (folder / ".coli_usage").write_text("much\n", encoding="utf-8")


def endless_rank(folder: Path) -> None:
    """Give a figure in the configuration of which no memory can be told."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "kv_lora_rank": 10**4000}), encoding="utf-8")


def nothing(_: Path) -> None:
    """A whole model."""


@pytest.mark.parametrize(
    ("breaks", "options", "status", "failed"),
    [
        (nothing, EMULATED, 0, set()),
        (nothing, ("--profile=host-3gb", "--emulate"), 7, {"placement.plan"}),
        (nothing, (*EMULATED, "--ram=1MB"), 7, {"placement.plan"}),
        (nothing, ("--profile=apple-metal",), 7, {"host.profile"}),
        (cut, EMULATED, 1, {"container.headers"}),
        (cut, ("--profile=host-3gb", "--emulate"), 1, {"container.headers"}),
        (unknown_family, EMULATED, 1, {"container.family"}),
        (stray_index, EMULATED, 1, {"container.index"}),
        (no_rule, EMULATED, 1, {"container.config"}),
        (endless_rank, EMULATED, 1, {"container.config"}),
        (damaged_history, EMULATED, 1, {"container.usage"}),
    ],
)
def test_statuses(
    model: Path,
    breaks: Breaks,
    options: tuple[str, ...],
    status: int,
    failed: set[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    if sys.platform == "darwin" and "--profile=apple-metal" in options:
        pytest.skip("a Mac fits this profile")
    breaks(model)
    assert main(["doctor", str(model), "--json", *options]) == status
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {finding["check"] for finding in findings if finding["state"] == "failed"} == failed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such-folder"], "no-such-folder: no such folder"),
        (["--engine=no-such-engine"], "--engine=no-such-engine: no such file"),
        (["--engine=."], "--engine=.: not a regular file"),
        ([__file__], "test_doctor_command.py: not a folder"),
        (["--profile=no-such-profile"], "unknown profile"),
        (["--emulate"], "needs a named profile"),
    ],
)
def test_wrong_usage(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 4
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("figures", ["--ram=much", "--ram=0B", "--vram=-1"])
def test_figures_that_no_planner_could_answer(
    model: Path, figures: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(model), *EMULATED, figures]) == 4
    assert capsys.readouterr().out == ""


def test_an_engine_that_tells_nothing_was_not_examined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "engine").write_text("#!/bin/sh\n")
    assert main(["doctor", f"--engine={tmp_path / 'engine'}", *EMULATED]) == 6
    assert "a script, not an ELF file" in capsys.readouterr().out


def test_nothing_private_leaves_unless_asked_for(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(model.parent))
    monkeypatch.setenv("USERPROFILE", str(model.parent))
    for form in ((), ("--json",)):
        main(["doctor", str(model), *EMULATED, *form])
        said = capsys.readouterr().out
        assert str(model.parent) not in said
        assert main(["doctor", str(model), *EMULATED, *form, "--identities"]) == 0
        assert bool(form) == (str(model) in capsys.readouterr().out)


@pytest.mark.parametrize("user", ["emulated", "linux", "warning"])
def test_a_user_named_as_a_word_of_the_schema(
    user: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: user)
    main(["doctor", "--profile=steam-deck", "--emulate", "--json"])
    diagnosis = json.loads(capsys.readouterr().out)
    assert diagnosis["host"] == {"kind": "emulated", "system": "linux", "architecture": "x86_64"}
    assert {finding["state"] for finding in diagnosis["findings"]} <= set(STATES)


def test_each_witness_says_what_it_reaches_on_this_machine_and_on_no_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for options, counted in (((), len(driver_witnesses())), (EMULATED, 0)):
        main(["doctor", "--json", *options])
        findings = json.loads(capsys.readouterr().out)["findings"]
        told = [f["sentence"].partition(": ") for f in findings if f["check"] == "witness.counters"]
        assert len(told) == counted
        assert all(reason for _, _, reason in told)


def test_names_out_of_files_do_not_reach_the_terminal_raw(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "\x1b[31mred.safetensors").write_bytes(b"")
    assert main(["doctor", str(model), *EMULATED]) == 1
    said = capsys.readouterr().out
    assert "?[31mred.safetensors" in said
    assert "\x1b" not in said


@pytest.mark.skipif(sys.platform != "linux", reason="engines are read as ELF files")
@pytest.mark.usefixtures("model")
def test_nothing_is_written_and_no_engine_is_run(tmp_path: Path) -> None:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc to build an engine with")
    source = tmp_path / "engine.c"
    source.write_text('#include <stdio.h>\nint main(void) { return !fopen("it ran", "w"); }')
    subprocess.run([compiler, source, "-o", tmp_path / "engine"], check=True, timeout=60)
    for folder in ("home", "here"):
        (tmp_path / folder).mkdir()
    before = everything(tmp_path)
    process = subprocess.run(
        [sys.executable, "-m", "pytest_colibri.cli", "doctor", "../model", "--engine=../engine"],
        cwd=tmp_path / "here",
        env={**os.environ, "HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "engine.libraries" in process.stdout
    assert everything(tmp_path) == before


def everything(folder: Path) -> dict[Path, tuple[int, int, int]]:
    found = {path: path.lstat() for path in sorted(folder.rglob("*"))}
    return {path: (status.st_mode, status.st_size, status.st_mtime_ns) for path, status in found.items()}
