"""The planner of a checkout is asked in a child process, whatever its version, and sees what is staged."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from fake_checkouts import write_checkout, write_planner

from pytest_colibri.errors import Unavailable, UsageError
from pytest_colibri.host import stage as stage_module
from pytest_colibri.host.stage import Stage
from pytest_colibri.profiles.loader import find_profile
from pytest_colibri.profiles.model import Recording, Tool
from pytest_colibri.subjects.checkout import checkout_planner
from pytest_colibri.subjects.planner import PlannerAnswer, PlannerRequest
from pytest_colibri.subjects.planner_program import ProgramPlanner

pytestmark = pytest.mark.skipif(os.name != "posix", reason="a stage replays tools by scripts")

RECORDINGS = {
    "meminfo": "MemTotal: 1000 kB\nMemAvailable: 900 kB\n",
    "cgroup-v2": "==> memory.max <==\n4711\n",
    "nvidia-smi": "0, NVIDIA GB10, [N/A], [N/A]\n",
    "lscpu": "0,0\n1,0\n0,0\n1,0\n2,1\n2,1\n",
}


@pytest.fixture(params=["bound", "redirected"])
def stage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Return a stage of each kind; what is redirected works wherever Python does."""
    if request.param == "redirected":
        monkeypatch.setattr(stage_module, "_obstacle", lambda _: "refused by the test")
    recordings = tuple(Recording(cast(Tool, tool), "constructed", text) for tool, text in RECORDINGS.items())
    profile = dataclasses.replace(find_profile("nvidia-unified"), recordings=recordings)
    stage = Stage(profile, tmp_path / "stage")
    if request.param == "bound" and not stage.is_complete:
        pytest.skip(stage.reach)
    return stage


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


def ask(planner: ProgramPlanner, request: PlannerRequest, stage: Stage | None = None) -> dict[str, Any]:
    answer = planner.ask(request, stage)
    assert answer.plan is not None, answer
    return dict(answer.plan)


@pytest.mark.skipif(sys.platform != "linux", reason="the files of the stage exist on Linux only")
def test_a_planner_sees_the_machine_of_the_stage(
    stage: Stage, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLI_OF_THIS_SHELL", "1")
    planner = checkout_planner(write_checkout(tmp_path / "checkout", "newest"))
    seen = ask(planner, PlannerRequest(model, "cuda", environment={"COLI_CUDA_MTP": "1"}), stage)
    assert seen["meminfo"] == RECORDINGS["meminfo"]
    assert seen["group"] == "4711\n"
    assert seen["gpus"] == "0, NVIDIA GB10\n"
    assert seen["amd"] == "FileNotFoundError"
    assert seen["cores"] == "# Core,Socket\n" + RECORDINGS["lscpu"]
    assert seen["processors"] == 6
    assert seen["variables"] == {"COLI_CUDA_MTP": "1"}


def test_sys_platform_is_that_of_the_emulated_machine(model: Path, tmp_path: Path) -> None:
    stage = Stage(find_profile("apple-metal"), tmp_path / "stage")
    code = "import sys\ndef build_plan(model, **_): raise ValueError(f'unknown on {sys.platform}')\n"
    code = code.replace("**_", "ram_gb, vram_gb, context")
    planner = checkout_planner(write_planner(tmp_path / "checkout", code))
    assert planner.ask(PlannerRequest(model, "metal"), stage).refused == "unknown on darwin"


WINDOWS_PLANNER = """
import ctypes
import json
from pathlib import Path

class Status(ctypes.Structure):
    _fields_ = [("ullTotalPhys", ctypes.c_ulonglong), ("ullAvailPhys", ctypes.c_ulonglong)]

def build_plan(model, ram_gb, vram_gb, context, gpu_indices):
    kernel32 = ctypes.windll.kernel32
    kernel32.GlobalMemoryStatusEx.argtypes = [ctypes.c_void_p]
    status, length = Status(), ctypes.c_ulong()
    found = kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
    empty = kernel32.GetLogicalProcessorInformationEx(0, None, ctypes.byref(length))
    records = (ctypes.c_char * length.value)()
    filled = kernel32.GetLogicalProcessorInformationEx(0, records, ctypes.byref(length))
    sizes = [int.from_bytes(bytes(records)[at : at + 4], "little") for at in range(4, length.value, 48)]
    (Path(model) / "text").write_bytes(b"\\xc3\\xa9")
    return {
        "version": 2,
        "memory": [found, status.ullTotalPhys, status.ullAvailPhys],
        "cores": [empty, filled, sizes],
        "caches": kernel32.GetLogicalProcessorInformationEx(2, None, ctypes.byref(length)),
        "text": [(Path(model) / "text").read_text(), (Path(model) / "text").read_text(encoding="utf-8")],
    }

def environment_for_plan(plan): return {}
"""


def test_windows_answers_a_planner_as_it_was_recorded(model: Path, tmp_path: Path) -> None:
    stage = Stage(find_profile("msys2"), tmp_path / "stage")
    seen = ask(
        checkout_planner(write_planner(tmp_path / "checkout", WINDOWS_PLANNER)),
        PlannerRequest(model, "cpu"),
        stage,
    )
    assert seen["memory"] == [1, 33_464_844 * 1024, 20_971_520 * 1024]
    assert seen["cores"] == [0, 1, [48] * 8]
    assert seen["caches"] == 0
    assert seen["text"] == ["Ã©", "é"]


def test_another_program_is_not_shown_a_windows_machine(model: Path, tmp_path: Path) -> None:
    stage = Stage(find_profile("msys2"), tmp_path / "stage")
    planner = ProgramPlanner("mine", "a test", (sys.executable, "-c", "print(1)"))
    with pytest.raises(Unavailable, match=r"mine would see a mix of two machines: .*Windows answers"):
        planner.ask(PlannerRequest(model, "cpu"), stage)


@pytest.mark.skipif(sys.platform != "linux", reason="the planner reads /proc and control groups")
@pytest.mark.parametrize("version", ["middle", "newest"])
def test_arguments_are_those_that_the_version_knows(
    version: str, stage: Stage, model: Path, tmp_path: Path
) -> None:
    planner = checkout_planner(write_checkout(tmp_path / "checkout", version))
    request = PlannerRequest(
        model,
        "rocm",
        ram_bytes=100_000_000_000,
        vram_bytes=65_500_000_000,
        context=8192,
        gpu_indices=(1, 0),
        physical_cores=7,
        policy="balanced",
    )
    given = ask(planner, request, stage)["given"]
    assert given.pop("kv_slots", 1) == 1
    assert given == {
        "ram_gb": 100.0,
        "vram_gb": 65.5,
        "context": 8192,
        "gpu_indices": [1, 0],
        "policy": "balanced",
        "physical_cpus": 7,
        "available_memory": None,
        "available_disk": None,
        "gpus": None,
        "cpu_sockets": None,
    }


@pytest.mark.skipif(sys.platform != "linux", reason="the planner reads /proc and control groups")
def test_the_oldest_version_is_asked_for_what_it_knows(stage: Stage, model: Path, tmp_path: Path) -> None:
    planner = checkout_planner(write_checkout(tmp_path / "checkout", "oldest"))
    answer = planner.ask(PlannerRequest(model, "cuda", ram_bytes=10**9), stage)
    assert answer.plan is not None, answer
    assert cast(Any, answer.plan["given"])["ram_gb"] == 1.0
    assert answer.environment == {"GIVEN": "[]"}


@pytest.mark.skipif(sys.platform != "linux", reason="the planner reads /proc and control groups")
def test_what_is_left_open_is_left_to_the_planner(stage: Stage, model: Path, tmp_path: Path) -> None:
    planner = checkout_planner(write_checkout(tmp_path / "checkout", "newest"))
    given = ask(planner, PlannerRequest(model, "cuda"), stage)["given"]
    assert (given["ram_gb"], given["vram_gb"], given["gpu_indices"], given["physical_cpus"]) == (
        0,
        0,
        None,
        None,
    )
    assert ask(planner, PlannerRequest(model, "cpu"), stage)["given"]["gpu_indices"] == []
    assert ask(planner, PlannerRequest(model, "cpu", kv_slots=3), stage)["given"]["kv_slots"] == 3


@pytest.mark.parametrize(
    ("version", "asked", "name"),
    [
        ("middle", {"kv_slots": 2}, "kv_slots"),
        ("newest", {"prompt_width": 512}, "prompt_width"),
        ("oldest", {"policy": "quality"}, "policy"),
        ("oldest", {"physical_cores": 2}, "physical_cpus"),
    ],
)
def test_an_argument_that_the_version_lacks_is_named(
    version: str, asked: dict[str, Any], name: str, model: Path, tmp_path: Path
) -> None:
    planner = checkout_planner(write_checkout(tmp_path, version))
    answer = planner.ask(PlannerRequest(model, "cuda", **asked))
    assert answer.unsupported == f"this version of the planner has no argument {name}"
    assert (answer.plan, answer.refused, answer.failed) == (None, None, None)


@pytest.mark.skipif(sys.platform != "linux", reason="the planner reads /proc and control groups")
@pytest.mark.parametrize(("backend", "expected"), [("cuda", True), ("rocm", True), ("vulkan", False)])
def test_the_environment_is_asked_for_with_the_backend(
    backend: Any, expected: bool, stage: Stage, model: Path, tmp_path: Path
) -> None:
    code = (
        "def build_plan(model, ram_gb, vram_gb, context): return {'version': 2}\n"
        "def environment_for_plan(plan, env, cuda_enabled): return {**env, 'CUDA': str(cuda_enabled)}\n"
    )
    planner = checkout_planner(write_planner(tmp_path / "checkout", code))
    answer = planner.ask(PlannerRequest(model, backend, environment={"PIN": "x"}), stage)
    assert answer.environment == {"PIN": "x", "CUDA": str(expected)}


def test_a_plan_of_the_first_format_says_nothing_about_the_planner(model: Path, tmp_path: Path) -> None:
    code = "def build_plan(model, ram_gb, vram_gb, context): return {'version': 1}\n"
    answer = checkout_planner(write_planner(tmp_path / "checkout", code)).ask(PlannerRequest(model, "cuda"))
    assert answer.unsupported == "this version of the planner gives plans of version 1"


def test_an_older_environment_knows_no_backend(model: Path, tmp_path: Path) -> None:
    code = (
        "def build_plan(model, ram_gb, vram_gb, context): return {'version': 2}\n"
        "def environment_for_plan(plan, env): return {**env, 'A': 'b'}\n"
    )
    planner = checkout_planner(write_planner(tmp_path / "checkout", code))
    assert planner.ask(PlannerRequest(model, "cuda")).environment == {"A": "b"}


@pytest.mark.skipif(sys.platform != "linux", reason="the planner reads /proc and control groups")
def test_nothing_is_written_into_model_or_checkout(stage: Stage, model: Path, tmp_path: Path) -> None:
    checkout = write_checkout(tmp_path / "checkout", "newest")
    ask(checkout_planner(checkout), PlannerRequest(model, "cuda"), stage)
    assert list(model.iterdir()) == []
    assert [path.name for path in checkout.rglob("*")] == ["c", "resource_plan.py"]
    assert "resource_plan" not in sys.modules


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ("raise ValueError('needs 9 GB more memory')", PlannerAnswer(refused="needs 9 GB more memory")),
        ("raise SystemExit('does not fit')", PlannerAnswer(refused="does not fit")),
        ("raise ValueError('unsupported model_type: x')", PlannerAnswer(refused="unsupported model_type: x")),
        (
            "raise type('PlannerUnsupportedError', (ValueError,), {})('x awaits its rules')",
            PlannerAnswer(refused="x awaits its rules"),
        ),
    ],
)
def test_a_refusal_gives_its_reason(body: str, answer: PlannerAnswer, model: Path, tmp_path: Path) -> None:
    code = f"def build_plan(model, ram_gb, vram_gb, context): {body}\n"
    planner = checkout_planner(write_planner(tmp_path / "checkout", code))
    assert planner.ask(PlannerRequest(model, "cuda")) == answer


@pytest.mark.parametrize(
    ("code", "failed"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def build_plan(", "SyntaxError: '(' was never closed"),
        ("x = 1", "AttributeError: module 'resource_plan' has no attribute 'build_plan'"),
        (
            "def build_plan(model, ram_gb, vram_gb, context): raise ValueError('bad digit')",
            "bad digit",
        ),
        ("def build_plan(model, ram_gb, vram_gb, context): raise KeyError('memory')", "KeyError"),
        (
            "def build_plan(model, ram_gb, vram_gb, context): return {'version': 2, 'x': float('nan')}\n"
            "def environment_for_plan(plan): return {}",
            "Out of range float values are not JSON compliant",
        ),
    ],
)
def test_a_crash_is_a_failure_with_its_text(code: str, failed: str, model: Path, tmp_path: Path) -> None:
    answer = checkout_planner(write_planner(tmp_path / "checkout", code)).ask(PlannerRequest(model, "cuda"))
    assert answer.failed is not None
    assert answer.failed.startswith("the planner ended with status 1: ")
    assert failed in answer.failed
    assert "Traceback" in answer.stderr


def test_a_folder_that_is_no_checkout(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^--colibri=.*: no c/resource_plan\.py there; give the top folder"):
        checkout_planner(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no file to bind")
def test_a_program_that_follows_no_redirection_is_not_shown_a_mix_of_machines(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_module, "_obstacle", lambda _: "refused by the test")
    stage = Stage(find_profile("nvidia-cuda"), tmp_path / "stage")
    planner = ProgramPlanner("mine", "a test", (sys.executable, "-c", "print(1)"))
    with pytest.raises(Unavailable, match=r"mine would see a mix of two machines: .*refused by the test"):
        planner.ask(PlannerRequest(model, "cuda"), stage)
