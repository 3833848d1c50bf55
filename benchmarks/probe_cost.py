"""What the probes of the machine cost: the look at the memory, which the sampler takes 40 times a second, and
the Vulkan probe, which runs as a process of its own.

Beside them psutil reading less (no control groups), and ``vulkaninfo --summary`` where it is installed.

    python benchmarks/probe_cost.py --runs 11
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable

import psutil
from paired import (
    Pairs,
    compiled_modules,
    interleave,
    print_figures,
    print_heading,
    print_machine,
    print_pairs,
    seconds_of,
)

from pytest_colibri.host.memory import AvailableMemory
from pytest_colibri.host.vulkan import probe_vulkan


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--calls", type=int, default=2000, help="looks at the memory in each run")
    options = parser.parse_args()
    print_machine()
    with AvailableMemory() as memory:
        base, other = interleave(
            lambda: _microseconds(psutil.virtual_memory, options.calls),
            lambda: _microseconds(memory.read, options.calls),
            options.runs,
        )
    pairs = Pairs(tuple(base), tuple(other), "us")
    print_pairs("one look at the available memory", pairs, "psutil.virtual_memory", "AvailableMemory.read")
    with compiled_modules():
        _report_vulkan(options.runs)


def _report_vulkan(runs: int) -> None:
    def probe() -> float:
        began = time.perf_counter()
        probe_vulkan()
        return time.perf_counter() - began

    peer = shutil.which("vulkaninfo")
    devices, _ = probe_vulkan()
    if peer is None or not devices:
        print_heading(f"Vulkan probe ({runs} runs), not compared: no vulkaninfo, or no device here")
        print_figures("probe_vulkan", [probe() for _ in range(runs)], "s")
        return
    base, other = interleave(lambda: seconds_of((peer, "--summary")), probe, runs)
    print_pairs("Vulkan probe", Pairs(tuple(base), tuple(other), "s"), "vulkaninfo --summary", "probe_vulkan")


def _microseconds(look: Callable[[], object], calls: int) -> float:
    """Return the mean time of one call."""
    began = time.perf_counter()
    for _ in range(calls):
        look()
    return (time.perf_counter() - began) / calls * 1e6


if __name__ == "__main__":
    main()
