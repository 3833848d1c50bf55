"""Starts a program for the witnesses and stands over it until the last of its processes has ended.

Run as a script, ``launcher.py REPORT``, with the number of an inherited descriptor. It forks. The child
writes its process identifier and a newline to REPORT, waits for its order, and becomes the program; why it
could not, it writes to REPORT. The order is one line of JSON on standard input of the launcher,
``{"argv": [...], "env": {...}}``.

On Linux the launcher adopts whatever the program leaves behind, daemons too, and kills it when the program
has ended. When its standard input is closed, on purpose or because the one who started it has died, it kills
everything. It ends as the program ended, with the same exit status or by the same signal.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

STANDARD_INPUT = 0
LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PATIENCE_S = 1.0


def main() -> None:
    """Start the program, wait for it, and end what it left behind."""
    report = int(sys.argv[1])
    order_reader, order_writer = os.pipe()
    control_process(PR_SET_CHILD_SUBREAPER, 1)
    program = os.fork()
    if program == 0:
        become_program(report, order_reader)
    for request in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(
            request, signal.SIG_IGN
        )  # they are for the program, which ends the launcher when it ends
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (report, sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(nowhere, descriptor)  # their readers wait for an end that only the program may withhold
    threading.Thread(target=heed_starter, args=(order_writer, program), daemon=True).start()
    status = await_program(program)
    kill_orphans()
    end_like(status)


def control_process(option: int, value: int) -> None:
    """Call prctl, which only Linux has."""
    if LINUX:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def become_program(report: int, order_reader: int) -> None:
    """Wait for the order, put back what Python changed for itself, and execute the program."""
    os.setsid()
    control_process(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.set_inheritable(report, False)
    os.write(report, b"%d\n" % os.getpid())
    with os.fdopen(order_reader, "rb") as lines:
        order = json.loads(lines.readline())
    for changed in ("SIGPIPE", "SIGXFSZ"):
        if hasattr(signal, changed):
            signal.signal(getattr(signal, changed), signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), STANDARD_INPUT)
    try:
        os.execve(order["argv"][0], order["argv"], order["env"])  # noqa: S606
    except OSError as error:
        os.write(report, str(error.strerror).encode())
        os._exit(127)


def heed_starter(order_writer: int, program: int) -> None:
    """Hand on what comes on standard input; once that is closed, kill the program."""
    with suppress(BrokenPipeError), os.fdopen(order_writer, "wb", buffering=0) as order:
        while part := os.read(STANDARD_INPUT, 65536):
            order.write(part)
    while os.read(STANDARD_INPUT, 65536):
        pass
    os.kill(program, signal.SIGKILL)


def await_program(program: int) -> int:
    """Reap adopted processes until the program itself has ended; return its wait status."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == program:
            return status


def kill_orphans() -> None:
    """Kill every process that is left; those of a killed one become ours in turn."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for child in children():
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def children() -> Iterator[int]:
    """Give the processes whose parent is this one, as Linux lists them."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            after_name = status.read_text(errors="replace").rpartition(")")[2]
            if int(after_name.split()[1]) == os.getpid():
                yield int(status.parent.name)


def end_like(status: int) -> None:
    """End with this wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has left its core, if any
        with suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


if __name__ == "__main__":
    main()
