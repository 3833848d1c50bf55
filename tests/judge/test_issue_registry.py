"""The registry of reports: a fault of an entry is told with its place, and a report asks for its machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_colibri.errors import UsageError
from pytest_colibri.host.emulated import emulate_host
from pytest_colibri.judge.issues import MachineKind, read_issues
from pytest_colibri.profiles.loader import find_profile

GOOD = """issues:
  - id: "9001"
    title: Something was reported
    planner:
      - {profile: gb10-114gb, model: glm-small, checks: [every_layer_has_a_slot]}
"""


def read(folder: Path, text: str) -> str:
    """Return the error of a registry, empty without one."""
    path = folder / "issues.yaml"
    path.write_text(text, encoding="utf-8")
    try:
        read_issues(path)
    except UsageError as error:
        return str(error).removeprefix(f"{path}:")
    return ""


def test_an_entry_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, GOOD) == ""


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (
            "every_layer_has_a_slot",
            "every_layer_has_slot",
            "5:58: unknown check every_layer_has_slot; nearest: ",
        ),
        ("glm-small", "glm-smal", "5:38: unknown model glm-smal; nearest: glm-small"),
        ("gb10-114gb", "gb10", "5:19: unknown profile gb10; nearest: gb10-"),
        ("checks: [", "given: [nothing], checks: [", "5:57: unknown check nothing"),
        ("title:", "titel:", "3:5: unknown key"),
        ('"9001"', "9001", "2:9: issues[1].id must be text"),
    ],
)
def test_a_fault_of_an_entry_is_told_with_its_place(tmp_path: Path, old: str, new: str, error: str) -> None:
    assert error in read(tmp_path, GOOD.replace(old, new))


def test_a_report_stands_there_once(tmp_path: Path) -> None:
    again = GOOD + GOOD.removeprefix("issues:\n")
    assert read(tmp_path, again) == "6:9: a second report 9001; allowed: each once"


@pytest.mark.parametrize(
    ("kind", "profile", "sentence"),
    [
        (MachineKind(backends=("rocm",)), "gb10-114gb", "it is about rocm, and the profile is for cuda"),
        (MachineKind(pool="discrete"), "gb10-114gb", "it is about discrete memory, which no device"),
        (MachineKind(systems=("windows",)), "gb10-114gb", "it is about windows, and this machine runs linux"),
        (MachineKind(devices=("*RX 580*",)), "gb10-114gb", "it is about devices named *RX 580*"),
        (MachineKind(available_at_most=8 * 10**9), "gb10-114gb", "it is about at most 8.00 GB of available"),
        (MachineKind(sockets=2), "gb10-114gb", "it is about 2 sockets, and this machine has 1"),
        (MachineKind(control_group=True), "gb10-114gb", "it is about a control group"),
        (MachineKind(backends=("cuda",), pool="unified", systems=("linux",)), "gb10-114gb", None),
        (MachineKind(devices=("*rx 580*",), pool="discrete"), "rx-580-without-rebar", None),
        (MachineKind(available_at_most=8 * 10**9), "host-3gb", None),
        (MachineKind(control_group=True), "container-34gb", None),
        (MachineKind(sockets=2), "two-sockets-1tb", None),
    ],
)
def test_a_report_asks_for_its_machine(kind: MachineKind, profile: str, sentence: str | None) -> None:
    found = find_profile(profile)
    mismatch = kind.mismatch(found, emulate_host(found))
    assert (mismatch is None) if sentence is None else (mismatch or "").startswith(sentence)
