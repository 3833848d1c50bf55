"""The witness by NVML: the real binding asks a library of ours that answers as the driver does, so that no
NVIDIA card is needed."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).parents[2]
UNKNOWN = 2**64 - 1

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="libraries are set up as on Linux")

REACH = """
import json
from pytest_colibri.witness.nvml import NvmlWitness
reach = NvmlWitness().reach()
print(json.dumps([reach.able, reach.statement]))
"""

# Writes what the driver knows before each look, as the test gives it.
LOOKS = """
import json, os, sys
from pathlib import Path
from pytest_colibri.errors import Unavailable
from pytest_colibri.witness.nvml import NvmlWitness

processes = Path(os.environ["FAKE_NVML_PROCESSES"])
seen = []
with NvmlWitness().session() as session:
    for at_us, pids, lines in json.loads(sys.argv[1]):
        processes.write_text("\\n".join(lines))
        try:
            (use,) = session.read(pids, at_us)
        except Unavailable as error:
            seen.append(str(error))
            continue
        (engine,) = use.engines
        seen.append([engine.busy_ns, engine.bounded, use.resident_bytes, use.ended_clients])
    accounts = [[a.pid, a.busy_percent, a.open_ms, a.peak_bytes] for a in session.accounts()]
print(json.dumps({"pci": use.device.pci, "seen": seen, "notes": session.notes(), "accounts": accounts}))
"""

Ask = Callable[..., Any]


@pytest.fixture
def ask(compile_library: Callable[[str, str], Path], tmp_path: Path) -> Ask:
    """Run a program whose NVML is ours and return what it prints; ``wrapper`` runs it."""
    library = compile_library("fake_nvml.c", "libnvidia-ml.so.1")

    def run(program: str, *arguments: str, wrapper: tuple[str, ...] = (), **environment: str) -> Any:
        done = subprocess.run(
            [*wrapper, sys.executable, "-c", program, *arguments],
            cwd=PROJECT,
            env={
                **os.environ,
                "LD_LIBRARY_PATH": str(library.parent),
                "FAKE_NVML_PROCESSES": str(tmp_path / "processes"),
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def is_in_container() -> bool:
    return str(Path("/proc/self/ns/pid").readlink()) != "pid:[4026531836]"


outside_only = pytest.mark.skipif(
    platform.system() == "Linux" and is_in_container(), reason="this is a container with processes of its own"
)


def looks(ask: Ask, *given: tuple[int, list[int], list[str]], **environment: str) -> Any:
    return ask(LOOKS, json.dumps(given), **environment)


@outside_only
@pytest.mark.parametrize("environment", [{}, {"FAKE_NVML_SUCCEEDS": "1"}])
def test_reach_tells_each_device_and_why_not(ask: Ask, environment: dict[str, str]) -> None:
    able, statement = ask(REACH, **environment)
    seen, *unseen = statement.split("; ")
    assert able
    assert "NVIDIA H200 (0000:03:00.0)" in seen
    assert [reason.partition(": ")[0].split(" (")[0] for reason in unseen] == [
        "NVIDIA GB10",
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA H100",
    ]
    assert "MIG is enabled" in unseen[2]


def test_in_a_container_with_processes_of_its_own_it_reaches_nothing(ask: Ask) -> None:
    unshare = shutil.which("unshare")
    wrapper = (unshare or "", "--pid", "--fork", "--mount-proc")
    if unshare is None or subprocess.run([*wrapper, "true"], capture_output=True).returncode != 0:
        pytest.skip("no container can be made here")
    able, statement = ask(REACH, wrapper=wrapper)
    assert not able
    assert "--pid=host" in statement


def test_without_the_driver_it_reaches_nothing(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    able, statement = ask(REACH, LD_LIBRARY_PATH=str(tmp_path / "empty"))
    if able:
        pytest.skip("this machine has NVML")
    assert statement


@outside_only
def test_shares_of_the_run_become_time(ask: Ask) -> None:
    said = looks(
        ask,
        (0, [11], ["share 11 1000000 90 0"]),  # of the time before the run
        (500_000, [11, 12], ["share 11 1500000 40 0", "share 99 1500000 60 0"]),
        (900_000, [11, 12], ["share 11 1900000 10 0", "share 12 1900000 30 0"]),
        (1_000_000, [11, 12], ["share 11 1900000 10 0"]),  # nothing new
        (1_400_000, [11, 12], ["share 11 2300000 0 0"]),
    )
    assert [busy for busy, *_ in said["seen"]] == [0, 200_000_000, 360_000_000, 360_000_000, 360_000_000]
    assert all(bounded for _, bounded, *_ in said["seen"])
    assert said["pci"] == "0000:03:00.0"
    assert "estimated" in said["notes"][0]


@outside_only
def test_a_share_counts_for_a_second_and_for_the_run_at_most(ask: Ask) -> None:
    said = looks(
        ask,
        (0, [11], []),
        (300_000, [11], ["share 11 9000000 100 0"]),
        (5_000_000, [11], ["share 11 14000000 100 0"]),
    )
    assert [busy for busy, *_ in said["seen"]] == [0, 300_000_000, 1_300_000_000]


@outside_only
def test_a_share_of_more_than_all_is_refused_and_the_time_not_bounded(ask: Ask) -> None:
    said = looks(ask, (0, [11], []), (500_000, [11], ["share 11 500000 4294967295 0"]))
    assert said["seen"][1][:2] == [0, False]
    assert "4294967295 % was refused" in said["notes"][1]


@outside_only
def test_memory_is_that_of_the_run_and_unknown_where_the_driver_hides_it(ask: Ask) -> None:
    held = ["held 11 1000 0 0", "held 12 200 0 0", "held 99 5 0 0"]
    hidden = [*held, f"held 13 {UNKNOWN} 0 0"]
    said = looks(ask, (0, [11, 12], held), (1, [11, 12, 13], hidden), (2, [1], []))
    assert [resident for _, _, resident, _ in said["seen"]] == [1200, None, 0]
    assert [ended for *_, ended in said["seen"]] == [0, 0, 3]


@outside_only
def test_accounts_outlive_their_processes(ask: Ask) -> None:
    lines = ["account 11 37 5000 1200", f"account 12 {2**32 - 1} 70 0", f"account 13 5 {UNKNOWN} 9"]
    said = looks(ask, (0, [11, 12, 13, 14], []), (1, [], [*lines, "account 99 1 1 1"]))
    assert said["accounts"] == [[11, 37, 1200, 5000], [12, None, 0, 70]]


@outside_only
def test_a_device_that_is_lost_gives_no_look_and_no_zero(ask: Ask) -> None:
    said = looks(ask, (0, [11], []), (1, [11], ["lost 0 0 0 0"]), (2, [11], []))
    assert said["seen"][0][0] == said["seen"][2][0] == 0
    assert "NVIDIA H200" in said["seen"][1]
