"""The witness by DRM client counters: every driver's format, doctored ones, and live processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recording import RECORDINGS, FakeProc, recording
from watching import PROGRAMS, launch

from pytest_colibri.errors import Unavailable
from pytest_colibri.units import KIB, MIB
from pytest_colibri.witness import fdinfo
from pytest_colibri.witness.evidence import DeviceTime, DeviceUse, WatchedRun
from pytest_colibri.witness.fdinfo import FdinfoSession, FdinfoWitness, parse_fdinfo
from pytest_colibri.witness.memory import MemoryGuard
from pytest_colibri.witness.run import watch
from pytest_colibri.witness.sampling import time_within

ROOT = Path(__file__).parents[2]

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="links to devices are as on Linux")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc/PID/fdinfo")


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path / "proc")


@pytest.fixture
def session(proc: FakeProc, tmp_path: Path) -> FdinfoSession:
    return FdinfoSession(proc.root, tmp_path / "drivers")


def computed(use: DeviceUse) -> dict[str, int | None]:
    return {engine.engine: engine.busy_ns for engine in use.engines if engine.compute}


def test_every_recording_says_where_its_format_is_from() -> None:
    files = sorted(RECORDINGS.iterdir())
    assert len(files) >= 14
    for file in files:
        assert "constructed from the format at https://" in file.read_text(encoding="utf-8"), file


@posix_only
@pytest.mark.parametrize(
    ("name", "pci", "times", "resident"),
    [
        ("i915", "0000:00:02.0", {"render": 912_345_678, "compute": 55_000_000_000}, 70 * MIB + 4096),
        ("i915-without-times", "0000:03:00.0", {}, None),
        ("amdgpu", "0000:08:00.0", {"gfx": 107_000_000, "compute": 9_000_000_000}, 10_260 * KIB),
        ("amdgpu-newer-kernel", "0000:c5:00.0", {"gfx": 0, "compute": 0}, 9 * MIB),
        ("msm", None, {"gpu": 4_200_000_000}, 36 * MIB),
        ("panfrost", None, {"vertex-tiler": 72_000_000}, 36_496 * KIB),
        ("panthor", None, {"panthor": 111_000_000_000}, 16_480 * KIB),
        ("v3d", None, {"csd": 188_000_000_000}, None),
        ("unknown-driver", None, {}, None),
    ],
)
def test_each_driver_tells_time_of_its_own_engines(
    session: FdinfoSession,
    proc: FakeProc,
    name: str,
    pci: str | None,
    times: dict[str, int],
    resident: int | None,
) -> None:
    proc.opens(1, 5, recording(f"{name}.fdinfo"))
    (use,) = session.read([1], 0)
    assert (use.device.pci, computed(use), use.resident_bytes) == (pci, times, resident)


@posix_only
def test_cycles_become_time_by_the_clock_of_their_engine(session: FdinfoSession, proc: FakeProc) -> None:
    proc.opens(1, 5, recording("xe-first.fdinfo"))
    (first,) = session.read([1], 1_000_000)
    assert computed(first) == {"rcs": None, "ccs": None}
    proc.opens(1, 5, recording("xe-second.fdinfo"))
    (second,) = session.read([1], 2_000_000)
    assert computed(second) == {"rcs": 0, "ccs": 10_600_000 * 10**9 // 19_200_000}
    assert second.resident_bytes == 2 * 2**30 + 256 * KIB
    (third,) = session.read([1], 9_000_000)
    assert computed(third) == computed(second)


@posix_only
def test_a_client_counts_once_however_many_share_it(session: FdinfoSession, proc: FakeProc) -> None:
    for pid, descriptor in ((1, 5), (1, 6), (2, 5)):
        proc.opens(pid, descriptor, recording("amdgpu.fdinfo"))
    (use,) = session.read([1, 2], 0)
    assert computed(use)["compute"] == 9_000_000_000
    assert use.resident_bytes == 10_260 * KIB


@posix_only
def test_clients_add_up_and_devices_stand_apart(session: FdinfoSession, proc: FakeProc) -> None:
    other = recording("amdgpu.fdinfo").replace("217", "218")
    proc.opens(1, 5, recording("amdgpu.fdinfo"))
    proc.opens(1, 6, other)
    proc.opens(2, 5, other.replace("08:00.0", "09:00.0"))
    first, second = session.read([1, 2], 0)
    assert (computed(first)["compute"], computed(second)["compute"]) == (18_000_000_000, 9_000_000_000)
    assert (first.device.pci, second.device.pci) == ("0000:08:00.0", "0000:09:00.0")
    assert first.device.index != second.device.index


@posix_only
def test_a_client_that_is_gone_keeps_its_time_and_none_of_its_memory(
    session: FdinfoSession, proc: FakeProc
) -> None:
    proc.opens(1, 5, recording("i915.fdinfo"))
    session.read([1], 0)
    proc.closes(1, 5)
    (use,) = session.read([1], 1)
    assert (computed(use)["compute"], use.resident_bytes, use.ended_clients) == (55_000_000_000, 0, 1)
    (use,) = session.read([], 2)
    assert computed(use)["compute"] == 55_000_000_000


@posix_only
def test_a_count_that_falls_stays_at_the_larger_one(session: FdinfoSession, proc: FakeProc) -> None:
    proc.opens(1, 5, recording("i915.fdinfo"))
    session.read([1], 0)
    proc.opens(1, 5, recording("i915.fdinfo").replace("55000000000", "54000000000"))
    (use,) = session.read([1], 1)
    assert computed(use)["compute"] == 55_000_000_000


@posix_only
@pytest.mark.parametrize(
    ("name", "states", "measured"),
    [
        ("panfrost", ["0"], False),
        ("panfrost", ["1"], True),
        ("panfrost", ["1", "0"], False),
        ("panfrost", ["what"], True),
        ("panthor", ["1"], False),
        ("panthor", ["3"], True),
    ],
)
def test_a_driver_that_is_set_not_to_measure_is_not_idle(
    session: FdinfoSession, proc: FakeProc, tmp_path: Path, name: str, states: list[str], measured: bool
) -> None:
    for number, state in enumerate(states):
        device = tmp_path / "drivers" / name / f"{number}fa000.gpu"
        device.mkdir(parents=True)
        (device / "profiling").write_text(f"{state}\n")
    proc.opens(1, 5, recording(f"{name}.fdinfo"))
    (use,) = session.read([1], 0)
    assert all((busy is not None) == measured for busy in computed(use).values())
    assert bool(session.notes()) != measured
    assert measured or "profiling" in session.notes()[0]


@posix_only
def test_work_through_rocm_is_in_no_counter(session: FdinfoSession, proc: FakeProc) -> None:
    proc.opens(1, 5, recording("amdgpu-newer-kernel.fdinfo"))
    (use,) = session.read([1], 0)
    assert all(engine.bounded for engine in use.engines)
    proc.opens(1, 6, "", target="/dev/kfd")
    (use,) = session.read([1], 1)
    assert computed(use) == {"gfx": 0, "compute": 0}
    assert not any(engine.bounded for engine in use.engines)
    assert "ROCm" in session.notes()[0]


@posix_only
def test_only_descriptors_of_graphics_devices_are_read(session: FdinfoSession, proc: FakeProc) -> None:
    proc.opens(1, 5, recording("amdgpu.fdinfo"), target="/tmp/a file that says so")
    proc.opens(1, 6, recording("ordinary.fdinfo"))
    assert session.read([1, 99_999], 0) == ()


@posix_only
def test_clients_are_bounded(session: FdinfoSession, proc: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fdinfo, "MAX_CLIENTS", 2)
    for number in range(4):
        proc.opens(1, number, recording("amdgpu.fdinfo").replace("217", str(number)))
    (use,) = session.read([1], 0)
    assert computed(use)["compute"] == 18_000_000_000
    assert not any(engine.bounded for engine in use.engines)
    assert "more than 2 clients" in session.notes()[0]


CLIENT = "drm-driver:\ti915\ndrm-client-id:\t1\n"


@pytest.mark.parametrize(
    "line",
    [
        "drm-engine-render:\t-5 ns\n",
        "drm-engine-render:\t5\n",
        "drm-engine-render:\t5 ms\n",
        "drm-engine-render:\t5 ns",  # cut off within a figure, it may be
        "drm-engine-render:\t5e3 ns\n",
        "drm-engine-render:\t\u0665 ns\n",
        "drm-engine-render:\t18446744073709551616 ns\n",
        "drm-engine-render:\t" + "9" * 5000 + " ns\n",
        "drm-engine-render\t5 ns\n",
        "drm-engine- render:\t5 ns\n",
        "drm-engine-" + "r" * 100 + ":\t5 ns\n",
        "drm-engine-capacity-render:\t5\n",
        "drm-maxfreq-render:\t5 Hz\n",
    ],
)
def test_what_is_not_as_documented_is_unmeasured(line: str) -> None:
    client = parse_fdinfo(CLIENT + line)
    assert client is not None
    assert client.busy_ns == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "drm-driver:\ti915\n",
        "drm-client-id:\t1\n",
        "drm-driver:\ti915\ndrm-client-id:\t-1\n",
        CLIENT[:-1],
    ],
)
def test_without_driver_and_number_there_is_no_client(text: str) -> None:
    assert parse_fdinfo(text) is None


def test_a_name_out_of_a_driver_is_one_short_line() -> None:
    client = parse_fdinfo(f"drm-driver:\t\x1b[31m{'x' * 70}\ndrm-client-id:\t1\ndrm-pdev:\tnowhere\n")
    assert client is not None
    assert client.driver.isprintable()
    assert len(client.driver) <= 32
    assert client.pci is None


@given(st.text(max_size=300), st.sampled_from(["i915", "xe-first", "amdgpu"]), st.integers(0, 400))
def test_no_text_breaks_the_parser(text: str, name: str, cut: int) -> None:
    parse_fdinfo(text)
    parse_fdinfo(recording(f"{name}.fdinfo")[:cut] + text)


@posix_only
@pytest.mark.parametrize(
    ("name", "able", "said"),
    [
        ("i915", True, "0000:00:02.0 (i915)"),
        ("i915-without-times", False, "tells no time of an engine that computes"),
        ("amdgpu", True, "not of work through ROCm"),
        ("panthor", True, "a device without PCI address (panthor)"),
        ("unknown-driver", False, "future"),
        ("ordinary", False, "tells nothing of its clients"),
    ],
)
@linux_only
def test_reach_is_what_the_driver_tells_of_this_process(
    proc: FakeProc, tmp_path: Path, name: str, able: bool, said: str
) -> None:
    nodes = tmp_path / "dri"
    nodes.mkdir()
    (nodes / "renderD128").touch()
    for descriptor in range(256):
        proc.opens("self", descriptor, recording(f"{name}.fdinfo"))
    reach = FdinfoWitness(proc.root, nodes, tmp_path / "drivers").reach()
    assert (reach.able, said in reach.statement) == (able, True), reach.statement


@linux_only
def test_without_a_device_the_reach_says_so(tmp_path: Path) -> None:
    reach = FdinfoWitness(nodes=tmp_path / "none").reach()
    assert not reach.able
    assert "--device=/dev/dri" in reach.statement


@linux_only
def test_this_process_is_no_client_of_a_device() -> None:
    assert FdinfoSession(Path("/proc"), Path("/sys/bus/platform/drivers")).read([os.getpid()], 0) == ()


AS_NOBODY = """
import os, sys
from pathlib import Path
from pytest_colibri.errors import Unavailable
from pytest_colibri.witness.fdinfo import FdinfoSession, FdinfoWitness
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
ended = os.fork()
if ended == 0:
    os._exit(0)
os.waitid(os.P_PID, ended, os.WEXITED | os.WNOWAIT)
session = FdinfoSession(Path("/proc"), Path("/none"))
print(session.read([ended], 0))
try:
    session.read([1], 0)
except Unavailable as error:
    print(error)
print(FdinfoWitness(nodes=Path(sys.argv[1])).reach().statement)
"""


@linux_only
def test_what_may_not_be_looked_at_is_no_reach_and_an_ended_process_no_obstacle() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become a user who may not look at others")
    with tempfile.TemporaryDirectory() as nodes:  # those of pytest are closed to other users
        Path(nodes).chmod(0o755)
        Path(nodes, "renderD128").touch(mode=0o600)
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, nodes],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    seen, refused, reach = done.stdout.splitlines()
    assert seen == "()"
    assert "may not be looked at: Permission denied" in refused
    assert "renderD128: Permission denied" in reach


def run_engine(tmp_path: Path, *phases: str) -> WatchedRun:
    """Run the engine that stands for one with a driver, with the real sampler on its real process tree."""
    proc = tmp_path / "live"
    proc.mkdir(parents=True)
    program = (sys.executable, str(PROGRAMS / "counted_engine.py"), str(proc), *phases)
    witness = FdinfoWitness(proc, tmp_path / "dri", tmp_path / "drivers")
    run = watch(launch(*program), tracer=None, guard=MemoryGuard(), counters=[witness])
    assert run.output.status == 0, run.output.stderr
    return run


def in_phase(run: WatchedRun, phase: str) -> dict[str | None, DeviceTime]:
    (window,) = [window for window in run.windows if window.phase == phase]
    return {time.device.pci: time for time in time_within(run.counters[0], window)}


FIRST, SECOND = "0000:03:00.0", "0000:04:00.0"


@linux_only
def test_memory_that_is_full_while_nothing_works_is_no_work(tmp_path: Path) -> None:
    run = run_engine(tmp_path, "fill:90", "decode:0")
    decode = in_phase(run, "decode")[FIRST]
    assert (decode.computed_at_least_ns, decode.computed_at_most_ns) == (0, 0)
    assert decode.peak_resident_bytes == 14_400_000_000


@linux_only
def test_what_works_in_decode_alone_works_in_decode(tmp_path: Path) -> None:
    run = run_engine(tmp_path, "fill:0", "decode:90")
    fill, decode = in_phase(run, "fill")[FIRST], in_phase(run, "decode")[FIRST]
    assert fill.computed_at_most_ns == 0
    assert decode.computed_at_least_ns is not None
    assert 0 < decode.computed_at_least_ns <= 90_000_000
    assert decode.computed_at_most_ns == 90_000_000


@linux_only
def test_each_of_two_devices_has_its_own_time(tmp_path: Path) -> None:
    devices = in_phase(run_engine(tmp_path, "decode:0,90"), "decode")
    assert (devices[FIRST].computed_at_most_ns, devices[SECOND].computed_at_most_ns) == (0, 90_000_000)


@linux_only
def test_work_of_a_process_that_has_ended_stays_and_has_no_upper_bound(tmp_path: Path) -> None:
    decode = in_phase(run_engine(tmp_path, "fill:0", "child:decode:90"), "decode")[FIRST]
    assert decode.computed_at_least_ns is not None
    assert decode.computed_at_least_ns > 0
    assert decode.computed_at_most_ns is None


@linux_only
def test_a_run_that_may_not_be_looked_at_has_no_samples_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise Unavailable("not today")

    monkeypatch.setattr(FdinfoSession, "read", refuse)
    (evidence,) = run_engine(tmp_path, "decode:90").counters
    assert (evidence.samples, evidence.notes) == ((), ("not today",))
