"""The process under observation is ours: its output is bounded, its whole tree ends when it must."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from watching import launch, python

from pytest_colibri.errors import UsageError
from pytest_colibri.subjects.protocol import Launch
from pytest_colibri.units import MIB
from pytest_colibri.witness import process as owned
from pytest_colibri.witness.evidence import WatchedRun
from pytest_colibri.witness.memory import MemoryGuard
from pytest_colibri.witness.run import watch

# Starts a child in the session and one that leaves it, prints their identifiers, then waits.
FAMILY = """
import subprocess, sys, time
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
sleeper = [sys.executable, "-c", stubborn]
children = [subprocess.Popen(sleeper), subprocess.Popen(sleeper, start_new_session=True)]
print(*(child.pid for child in children), flush=True)
time.sleep(float(sys.argv[1]))
"""


def run(spec: Launch) -> WatchedRun:
    return watch(spec, tracer=None, guard=MemoryGuard())


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def all_gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 5
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(runs, pids))


@pytest.mark.parametrize("status", [0, 3, 255])
def test_the_exit_status_is_kept(status: int) -> None:
    output = run(python(f"raise SystemExit({status})")).output
    assert (output.status, output.ended) == (status, "itself")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals to die of")
def test_a_signal_is_a_negative_status() -> None:
    output = run(python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")).output
    assert (output.status, output.ended) == (-signal.SIGSEGV, "itself")


def test_lines_of_both_streams_are_kept_apart_and_told_as_they_come() -> None:
    told: list[str] = []
    program = "import sys; print('one'); print('two', file=sys.stderr); print('three', end='')"
    output = watch(python(program), tracer=None, guard=MemoryGuard(), on_line=told.append).output
    assert (output.stdout, output.stderr, output.truncated) == (("one", "three"), ("two",), False)
    assert told == ["one", "three"]


def test_nothing_can_be_read_from_standard_input() -> None:
    assert run(python("import sys; print(repr(sys.stdin.read()))")).output.stdout == ("''",)


def test_output_is_bounded_in_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned, "MAX_LINES", 10)
    output = run(python("for n in range(1000): print(n)")).output
    assert (len(output.stdout), output.truncated, output.status) == (10, True, 0)


def test_a_line_of_megabytes_is_kept_whole() -> None:
    output = run(python(f"print('x' * {4 * MIB}); print('next')")).output
    assert ([len(line) for line in output.stdout], output.truncated) == ([4 * MIB, 4], False)


def test_nothing_is_kept_from_a_line_without_end_on() -> None:
    told: list[str] = []
    program = f"import sys; print('one'); print('x' * {2 * owned.MAX_LINE_BYTES}); print('next'); "
    program += "print('error', file=sys.stderr)"
    output = watch(python(program), tracer=None, guard=MemoryGuard(), on_line=told.append).output
    assert (output.stdout, output.stderr, output.truncated, output.status) == (("one",), ("error",), True, 0)
    assert told == ["one"]


def test_a_stream_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned, "MAX_STREAM_BYTES", 1000)
    program = (
        "import sys\nfor n in range(9000): sys.stderr.write('y' * 99 + '\\n')\nsys.stderr.write('end\\n')"
    )
    output = run(python(program)).output
    assert (output.stderr, output.truncated) == (("y" * 99,) * 10, True)


def test_a_stream_that_fills_its_bounds_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned, "MAX_LINES", 3)
    output = run(python("for n in range(3): print(n)")).output
    assert (output.stdout, output.truncated) == (("0", "1", "2"), False)


@pytest.mark.parametrize(("sleep_s", "ended"), [("600", "timeout"), ("0.5", "itself")])
def test_the_whole_tree_ends_with_its_first_process(sleep_s: str, ended: str) -> None:
    spec = Launch((sys.executable, "-c", FAMILY, sleep_s), dict(os.environ), Path.cwd(), timeout_s=2.0)
    output = run(spec).output
    assert (output.ended, output.survivors) == (ended, ())
    assert all_gone([int(pid) for pid in output.stdout[0].split()])


def test_an_exception_in_the_caller_ends_the_tree() -> None:
    seen: list[str] = []

    def refuse(line: str) -> None:
        seen.append(line)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch(python(FAMILY, "600"), tracer=None, guard=MemoryGuard(), on_line=refuse)
    assert all_gone([int(pid) for pid in seen[0].split()])


# Leaves a daemon behind, of a session, an environment and a parent that tell nothing of where it comes from.
DAEMON = """
import os, sys
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(write, b"%d" % os.getpid())
        os.execve("/bin/sleep", ["sleep", "600"], {})
    os._exit(0)
os.wait()
print(os.read(read, 20).decode(), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt the daemons of another")
@pytest.mark.parametrize("traced", [False, True])
def test_a_daemon_does_not_survive(traced: bool, request: pytest.FixtureRequest) -> None:
    tracer = request.getfixturevalue("tracer") if traced else None
    output = watch(python(DAEMON), tracer=tracer, guard=MemoryGuard()).output
    assert (output.status, output.survivors) == (0, ()), output.stderr
    assert not runs(int(output.stdout[0]))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt the daemons of another")
def test_other_orphans_are_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", DAEMON], stdout=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdout is not None
        pid = int(stranger.stdout.readline())
    try:
        assert run(python("print('x')")).output.survivors == ()
        assert runs(pid)
    finally:
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A control group whose frozen processes not even SIGKILL ends; needs root and version 1."""
    group = Path("/sys/fs/cgroup/freezer") / f"colibri-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no freezer group can be made here: {error.strerror}")
    try:
        yield group
    finally:
        (group / "freezer.state").write_text("THAWED")
        assert all_gone([int(pid) for pid in (group / "tasks").read_text().split()])
        group.rmdir()


def test_a_process_that_cannot_be_ended_is_named(freezer: Path) -> None:
    program = (
        "import pathlib, subprocess, sys; group = pathlib.Path(sys.argv[1]); "
        "child = subprocess.Popen(['/bin/sleep', '600']); print(child.pid); "
        "(group / 'tasks').write_text(str(child.pid)); (group / 'freezer.state').write_text('FROZEN')"
    )
    output = run(python(program, str(freezer))).output
    assert output.status == 0, output.stderr
    assert output.survivors == (f"sleep (process {output.stdout[0]})",)


# Watches FAMILY, of which it prints what it prints, under the tracer when asked to.
WATCHER = """
import os, pathlib, sys
from pytest_colibri.subjects.protocol import Launch
from pytest_colibri.witness.dispatch import DispatchTracer
from pytest_colibri.witness.memory import MemoryGuard
from pytest_colibri.witness.run import watch
spec = Launch((sys.executable, "-c", sys.argv[1], "600"), dict(os.environ), pathlib.Path.cwd(), 60.0)
tracer = DispatchTracer() if sys.argv[2] == "traced" else None
watch(spec, tracer=tracer, guard=MemoryGuard(), on_line=lambda line: print(os.getpid(), line, flush=True))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals to die of")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("traced", [False, True])
def test_the_engine_ends_with_the_one_who_watches_it(
    number: signal.Signals, traced: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if traced:
        request.getfixturevalue("tracer")
    command = [sys.executable, "-c", WATCHER, FAMILY, "traced" if traced else "alone"]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # the tracer cannot clear it when it is killed
    with subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None
        pids = [int(pid) for pid in watcher.stdout.readline().split()]
        watched = [process.pid for process in psutil.Process(watcher.pid).children(recursive=True)]
        assert set(pids[1:]) < set(watched)
        watcher.send_signal(number)
    assert watcher.returncode == -number
    assert all_gone(watched)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
def test_an_engine_that_kills_what_stands_over_it_ends_too() -> None:
    program = "import os, time; print(os.getpid(), flush=True); os.kill(os.getppid(), 9); time.sleep(600)"
    output = run(python(program)).output
    assert (output.status, output.ended, output.survivors) == (-signal.SIGKILL, "itself", ())
    assert all_gone([int(output.stdout[0])])


def test_a_process_that_ignores_the_request_is_killed() -> None:
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    output = run(python(program, timeout_s=1.0)).output
    assert output.ended == "timeout"
    assert output.status == (-signal.SIGKILL if sys.platform != "win32" else 15)


def test_no_thread_is_left_behind() -> None:
    before = threading.active_count()
    run(python("print('x')"))
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has an out-of-memory killer to steer")
def test_the_kernel_prefers_the_child_when_memory_runs_out() -> None:
    output = run(
        python("import time; time.sleep(0.1); print(open('/proc/self/oom_score_adj').read())")
    ).output
    assert output.stdout[0] == "1000"


def test_an_unknown_program_or_folder_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no-such-engine: no such program"):
        run(launch("no-such-engine"))
    with pytest.raises(UsageError, match=r"\./no-such-engine: no such program, or"):
        run(launch("./no-such-engine"))
    with pytest.raises(UsageError, match="no such folder"):
        run(Launch((sys.executable,), {}, tmp_path / "absent", 1.0))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows knows programs by their names")
@pytest.mark.parametrize("traced", [False, True])
def test_a_file_that_is_no_program_is_a_usage_error(
    tmp_path: Path, traced: bool, request: pytest.FixtureRequest
) -> None:
    file = tmp_path / "engine"
    file.write_bytes(b"\x00")
    file.chmod(0o755)
    tracer = request.getfixturevalue("tracer") if traced else None
    with pytest.raises(UsageError, match="cannot be started: Exec format error"):
        watch(launch(str(file)), tracer=tracer, guard=MemoryGuard())
