"""A process that is ours from its start to its end: its tree, its output, its limits."""

from __future__ import annotations

import json
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
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
MAX_LINE_BYTES = 64 * KIB
MAX_STREAM_BYTES = 16 * MIB
GRACE_S = 1.0

_TREE_REFRESH_S = 0.1
_GATE = Path(__file__).with_name("gate.py")

Ended = Literal["itself", "timeout", "floor"]
_Stream = Literal["stdout", "stderr"]


class OwnedProcess:
    """Starts ``launch`` in a session of its own; leaving the context ends its whole tree.

    A ``gated`` process waits for :meth:`open_gate` before it becomes the program, so that a tracer is in
    place before its first instruction. Output is bounded: MAX_LINES, MAX_LINE_BYTES and MAX_STREAM_BYTES for
    each stream. Raises UsageError when the program or the directory does not exist or cannot be used.
    """

    def __init__(self, launch: Launch, *, gated: bool) -> None:
        self._argv = (_program(launch), *launch.argv[1:])
        self._launch = launch
        self._gated = gated
        self._process = self._start()
        self.pid = self._process.pid
        self.tree = ProcessTree(self.pid)
        self._ended: Ended = "itself"
        self._truncated = False
        self._exited = threading.Event()
        self._lines: dict[_Stream, list[str]] = {"stdout": [], "stderr": []}
        self._events: queue.SimpleQueue[tuple[_Stream, str | None] | None] = queue.SimpleQueue()
        _prefer_for_out_of_memory_kill(self.pid)
        if gated and self._process.stdout is not None:
            self._process.stdout.readline()  # a tracer that attaches to a process still loading can crash it

    def _start(self) -> subprocess.Popen[bytes]:
        gate = (sys.executable, "-I", "-S", str(_GATE))
        try:
            return subprocess.Popen(
                gate if self._gated else self._argv,
                stdin=subprocess.PIPE if self._gated else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=None if self._gated else dict(self._launch.environment),
                cwd=self._launch.directory,
                start_new_session=True,
            )
        except OSError as error:
            raise UsageError(f"{self._argv[0]}: cannot be started: {error.strerror}") from None

    @property
    def has_ended(self) -> bool:
        """Whether the first process has ended."""
        return self._exited.is_set()

    def open_gate(self) -> None:
        """Let a gated process become the program."""
        if self._process.stdin is None:
            raise ValueError("only a gated process has a gate")
        order = {"argv": self._argv, "env": dict(self._launch.environment)}
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def __enter__(self) -> Self:
        for stream, pipe in (("stdout", self._process.stdout), ("stderr", self._process.stderr)):
            threading.Thread(target=self._read, args=(stream, pipe), daemon=True).start()
        threading.Thread(target=self._await_exit, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._end(GRACE_S)

    def _read(self, stream: _Stream, pipe: IO[bytes]) -> None:
        lines = kept_bytes = 0
        at_line_start = True
        with pipe:
            while part := pipe.readline(MAX_LINE_BYTES):
                if at_line_start and lines < MAX_LINES and kept_bytes + len(part) <= MAX_STREAM_BYTES:
                    self._events.put((stream, part.decode(errors="replace").rstrip("\r\n")))
                    lines, kept_bytes = lines + 1, kept_bytes + len(part)
                else:
                    self._truncated = True
                at_line_start = part.endswith(b"\n")
        self._events.put((stream, None))

    def _await_exit(self) -> None:
        _until_ended(self.pid)
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
    long as they were seen once or stayed in the session."""

    def __init__(self, pid: int) -> None:
        import psutil

        self._leader = pid
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
        if process.ppid() in self._known:
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


def _until_ended(pid: int) -> None:
    """Wait for the end without waitpid: on Linux that would take the stops which the tracer of this process,
    a thread of the same program, waits for."""
    if sys.platform == "linux" and hasattr(os, "pidfd_open"):
        with suppress(OSError), open(os.pidfd_open(pid), "rb") as descriptor:  # noqa: PTH123
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll()


def _prefer_for_out_of_memory_kill(pid: int) -> None:
    """Let the kernel end this process before the one that watches it, should memory run out (Linux)."""
    with suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
