"""A process that is ours from its start to its end: its tree, its output, its limits."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Self

from pytest_colibri.errors import UsageError
from pytest_colibri.subjects.protocol import Launch
from pytest_colibri.units import KIB, MIB
from pytest_colibri.witness.evidence import Output

if TYPE_CHECKING:
    import psutil

MAX_LINES = 100_000
MAX_LINE_BYTES = 8 * MIB
MAX_STREAM_BYTES = 16 * MIB
GRACE_S = 1.0

_TREE_REFRESH_S = 0.1
_LAUNCHER = Path(__file__).with_name("launcher.py")

Ended = Literal["itself", "timeout", "floor"]
_Stream = Literal["stdout", "stderr"]


class OwnedProcess:
    """Starts ``launch`` in a session of its own; leaving the context ends its whole tree, and so does the
    end of this process.

    It waits for :meth:`open_gate` before it becomes the program, so that a tracer is in place before its
    first instruction (not on Windows, where nothing traces it). Output is bounded: MAX_LINES, MAX_LINE_BYTES
    and MAX_STREAM_BYTES for each stream, of which nothing is kept from the first line on that goes beyond.
    Raises UsageError when the program or the directory does not exist or cannot be used.
    """

    def __init__(self, launch: Launch) -> None:
        self._argv = (_program(launch), *launch.argv[1:])
        self._launch = launch
        self._report: IO[bytes] | None = None
        self._process = self._start()
        self.pid = self._process.pid if self._report is None else self._reported_pid(self._report)
        self.tree = ProcessTree(self.pid, adopter=self._process.pid)
        self._ended: Ended = "itself"
        self._truncated = False
        self._exited = threading.Event()
        self._lines: dict[_Stream, list[str]] = {"stdout": [], "stderr": []}
        self._events: queue.SimpleQueue[tuple[_Stream, str | None] | None] = queue.SimpleQueue()
        _prefer_for_out_of_memory_kill(self.pid)

    def _start(self) -> subprocess.Popen[bytes]:
        return self._start_program() if sys.platform == "win32" else self._start_launcher()

    def _start_program(self) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(self._launch.environment),
                cwd=self._launch.directory,
            )
        except OSError as error:
            raise self._not_started(str(error.strerror)) from None

    def _start_launcher(self) -> subprocess.Popen[bytes]:
        reader, writer = os.pipe()
        self._report = os.fdopen(reader, "rb")
        try:
            return subprocess.Popen(
                (sys.executable, "-I", "-S", str(_LAUNCHER), str(writer)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(writer,),
                cwd=self._launch.directory,
                start_new_session=True,
            )
        except OSError as error:
            self._report.close()
            raise self._not_started(f"{sys.executable}: {error.strerror}") from None
        finally:
            os.close(writer)

    def _reported_pid(self, report: IO[bytes]) -> int:
        line = report.readline()  # a tracer that attaches to a process still loading can crash it
        if not line:
            raise self._not_started(f"{sys.executable} could not run {_LAUNCHER}")
        return int(line)

    def _not_started(self, reason: str) -> UsageError:
        return UsageError(f"{self._argv[0]}: cannot be started: {reason}")

    @property
    def has_ended(self) -> bool:
        """Whether the first process has ended."""
        return self._exited.is_set()

    def open_gate(self) -> None:
        """Let the process become the program. Raises UsageError when it cannot be executed."""
        if self._report is None or self._process.stdin is None:
            return
        order = {"argv": self._argv, "env": dict(self._launch.environment)}
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        obstacle = self._report.read()  # ends when the program is executed
        if obstacle:
            raise self._not_started(obstacle.decode())

    def __enter__(self) -> Self:
        for stream, pipe in (("stdout", self._process.stdout), ("stderr", self._process.stderr)):
            threading.Thread(target=self._read, args=(stream, pipe), daemon=True).start()
        threading.Thread(target=self._await_exit, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end(GRACE_S)
        for pipe in (self._process.stdin, self._report):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def _read(self, stream: _Stream, pipe: IO[bytes]) -> None:
        with pipe:
            for line in self._within_bounds(pipe):
                self._events.put((stream, line.decode(errors="replace").rstrip("\r\n")))
            while pipe.read(64 * KIB):
                self._truncated = True  # read on, for a full pipe would stop the engine
        self._events.put((stream, None))

    def _within_bounds(self, pipe: IO[bytes]) -> Iterator[bytes]:
        room = MAX_STREAM_BYTES
        for _ in range(MAX_LINES):
            line = pipe.readline(MAX_LINE_BYTES + 1)
            room -= len(line)
            if len(line) > MAX_LINE_BYTES or room < 0:
                self._truncated = True
                return
            if not line:
                return
            yield line

    def _await_exit(self) -> None:
        self._process.wait()
        self._exited_at = time.monotonic()
        self._exited.set()
        self._events.put(None)

    def run(self, on_line: Callable[[str], None] | None = None) -> Output:
        """Follow the process to its end, at the latest to the timeout of its launch."""
        began = time.monotonic()
        deadline = began + self._launch.timeout_s
        open_streams, exited = 2, False
        while open_streams or not exited:
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                if self._ended != "itself" or exited:
                    break  # a process that escaped from the tree still holds a pipe
                self._ended = "timeout"
                self._end(GRACE_S)
                deadline = time.monotonic() + GRACE_S
                continue
            if event is None:
                exited = True
                self._end(0)
                deadline = time.monotonic() + GRACE_S
            elif event[1] is None:
                open_streams -= 1
            else:
                self._take(event[0], event[1], on_line)
        return self._output(began)

    def _take(self, stream: _Stream, line: str, on_line: Callable[[str], None] | None) -> None:
        self._lines[stream].append(line)
        if on_line is not None and stream == "stdout":
            on_line(line)

    def _output(self, began: float) -> Output:
        status = self._process.returncode
        return Output(
            status=-signal.SIGTERM if status is None else status,
            ended=self._ended,
            stdout=tuple(self._lines["stdout"]),
            stderr=tuple(self._lines["stderr"]),
            wall_us=int((self._exited_at - began) * 1e6),
            truncated=self._truncated,
            survivors=self.tree.survivors(GRACE_S),
        )

    def stop_at_floor(self) -> None:
        """Kill the whole tree at once; called by the memory sampler from its thread."""
        if not self._exited.is_set():
            self._ended = "floor"
            self._signal_tree(forcibly=True)

    def _end(self, grace_s: float) -> None:
        if not self._exited.is_set():
            self._signal_tree(forcibly=False)
            self._exited.wait(grace_s)
        self._signal_tree(forcibly=True)
        if not self._exited.wait(GRACE_S):
            self._process.kill()
            self._exited.wait(GRACE_S)

    def _signal_tree(self, *, forcibly: bool) -> None:
        import psutil

        processes = self.tree.remaining()  # before a parent ends, which hides its children from us
        if sys.platform != "win32":
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL if forcibly else signal.SIGTERM)
        for process in processes:
            with suppress(psutil.Error):
                process.kill() if forcibly else process.terminate()


class ProcessTree:
    """A process that leads its session, and its descendants: also those whose parents have ended since, as
    long as they were seen once, stayed in the session, or became children of ``adopter``."""

    def __init__(self, pid: int, *, adopter: int) -> None:
        import psutil

        self._leader = pid
        self._adopter = adopter
        self._lock = threading.Lock()
        self._refresh_due = 0.0
        self._known: dict[int, psutil.Process] = {}
        self._strangers: set[psutil.Process] = set()
        with suppress(psutil.NoSuchProcess):
            self._known[pid] = psutil.Process(pid)

    def processes(self) -> tuple[psutil.Process, ...]:
        """Return the processes of the tree; new ones are looked for at most ten times a second."""
        with self._lock:
            if time.monotonic() >= self._refresh_due:
                self._refresh()
                self._refresh_due = time.monotonic() + _TREE_REFRESH_S
            return tuple(self._known.values())

    def remaining(self) -> tuple[psutil.Process, ...]:
        """Return the processes of the tree that run now."""
        with self._lock:
            self._refresh()
            return tuple(self._known.values())

    def survivors(self, patience_s: float) -> tuple[str, ...]:
        """Name the processes of the tree that still run after ``patience_s`` seconds."""
        import psutil

        _, alive = psutil.wait_procs(self.remaining(), timeout=patience_s)
        named = []
        for process in alive:
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    named.append(f"{process.name()} (process {process.pid})")
        return tuple(named)

    def _refresh(self) -> None:
        import psutil

        self._known = {pid: process for pid, process in self._known.items() if process.is_running()}
        for process in psutil.process_iter():
            if process.pid in self._known or process in self._strangers:
                continue
            with suppress(psutil.Error, OSError):
                if self._belongs(process):
                    self._known[process.pid] = process
                else:
                    self._strangers.add(process)  # asking again each time would cost milliseconds

    def _belongs(self, process: psutil.Process) -> bool:
        parent = process.ppid()
        if parent in self._known or parent == self._adopter:
            return True
        return sys.platform != "win32" and os.getsid(process.pid) == self._leader

    def resident_bytes(self) -> int | None:
        """Return the resident set of the whole tree, None when no process of it can be read."""
        return self._sum(lambda process: int(process.memory_info().rss))

    def proportional_bytes(self) -> int | None:
        """Return the proportional set size of the whole tree, None where the system does not tell it."""

        def read(process: psutil.Process) -> int:
            sizes: Any = process.memory_full_info()  # has a PSS on Linux only
            return int(sizes.pss)

        return self._sum(read)

    def _sum(self, read: Callable[[psutil.Process], int]) -> int | None:
        import psutil

        total = 0
        for process in self.processes():
            with suppress(psutil.Error, OSError, AttributeError):
                total += read(process)
        return total or None  # a process that has ended reads as 0, a running one never does


def _program(launch: Launch) -> str:
    name = launch.argv[0]
    if not launch.directory.is_dir():
        raise UsageError(f"{launch.directory}: no such folder to run {name} in")
    by_path = Path(name).name != name
    wanted = str(launch.directory / name) if by_path else name
    found = shutil.which(wanted, path=launch.environment.get("PATH", os.defpath))
    if found is None:
        where = "" if by_path else " in the PATH of its environment"
        raise UsageError(f"{name}: no such program{where}, or it may not be executed")
    return found


def _prefer_for_out_of_memory_kill(pid: int) -> None:
    """Let the kernel end this process before the one that watches it, should memory run out (Linux)."""
    with suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
