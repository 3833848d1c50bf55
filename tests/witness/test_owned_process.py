"""The process under observation is ours: its output is bounded, its whole tree ends when it must."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from watching import launch, python

from pytest_colibri.errors import UsageError
from pytest_colibri.subjects.protocol import Launch
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


def test_a_line_is_bounded_in_length_and_the_next_one_is_whole() -> None:
    output = run(python(f"print('x' * {3 * owned.MAX_LINE_BYTES}); print('next')")).output
    assert [len(line) for line in output.stdout] == [owned.MAX_LINE_BYTES, 4]
    assert output.truncated


def test_a_stream_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned, "MAX_STREAM_BYTES", 1000)
    output = run(python("import sys\nfor n in range(9000): sys.stderr.write('y' * 99 + '\\n')")).output
    assert (len(output.stderr), output.truncated) == (10, True)


@pytest.mark.parametrize(("sleep_s", "ended"), [("600", "timeout"), ("0.5", "itself")])
def test_the_whole_tree_ends_with_its_first_process(sleep_s: str, ended: str) -> None:
    spec = Launch((sys.executable, "-c", FAMILY, sleep_s), dict(os.environ), Path.cwd(), timeout_s=2.0)
    output = run(spec).output
    assert output.ended == ended
    assert all_gone([int(pid) for pid in output.stdout[0].split()])


def test_an_exception_in_the_caller_ends_the_tree() -> None:
    seen: list[str] = []

    def refuse(line: str) -> None:
        seen.append(line)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch(python(FAMILY, "600"), tracer=None, guard=MemoryGuard(), on_line=refuse)
    assert all_gone([int(pid) for pid in seen[0].split()])


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
def test_a_file_that_is_no_program_is_a_usage_error(tmp_path: Path) -> None:
    file = tmp_path / "engine"
    file.write_bytes(b"\x00")
    file.chmod(0o755)
    with pytest.raises(UsageError, match="cannot be started: Exec format error"):
        run(launch(str(file)))
