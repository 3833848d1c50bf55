"""Runs that cannot show anything say why, and end with the status that the table of verdicts gives them."""

from __future__ import annotations

import pytest

from pytest_colibri.container.tiny import write_tiny_model

HELD, USAGE, NOTHING_SHOWN, HOST_MISMATCH = 0, 4, 6, 7

PROFILE = """\
name: mine
title: My machine
backend: vulkan
pool: unified
tiers: [vram, ram, disk]
match:
  system: [linux]
  device:
    type: [cpu]
environment: {}
recordings: []
"""


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)
    output = result.stdout.str() + result.stderr.str()
    assert "Traceback" not in output
    assert "INTERNALERROR" not in output
    return result


def everything(result: pytest.RunResult) -> str:
    return " ".join((result.stdout.str() + result.stderr.str()).split())


def test_host_without_the_device(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--profile=intel-vulkan")
    assert result.ret == HOST_MISMATCH
    output = everything(result)
    assert "needs a Vulkan device of vendor intel" in output
    assert "has llvmpipe" in output
    assert "CPU device, not a GPU" in output
    result.assert_outcomes()


def test_unknown_profile_names_the_nearest(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--profile=intle-vulkan")
    assert result.ret == USAGE
    assert "intel-vulkan" in everything(result)


@pytest.mark.parametrize(
    ("change", "place", "what"),
    [
        (("backend: vulkan", "backnd: vulkan"), "3:1", "backnd"),
        (("title: My machine", "title: My machine\nname: mine"), "3:1", "name"),
        (("system: [linux]", "system: 7"), "7:11", "system"),
        (("environment: {}", "environment: {COLI_VK_EXPERTS: 16}"), "10:32", "quote"),
        (("backend: vulkan", "backend: vulcan"), "3:10", "vulkan"),
    ],
)
def test_bad_profile_says_where(
    pytester: pytest.Pytester, change: tuple[str, str], place: str, what: str
) -> None:
    path = pytester.path / "mine.yaml"
    path.write_text(PROFILE.replace(*change))
    result = run(pytester, "--profile=mine.yaml")
    assert result.ret == USAGE
    assert f"mine.yaml:{place}:" in everything(result)
    assert what in everything(result)


@pytest.mark.parametrize("profile", ["apple-metal", "amd-rocm"])
def test_backend_that_needs_a_checkout(pytester: pytest.Pytester, profile: str) -> None:
    result = run(pytester, f"--profile={profile}")
    assert result.ret == NOTHING_SHOWN
    assert "rocm and metal judge the engine of a checkout (--colibri)" in everything(result)
    assert "Vulkan" in everything(result)


def test_no_vulkan_driver(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        monkeypatch.setenv(variable, "/nonexistent.json")
    result = run(pytester, "--profile=software-vulkan")
    assert result.ret == HOST_MISMATCH
    assert "mesa-vulkan-drivers" in everything(result)


def test_no_frida(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("import sys; sys.modules['frida'] = None")
    result = run(pytester, "--profile=software-vulkan", "-k", "int4-row-full")
    assert result.ret == NOTHING_SHOWN
    assert "unwitnessed" in everything(result)
    assert "pip install 'pytest-colibri[trace]'" in everything(result)


@pytest.mark.parametrize(
    ("option", "what"),
    [
        ("--colibri-memory-floor=much", "write a number and one of"),
        ("--colibri-engine=no-such-program-here", "no such program"),
        ("--model=no-such-folder", "no-such-folder"),
        ("--colibri-timeout=soon", "write seconds"),
        ("--colibri-shaders=.", "belongs to --colibri-engine"),
        ("--colibri-timeout=nan", "write seconds"),
        ("--colibri-evidence=no/such/folder.json", "cannot be written"),
    ],
)
def test_bad_option(pytester: pytest.Pytester, option: str, what: str) -> None:
    result = run(pytester, "--profile=cpu", option)
    assert result.ret == USAGE
    assert what in everything(result)


def test_auto_cannot_be_emulated(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--profile=auto", "--emulate")
    assert result.ret == USAGE
    assert "needs a named profile" in everything(result)


def test_nothing_run_for_the_backend(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--profile=software-vulkan", "-k", "budgets")
    assert result.ret == NOTHING_SHOWN
    assert "nothing was shown for the backend vulkan" in everything(result)


def test_wrong_marker_argument(pytester: pytest.Pytester) -> None:
    path = pytester.makepyfile("import pytest\n@pytest.mark.colibri_tier('hbm')\ndef test_it(): pass\n")
    result = run(pytester, "--profile=cpu", str(path))
    assert result.ret == USAGE
    assert "colibri_tier takes one of vram, ram, disk" in everything(result)


def test_fixture_without_profile(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(colibri_host): pass")
    result = run(pytester)
    assert result.ret != HELD
    assert "--profile=NAME" in everything(result)


def test_model_whose_reference_cannot_be_read(pytester: pytest.Pytester) -> None:
    model = write_tiny_model(pytester.path / "model", "f32")
    (model / "ref_glm.json").write_text("{}")
    result = run(pytester, "--profile=cpu", "--model=model")
    assert result.ret == USAGE
    assert "ref_glm.json: not a token reference" in everything(result)


def test_recordings_of_another_machine(pytester: pytest.Pytester) -> None:
    recordings = "recordings:\n  - tool: meminfo\n    provenance: constructed\n    text: 'MemTotal: 1 kB'"
    (pytester.path / "mine.yaml").write_text(PROFILE.replace("recordings: []", recordings))
    result = run(pytester, "--profile=mine.yaml", "--emulate")
    assert result.ret == HOST_MISMATCH
    assert "has no Vulkan device" in everything(result)


def test_floor_above_what_is_available(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--profile=cpu", "--colibri-memory-floor=100000GB", "-k", "int4-row-full")
    assert result.ret == NOTHING_SHOWN
    assert "less than the memory floor" in everything(result)
