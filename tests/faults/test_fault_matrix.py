"""Every check of the suite is proven able to fail: an engine with a fault, and the verdicts it must get."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pytest_colibri

ENGINE = Path(__file__).with_name("engine.py")
SHADERS = Path(pytest_colibri.__file__).parent / "engine" / "shaders"
CASE = "int4-grouped-64-full"

BROKEN_TIER = {"expert tier, prefill": "broken", "expert tier, decode": "broken"}
HELD_TIER = {"expert tier, prefill": "held", "expert tier, decode": "held"}
NO_RUN = {"run completes": "broken"}

ALL_HELD = (
    *HELD_TIER,
    "device",
    "planned experts",
    "resident experts",
    "own counters, prefill",
    "own counters, decode",
    "generated tokens",
    "scored positions",
    "reference on the CPU",
    "protocol",
    "model folder",
    "peak memory",
    "available memory",
    "device memory",
    "budgets fit the machine",
)

# For each fault: the exit status, and the verdicts that the fault is about.
MATRIX: dict[str, tuple[int, dict[str, str]]] = {
    "is_clean": (0, dict.fromkeys(ALL_HELD, "held")),
    "announces_and_computes_on_cpu": (1, {**BROKEN_TIER, "generated tokens": "held"}),
    "announces_before_reading_a_weight": (1, {**BROKEN_TIER, "generated tokens": "held"}),
    "dispatches_once_then_falls_back": (
        1,
        {"expert tier, prefill": "held", "expert tier, decode": "broken", "generated tokens": "held"},
    ),
    "retracts_honestly": (6, {"expert tier": "not_claimed", "generated tokens": "held"}),
    "records_and_never_submits": (1, {**BROKEN_TIER, "own counters, decode": "broken"}),
    "dispatches_no_workgroups": (1, {**BROKEN_TIER, "own counters, decode": "broken"}),
    "dispatches_another_shader": (1, BROKEN_TIER),
    "counts_double": (1, {**HELD_TIER, "own counters, prefill": "broken", "own counters, decode": "broken"}),
    "names_another_device": (
        1,
        {"device": "broken", "expert tier": "broken", "resident experts": "broken"},
    ),
    "claims_more_bytes_than_it_holds": (1, {**HELD_TIER, "resident experts": "broken"}),
    "computes_wrong_on_the_device": (
        1,
        {
            **HELD_TIER,
            "generated tokens": "broken",
            "scored positions": "broken",
            "reference on the CPU": "held",
        },
    ),
    "computes_one_expert_of_each_batch": (
        1,
        {**BROKEN_TIER, "own counters, decode": "held", "generated tokens": "held"},
    ),
    "holds_one_expert_of_those_planned": (1, {"planned experts": "broken", "generated tokens": "held"}),
    "claims_residents_of_no_bytes": (1, {**BROKEN_TIER, "resident experts": "broken"}),
    "names_no_pieces_and_does_one": (1, BROKEN_TIER),
    "writes_counters_that_cannot_be_read": (
        1,
        {"protocol": "broken", "own counters, decode": "not_claimed"},
    ),
    "takes_its_device_back": (6, {"device": "not_claimed", "own counters": "not_claimed"}),
    "announces_its_end_first": (1, NO_RUN),
    "writes_phases_past_the_witness": (
        6,
        {
            "expert tier, decode": "unwitnessed",
            "own counters, decode": "unwitnessed",
            "generated tokens": "held",
        },
    ),
    "moves_phases_through_another_file": (1, {"expert tier, decode": "broken"}),
    "writes_into_the_model_folder": (1, {"model folder": "broken", "generated tokens": "held"}),
    "allocates_beyond_the_device_budget": (1, {**HELD_TIER, "device memory": "broken"}),
    "counts_positions_from_zero": (
        1,
        {**HELD_TIER, "generated tokens": "broken", "scored positions": "held"},
    ),
    "gives_no_counters": (0, {**HELD_TIER, "own counters, decode": "not_claimed"}),
    "takes_more_memory_than_planned": (1, {"peak memory": "broken", "available memory": "held"}),
    "crashes_in_decode": (1, NO_RUN),
    "says_nothing": (1, NO_RUN),
    "refuses": (6, {"run completes": "not_claimed"}),
}


def run_suite(
    fault: str, folder: Path, *options: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """Run the suite on an engine with a fault; return the process and the verdicts by claim and phase."""
    evidence = folder / "evidence.json"
    process = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
            *("--profile=software-vulkan", "-k", CASE),
            f"--colibri-engine={sys.executable} {ENGINE} {fault}",
            f"--colibri-shaders={SHADERS}",
            f"--colibri-evidence={evidence}",
            *options,
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    rows = json.loads(evidence.read_text())["verdicts"] if evidence.is_file() else []
    return process, dict(_by_claim(rows))


def _by_claim(rows: list[dict[str, str]]) -> Iterator[tuple[str, str]]:
    for row in rows:
        yield (f"{row['claim']}, {row['phase']}" if row["phase"] else row["claim"]), row["state"]


@pytest.mark.parametrize("fault", MATRIX)
def test_fault_is_caught(fault: str, tmp_path: Path) -> None:
    status, wanted = MATRIX[fault]
    process, verdicts = run_suite(fault, tmp_path)
    assert {claim: verdicts.get(claim) for claim in wanted} == wanted, process.stdout
    assert process.returncode == status, process.stdout + process.stderr
    assert "Traceback" not in process.stdout + process.stderr


def test_every_fault_is_in_the_matrix() -> None:
    text = ENGINE.read_text()
    faults = {text[at:].split("def ")[1].split("(")[0] for at in _positions(text, "@fault\n")}
    assert faults == set(MATRIX)


def _positions(text: str, mark: str) -> Iterator[int]:
    at = text.find(mark)
    while at >= 0:
        yield at
        at = text.find(mark, at + 1)


def test_engine_is_stopped_at_the_memory_floor(tmp_path: Path) -> None:
    floor = _available_bytes() - 2 * 10**9
    process, verdicts = run_suite(
        "takes_more_memory_than_planned",
        tmp_path,
        f"--colibri-memory-floor={floor}",
        "-k",
        f"{CASE} and memory",
    )
    assert process.returncode == 1, process.stdout
    assert verdicts["available memory"] == "broken"
    assert "stopped at the floor" in process.stdout
    trial = json.loads((tmp_path / "evidence.json").read_text())["trials"][0]
    assert trial["output"]["ended"] == "floor"
    assert trial["memory"]["peak_tree_bytes"] < 4 * 10**9, "it was stopped long before it had its 6 GB"


def _available_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


WRONG_REFERENCE = """
from pytest_colibri.engine import weights

honest = weights.Expert.apply
weights.Expert.apply = lambda self, rows: -honest(self, rows)
"""


def test_wrong_reference_on_the_cpu_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded engine itself computes wrong wherever an expert is computed on the CPU."""
    (tmp_path / "sitecustomize.py").write_text(WRONG_REFERENCE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process, verdicts = run_suite("is_clean", tmp_path)
    assert process.returncode == 1, process.stdout
    assert verdicts["reference on the CPU"] == "broken"
