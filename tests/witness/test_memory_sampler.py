"""The memory witness on real processes that take real memory, within real limits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from watching import python

from pytest_colibri.host.memory import AvailableMemory
from pytest_colibri.units import MIB
from pytest_colibri.witness.evidence import MemorySample
from pytest_colibri.witness.memory import MemoryGuard, thin_out
from pytest_colibri.witness.run import watch

# Touches ARGUMENT megabytes in steps of 16, as fast as it can, then holds them for a while.
HOG = """
import sys, time
step = 16 * 2**20
held = [bytearray(b"x") * step for _ in range(int(sys.argv[1]) * 2**20 // step)]
print("all taken", flush=True)
time.sleep(1)
"""


def test_the_peak_of_the_tree_is_seen() -> None:
    memory = watch(python(HOG, "256"), tracer=None, guard=MemoryGuard()).memory
    assert 256 * MIB <= memory.peak_tree_bytes < 400 * MIB
    assert memory.least_available_bytes is not None
    assert not memory.stopped_at_floor
    assert [s.at_us for s in memory.samples] == sorted(s.at_us for s in memory.samples)


def test_children_are_counted_too() -> None:
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOG!r}, '200'])"
    memory = watch(python(parent), tracer=None, guard=MemoryGuard()).memory
    assert 200 * MIB <= memory.peak_tree_bytes < 350 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the proportional set size")
def test_shared_pages_count_once_in_the_proportional_size() -> None:
    program = "import os, time; held = bytearray(b'x') * (200 << 20); os.fork(); time.sleep(1.5)"
    memory = watch(python(program), tracer=None, guard=MemoryGuard()).memory
    assert memory.peak_tree_bytes >= 400 * MIB
    assert memory.peak_proportional_bytes is not None
    assert 200 * MIB <= memory.peak_proportional_bytes < 300 * MIB


def test_an_engine_is_stopped_at_the_floor_before_it_takes_the_rest() -> None:
    with AvailableMemory() as memory:
        available = memory.read()
    if available is None or available < 3000 * MIB:
        pytest.skip("less than 3 GB of memory can be taken here")
    floor = available - 600 * MIB
    run = watch(python(HOG, "1500"), tracer=None, guard=MemoryGuard(floor_bytes=floor))
    assert run.output.ended == "floor"
    assert run.memory.stopped_at_floor
    assert run.memory.floor_bytes == floor
    assert run.output.stdout == ()
    assert run.memory.peak_tree_bytes < 1400 * MIB
    if sys.platform != "win32":
        assert run.output.status == -signal.SIGKILL


def test_without_a_floor_nothing_is_stopped() -> None:
    run = watch(python(HOG, "64"), tracer=None, guard=MemoryGuard(floor_bytes=0))
    assert (run.output.ended, run.output.stdout, run.memory.stopped_at_floor) == (
        "itself",
        ("all taken",),
        False,
    )


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group with a limit of 400 MiB; needs root and a mounted memory controller."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    version1 = (v1 / "memory.limit_in_bytes").exists()
    group = (v1 if version1 else v2) / f"colibri-test-{os.getpid()}"
    limit = group / ("memory.limit_in_bytes" if version1 else "memory.max")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error.strerror}")
    try:
        try:
            limit.write_text(str(400 * MIB))
        except OSError as error:
            pytest.skip(f"the memory controller is not available in a new control group: {error.strerror}")
        yield group
    finally:
        with suppress(OSError):
            group.rmdir()


WATCH_IN_GROUP = """
import json, os, pathlib, sys
pathlib.Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from pytest_colibri.subjects.protocol import Launch
from pytest_colibri.witness.memory import MemoryGuard
from pytest_colibri.witness.run import watch
spec = Launch((sys.executable, "-c", sys.argv[2], "1000"), dict(os.environ), pathlib.Path.cwd(), 60.0)
run = watch(spec, tracer=None, guard=MemoryGuard(floor_bytes=int(sys.argv[3])))
print(json.dumps([run.output.ended, run.memory.least_available_bytes, run.memory.peak_tree_bytes]))
"""


def test_the_limit_of_a_control_group_is_the_room_that_is_left(memory_group: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", WATCH_IN_GROUP, str(memory_group), HOG, str(150 * MIB)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=True)
    ended, least_available, peak = json.loads(done.stdout)
    assert ended == "floor"
    assert least_available < 150 * MIB
    assert peak < 400 * MIB


samples = st.builds(
    MemorySample,
    at_us=st.integers(0, 10**9),
    available_bytes=st.none() | st.integers(0, 10**12),
    tree_bytes=st.integers(1, 10**12),
    proportional_bytes=st.none() | st.integers(1, 10**12),
)


@given(st.lists(samples, min_size=8, max_size=60))
def test_thinning_keeps_the_extremes_and_the_order(taken: list[MemorySample]) -> None:
    kept = thin_out(taken)
    assert len(kept) <= (len(taken) + 1) // 2 + 4
    assert [s for s in taken if any(s is k for k in kept)] == kept
    assert max(s.tree_bytes for s in kept) == max(s.tree_bytes for s in taken)
    for name, pick in (("available_bytes", min), ("proportional_bytes", max)):
        before = [value for s in taken if (value := getattr(s, name)) is not None]
        after = [value for s in kept if (value := getattr(s, name)) is not None]
        assert pick(after, default=None) == pick(before, default=None)
    assert kept[0] is taken[0]
    assert kept[-1] is taken[-1]
