"""The dispatch witness: an agent in the process counts what reaches its Vulkan devices.

The agent (``agent.js``, ``counters.c``) leaves its counters in a shared file, so that they survive whatever
ends the process. Frida carries it into the process; it is optional (extra ``trace``).
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_colibri.subjects.protocol import Launch
from pytest_colibri.witness.counters import PROTOCOL_MARKERS, SIZE_BYTES, PhaseMarkers, read_evidence
from pytest_colibri.witness.evidence import DispatchEvidence, Reach
from pytest_colibri.witness.process import OwnedProcess

if TYPE_CHECKING:
    import frida

WITNESS = "dispatch tracer"
ATTACH_TIMEOUT_S = 10.0

_HERE = Path(__file__).parent
_INSTALL = "frida is not installed: pip install 'pytest-colibri[trace]'"
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


class DispatchTracer:
    """Counts Vulkan dispatches, submits and allocations of a process and of its children."""

    def __init__(self, markers: PhaseMarkers = PROTOCOL_MARKERS) -> None:
        self._markers = markers

    def reach(self) -> Reach:
        """Tell whether a process can be traced here; the first call tries it on a trivial one."""
        obstacle = _obstacle()
        if obstacle is not None:
            return Reach(WITNESS, False, obstacle)
        import frida

        seen = "counts Vulkan dispatches, submits and allocations of the engine, per device, shader and phase"
        return Reach(WITNESS, True, f"{seen} (frida {frida.__version__})")

    @contextmanager
    def follow(self, pid: int) -> Iterator[Trace]:
        """Follow the gated process ``pid`` into the program that it becomes, and its children.

        Never raises for what the tracer cannot do: the trace then says so.
        """
        with tempfile.TemporaryDirectory(prefix="colibri-trace-") as folder:
            trace = Trace(pid, Path(folder), self._markers)
            trace.start()
            try:
                yield trace
            finally:
                trace.finish()


class Trace:
    """One run under the tracer. Everything of frida happens in one thread of its own, so that no call of it
    can hold up the run."""

    def __init__(self, pid: int, folder: Path, markers: PhaseMarkers) -> None:
        self.failure: str | None = None
        self._pid = pid
        self._followed = {pid}
        self._folder = folder
        self._markers = markers
        self._images: list[Path] = []
        self._losses: list[str] = []
        self._output: list[int] | None = None
        self._evidence: DispatchEvidence | None = None
        self._sessions: list[frida.Session] = []
        self._children: queue.SimpleQueue[frida.Child | None] = queue.SimpleQueue()
        self._attached = threading.Event()
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="colibri-trace", daemon=True)

    def evidence(self) -> DispatchEvidence | None:
        """Return what was counted, once the trace has ended; None where it failed."""
        return self._evidence

    def start(self) -> None:
        """Attach to the gate, within ATTACH_TIMEOUT_S."""
        self._thread.start()
        if not self._attached.wait(ATTACH_TIMEOUT_S):
            self._fail(f"the tracer did not attach within {ATTACH_TIMEOUT_S:.0f} s")

    def has_settled(self, timeout_s: float) -> bool:
        """Wait until the agent is in the program, or has failed to get there."""
        return self._settled.wait(timeout_s)

    def finish(self) -> None:
        """Stop following and read the counters."""
        self._children.put(None)
        self._thread.join(ATTACH_TIMEOUT_S)
        if self._thread.is_alive():
            self._losses.append(f"the tracer was still busy {ATTACH_TIMEOUT_S:.0f} s after the run")
        if not self._images:
            self._fail("the tracer was not told when the process became the program")
        if self.failure is None:
            self._evidence = read_evidence(self._images, self._markers, WITNESS, self._losses)

    def _follow(self) -> None:
        try:
            import frida

            device = frida.get_local_device()
            device.on("child-added", self._on_child)
        except Exception as error:  # whatever frida raises must not take the run with it
            self._fail(f"the tracer did not start: {error}")
            self._attached.set()
            return
        try:
            self._attach_to_gate(device)
            while (child := self._children.get()) is not None:
                self._enter(device, child)
        finally:
            device.off("child-added", self._on_child)
            for session in self._sessions:
                with suppress(Exception):
                    session.detach()

    def _on_child(self, child: Any) -> None:
        self._children.put(child)

    def _attach_to_gate(self, device: frida.Device) -> None:
        try:
            self._attach(device, self._pid)
        except Exception as error:
            self._fail(f"the tracer cannot attach to the process: {error}")
        self._attached.set()

    def _attach(self, device: frida.Device, pid: int) -> frida.Session:
        session = device.attach(pid)
        self._sessions.append(session)
        session.enable_child_gating()
        return session

    def _enter(self, device: frida.Device, child: frida.Child) -> None:
        """Put the agent into a process image that waits for us, and let it go on in any case."""
        if child.parent_pid not in self._followed:
            return
        self._followed.add(child.pid)
        try:
            session = self._attach(device, child.pid)
        except Exception as error:
            self._miss(child, error)
            self._resume(device, child)
        else:
            self._observe(device, child, session)
        self._settled.set()

    def _observe(self, device: frida.Device, child: frida.Child, session: frida.Session) -> None:
        try:
            self._load_agent(session)
        except Exception as error:
            self._miss(child, error)
            with suppress(Exception):
                session.detach()  # lets it go on: with a tracer but without our agent it can hang
        else:
            self._resume(device, child)

    def _resume(self, device: frida.Device, child: frida.Child) -> None:
        try:
            device.resume(child.pid)
        except Exception as error:
            self._miss(child, error)
            self._kill(child.pid)  # it would wait for ever

    def _kill(self, pid: int) -> None:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)  # its parent is told only after its tracer, which is a thread of ours

    def _load_agent(self, session: frida.Session) -> None:
        script = session.create_script(_source("agent.js"))
        script.load()
        image = self._folder / f"{len(self._images)}.counters"
        with image.open("wb") as file:
            file.truncate(SIZE_BYTES)
        agent: Any = script.exports_sync
        prefixes = list(self._markers.prefixes)
        self._output = agent.observe(_source("counters.c"), str(image), SIZE_BYTES, prefixes, self._output)
        self._images.append(image)

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason

    def _miss(self, child: frida.Child, error: Exception) -> None:
        if child.pid == self._pid:
            self._fail(f"the tracer cannot enter the process: {error}")
        else:
            self._losses.append(f"a child process ({child.path or child.origin}) was not followed: {error}")


@cache
def _source(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


@cache
def _obstacle() -> str | None:
    """Say what keeps the tracer from working here, None when a trial has shown that it does."""
    if sys.platform == "win32":
        return "the dispatch tracer works on Linux and macOS only: Windows starts no program within a process"
    if sys.maxsize < 2**32:
        return "the dispatch tracer needs a 64-bit process"
    try:
        import frida  # noqa: F401
    except ImportError:
        return _INSTALL
    trial = Launch((sys.executable, "-I", "-S", "-c", ""), {}, Path.cwd(), timeout_s=30.0)
    with OwnedProcess(trial) as process, DispatchTracer().follow(process.pid) as trace:
        process.open_gate()
        process.run()
    return None if trace.failure is None else f"{trace.failure}. {_advice()}"


def _advice() -> str:
    if sys.platform == "darwin":
        return "macOS lets only root or a signed debugger attach to other programs"
    with suppress(OSError):
        scope = int(_PTRACE_SCOPE.read_text())
        if scope > 1:
            return f"kernel.yama.ptrace_scope is {scope}: allow it with sysctl kernel.yama.ptrace_scope=1"
    return "In a container, allow it with --cap-add=SYS_PTRACE; elsewhere run as the user who owns the engine"
