"""Each benchmark runs to its end on its smallest settings and prints figures; their size is not tested."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_colibri.host.live import probe_host
from pytest_colibri.witness.dispatch import DispatchTracer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LINE = re.compile(r"^  (\S.*?)" + r" +(-?\d+\.\d{3})" * 3, re.MULTILINE)


SHAPE = ("--shards", "3", "--sparse-layers", "2", "--experts", "4")

# What the benchmark calls of a checkout's planner, without strictness and with a median for a width.
PLANNER = """
import json, re, statistics
from collections import defaultdict
from pathlib import Path

def analyze_model(folder):
    dense, layers = 0, defaultdict(lambda: defaultdict(int))
    for shard in Path(folder).glob("*.safetensors"):
        with shard.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if found := re.search(r"layers[.](\\d+)[.]mlp[.]experts[.](\\d+)", name):
                layers[int(found[1])][int(found[2])] += end - begin
            else:
                dense += end - begin
    return {
        "dense_bytes": dense,
        "expert_bytes": sum(sum(experts.values()) for experts in layers.values()),
        "expert_count": sum(map(len, layers.values())),
        "expert_bytes_by_layer": {
            layer: statistics.median_low(experts.values()) for layer, experts in layers.items()
        },
    }
"""


def start(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / program), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def run(program: str, *arguments: str) -> str:
    done = start(program, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def medians(output: str) -> dict[str, list[float]]:
    """The medians of the tables by the name of their line, each checked to lie within its range."""
    found: dict[str, list[float]] = {}
    for name, *numbers in LINE.findall(output):
        least, middle, largest = map(float, numbers)
        assert least <= middle <= largest
        found.setdefault(name, []).append(middle)
    return found


def test_witness_cost_times_the_decode_phase_within_the_whole_run() -> None:
    reach = DispatchTracer().reach()
    if not reach.able:
        pytest.skip(reach.statement)
    if not any(device.vendor == "mesa" for device in probe_host(frozenset({"vulkan"})).accelerators):
        pytest.skip("there is no software Vulkan device, which the benchmark takes by default")
    output = run("witness_cost.py", "--pairs", "1", "--new-tokens", "4", "--format", "f32")
    found = medians(output)
    for condition in ("unwitnessed", "under both"):
        decode, whole = found[condition]
        assert 0 < decode < whole
    assert re.search(r"target (met|MISSED): median ratio", output)


def test_plugin_import_times_three_starts_and_lists_the_modules() -> None:
    output = run("plugin_import.py", "--pairs", "1")
    found = medians(output)
    assert len(found["without the plugin"]) == len(found["with the plugin"]) == 3
    assert output.count("ms, at most 30 ms") == 3
    modules = output.splitlines()[-1].partition(": ")[2].split(", ")
    assert "pytest_colibri.plugin" in modules


def test_container_scan_scans_what_it_wrote() -> None:
    output = run("container_scan.py", "--runs", "1", *SHAPE)
    assert "shards 3; tensors 108;" in output
    found = medians(output)
    assert found["peak of the process"][0] >= found["its peak before the scan"][0] > 0


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "resource_plan.py").write_text(PLANNER)
    return tmp_path


def test_container_scan_compares_its_figures_with_a_planner_s(checkout: Path) -> None:
    output = run("container_scan.py", "--runs", "1", *SHAPE, "--peer-planner", str(checkout))
    assert "  equal figures: dense bytes, expert bytes, experts, width by layer" in output
    assert re.search(r"target (met|MISSED): median ratio", output)


def test_container_scan_ends_where_a_planner_finds_other_figures(checkout: Path) -> None:
    planner = checkout / "c" / "resource_plan.py"
    planner.write_text(PLANNER.replace("dense, layers = 0", "dense, layers = 1"))
    done = start("container_scan.py", "--runs", "1", *SHAPE, "--peer-planner", str(checkout))
    assert done.returncode == 1
    assert re.search(r"dense bytes differ: the planner's \d+1, ours \d+0", done.stderr)


def test_probe_cost_times_both_probes() -> None:
    found = medians(run("probe_cost.py", "--runs", "1", "--calls", "10"))
    assert found["AvailableMemory.read"][0] > 0
    assert found["probe_vulkan"][0] > 0
