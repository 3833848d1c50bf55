"""Whole sessions: what they run, print, write and leave alone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy  # noqa: F401  (before pytester looks at the modules: it can be loaded only once)
import psutil
import pytest

from pytest_colibri.container.tiny import write_tiny_model

ONE_CASE = ("-k", "int4-row-full")
ONE_PLAN = ("-k", "glm-small and automatic")
HEAVY = ("numpy", "yaml", "jsonschema", "rich", "frida", "vulkan", "pynvml", "psutil", "filelock")

COUNTS_THE_POOL_TWICE = """
from pytest_colibri.planner import budgets

honest = budgets.split_unified_pool

def split(**figures):
    ram, vram = honest(**figures)
    return figures["pool_bytes"], figures["pool_bytes"]

budgets.split_unified_pool = split
"""

OLD_PROFILER = """
import pytest
def pytest_addoption(parser):
    parser.addoption("--profile", action="store_true", help="profile the tests")
"""


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)


def text(result: pytest.RunResult) -> str:
    return " ".join(result.stdout.str().split())


def evidence(pytester: pytest.Pytester) -> dict[str, list[dict[str, str]]]:
    content: dict[str, list[dict[str, str]]] = json.loads(
        (pytester.path / "colibri-evidence.json").read_text()
    )
    return content


def states(pytester: pytest.Pytester) -> dict[tuple[str, str, str | None], str]:
    rows = evidence(pytester)["verdicts"]
    return {(row["case"], row["claim"], row["phase"]): row["state"] for row in rows}


def test_whole_suite_on_software_vulkan(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--profile=software-vulkan", "--junit-xml=report.xml", "-rs")
    assert result.ret == 0, result.stdout.str()
    assert "nothing is claimed in this case" in text(result)
    assert not [line for line in result.stdout.lines if line.endswith(": Skipped")]
    verdicts = states(pytester)
    assert set(verdicts.values()) == {"held"}
    for model in ("f32", "int8-row", "int4-row", "int4-grouped-32", "int4-grouped-64"):
        assert ("expert tier", "decode") in {
            (claim, phase) for case, claim, phase in verdicts if model in case
        }
        assert (f"{model}-full", "generated tokens", None) in verdicts
        assert (f"{model}-full-score", "scored positions", None) in verdicts
    assert ("int4-grouped-64-part", "expert tier", "decode") in verdicts
    assert ("int4-grouped-64-empty", "generated tokens", None) in verdicts
    _check_counts_agree(pytester)
    _check_junit(pytester.path / "report.xml")


def _check_counts_agree(pytester: pytest.Pytester) -> None:
    """The witness' counts per shader and phase are the engine's own, above zero, without the judge's help."""
    for trial in json.loads((pytester.path / "colibri-evidence.json").read_text())["trials"]:
        if trial["case"].endswith(("empty", "score")):
            continue
        own = {t["phase"]: sorted(t["dispatches"].values()) for t in trial["telemetry"]}
        seen = {
            phase["phase"]: sorted(shader["executed"] for shader in phase["shaders"])
            for phase in trial["dispatch"]["devices"][0]["phases"]
        }
        assert own["decode"] == seen["decode"], trial["case"]
        assert own["prefill"] == seen["prefill"], trial["case"]
        assert len(seen["decode"]) == 2
        assert min(seen["decode"]) > 0


def _check_junit(path: Path) -> None:
    suite = ElementTree.parse(path).getroot()
    properties = {p.get("name"): p.get("value") for p in suite.iter("property")}
    assert properties["colibri.profile"] == "software-vulkan"
    verdict = json.loads(str(properties["colibri.verdict"]))
    assert verdict["state"] == "held"


def test_cpu_profile(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--profile=cpu", "-k", "int4-grouped-64 or f32")
    assert result.ret == 0, result.stdout.str()
    assert "checks of the tier vram, which the profile has not" in text(result)
    assert ("int4-grouped-64-part", "generated tokens", None) in states(pytester)


def test_auto_says_what_it_chose_and_why(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--profile=auto", *ONE_CASE)
    assert result.ret == 0, result.stdout.str()
    assert "the profile software-vulkan was chosen" in text(result)
    assert "intel-vulkan (needs" in text(result)


def test_workers_give_the_same_verdicts(pytester: pytest.Pytester) -> None:
    run(pytester, "--profile=software-vulkan", *ONE_CASE)
    alone = states(pytester)
    cases = {trial["case"] for trial in evidence(pytester)["trials"]}
    (pytester.path / "colibri-evidence.json").unlink()
    result = run(pytester, "--profile=software-vulkan", *ONE_CASE, "-n2", "--dist=loadgroup")
    assert result.ret == 0, result.stdout.str()
    assert states(pytester) == alone
    assert {trial["case"] for trial in evidence(pytester)["trials"]} == cases


def test_emulated_host_is_judged_by_its_plans(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--profile=nvidia-unified", "--emulate")
    assert result.ret == 0, result.stdout.str()
    assert "engine checks, since the host is emulated" in text(result)
    assert "this speaks of plans only" in text(result)
    claims = {claim for _, claim, _ in states(pytester)}
    assert {"one pool is counted once", "reserve is kept", "every sparse layer has a slot"} <= claims
    assert evidence(pytester)["trials"] == []


def test_broken_plan_is_caught_before_the_engine_starts(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(COUNTS_THE_POOL_TWICE)
    result = run(pytester, "--profile=software-vulkan", *ONE_CASE)
    assert result.ret == 1, result.stdout.str()
    verdicts = states(pytester)
    assert verdicts["int4-row-full", "budgets fit the machine", None] == "broken"
    assert verdicts["int4-row-full", "run completes", None] == "unwitnessed"
    assert evidence(pytester)["trials"] == [], "no engine was started"


def test_evidence_keeps_private_things_out(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(pytester.path))
    run(pytester, "--profile=software-vulkan", *ONE_CASE)
    content = (pytester.path / "colibri-evidence.json").read_text()
    assert str(pytester.path) not in content
    assert '"uuid": "(withheld)"' in content
    run(pytester, "--profile=software-vulkan", *ONE_CASE, "--colibri-identities")
    assert '"uuid": "(withheld)"' not in (pytester.path / "colibri-evidence.json").read_text()


@pytest.mark.parametrize("twin", ["environment", "ini"])
def test_options_have_twins(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, twin: str) -> None:
    if twin == "ini":
        pytester.makeini("[pytest]\ncolibri_profile = cpu\ncolibri_emulate = true\n")
    else:
        monkeypatch.setenv("COLIBRI_PROFILE", "cpu")
        monkeypatch.setenv("COLIBRI_EMULATE", "1")
    result = run(pytester, *ONE_PLAN)
    assert result.ret == 0, result.stdout.str()
    assert "colibri: options: profile=cpu, emulate=True" in text(result)


def test_ordinary_run_is_left_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        f"""
        import sys

        def test_nothing_heavy_is_loaded():
            assert not [name for name in {HEAVY!r} if name in sys.modules]
        """
    )
    result = run(pytester, "-p", "no:hypothesispytest")
    assert result.ret == 0, result.stdout.str()
    assert "colibri verdicts" not in result.stdout.str()
    assert not (pytester.path / "colibri-evidence.json").exists()


def test_collecting_probes_nothing(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--profile=intel-vulkan", "--collect-only", "-q")
    assert result.ret == 0, result.stdout.str()
    assert "test_expert_tier_dispatches[f32-full]" in result.stdout.str()


def install_profiler(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a distribution beside the tests that registers ``--profile`` as pytest-profiling does."""
    site = pytester.mkdir("site")
    (site / "pytest_profiling.py").write_text(OLD_PROFILER)
    metadata = site / "pytest_profiling-1.8.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: pytest-profiling\nVersion: 1.8.1\n")
    (metadata / "entry_points.txt").write_text("[pytest11]\nprofiling = pytest_profiling\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site))


def test_alias_that_another_plugin_owns(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    install_profiler(pytester, monkeypatch)
    pytester.makepyfile("def test_ordinary(): pass")
    assert run(pytester, "--profile", "test_alias_that_another_plugin_owns.py").ret == 0
    result = run(pytester, "--colibri-profile=cpu", "--emulate", *ONE_PLAN)
    assert result.ret == 0, result.stdout.str()


def test_alias_of_a_blocked_plugin_is_free(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_profiler(pytester, monkeypatch)
    result = run(pytester, "-p", "no:profiling", "--profile=cpu", "--emulate", *ONE_PLAN)
    assert result.ret == 0, result.stdout.str()


def test_model_without_reference_tokens(pytester: pytest.Pytester) -> None:
    """Device and CPU are compared with each other; the history comes from the run on the CPU."""
    write_tiny_model(pytester.path / "model", "int4-row", usage=False)
    result = run(pytester, "--profile=software-vulkan", "--model=model")
    assert result.ret == 0, result.stdout.str()
    verdicts = states(pytester)
    assert verdicts["model-full", "generated tokens", None] == "held"
    assert verdicts["model-part", "expert tier", "decode"] == "held"


def test_timeout_is_kept(pytester: pytest.Pytester) -> None:
    sleeper = pytester.makepyfile(sleeper="import time; time.sleep(60)")
    result = run(
        pytester,
        "--profile=cpu",
        "--colibri-timeout=2",
        f"--colibri-engine={sys.executable} {sleeper}",
        "-k",
        "int4-row-full and generated",
    )
    assert result.ret == 6, result.stdout.str()
    assert "its processes were killed" in text(result)


def test_without_other_plugins(pytester: pytest.Pytester) -> None:
    result = run(pytester, "-p", "no:xdist", "--strict-markers", "--profile=cpu", *ONE_CASE)
    assert result.ret == 0, result.stdout.str()


def test_evidence_is_written_where_no_terminal_is(pytester: pytest.Pytester) -> None:
    result = run(pytester, "-p", "no:terminal", "--profile=software-vulkan", "-k", "budgets and int4-row")
    assert result.ret == 6
    assert states(pytester) == {("int4-row-full", "budgets fit the machine", None): "held"}


def test_terminal_without_other_characters(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "POSIX"}.items():
        monkeypatch.setenv(variable, value)
    result = run(pytester, "--profile=cpu", *ONE_CASE)
    assert result.ret == 0, result.stdout.str()
    assert "\\u2500" not in result.stdout.str()


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX systems")
def test_interrupted_run_leaves_nothing_behind(pytester: pytest.Pytester) -> None:
    """Ctrl-C while an engine hangs: the engine is gone, the status is that of pytest, and the end says so."""
    mark = pytester.path / "engine.pid"
    engine = pytester.makepyfile(
        hanging=f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--profile=cpu", "-k", "generated"),
            f"--colibri-engine={sys.executable} {engine}",
        ],
        cwd=pytester.path,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a background job
    )
    while not mark.is_file() or not mark.read_text():
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert "the run is incomplete" in output
    assert not psutil.pid_exists(int(mark.read_text()))


def test_users_own_variables_reach_the_engine_and_not_the_reference(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLI_VK_EXPERTS", "0")
    result = run(pytester, "--profile=software-vulkan", *ONE_CASE)
    assert result.ret == 6, result.stdout.str()
    assert states(pytester)["int4-row-full", "expert tier", None] == "not_claimed"
    monkeypatch.delenv("COLI_VK_EXPERTS")
    monkeypatch.setenv("COLI_VULKAN", "1")
    assert run(pytester, "--profile=software-vulkan", *ONE_CASE).ret == 0
