"""Runs a subject under its witnesses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack

from pytest_colibri.subjects.protocol import Launch
from pytest_colibri.witness.counters import PROTOCOL_MARKERS
from pytest_colibri.witness.dispatch import DispatchTracer, Trace
from pytest_colibri.witness.evidence import WatchedRun
from pytest_colibri.witness.memory import MemoryGuard, MemorySampler
from pytest_colibri.witness.process import OwnedProcess
from pytest_colibri.witness.sampling import CounterSampler, CounterWitness, PhaseTimes


def watch(
    launch: Launch,
    *,
    tracer: DispatchTracer | None,
    guard: MemoryGuard,
    on_line: Callable[[str], None] | None = None,
    counters: Iterable[CounterWitness] = (),
) -> WatchedRun:
    """Run ``launch`` to its end and return what was seen of it.

    The whole process tree is ended at the timeout, at the floor of ``guard``, and when this call is left by
    an exception, KeyboardInterrupt included. ``on_line`` gets each line of standard output as it comes.
    Without ``tracer``, or when it cannot attach, ``dispatch`` is None; ``unwitnessed`` says why. Each of
    ``counters`` is sampled through the whole run.
    Raises UsageError when the program or its folder does not exist.
    """
    phases = PhaseTimes(PROTOCOL_MARKERS)

    def note_line(line: str) -> None:
        phases.note(line)
        if on_line is not None:
            on_line(line)

    with ExitStack() as stack:
        process, trace = _start(launch, tracer, stack)
        sampler = stack.enter_context(MemorySampler(process.tree, guard, process.stop_at_floor))
        samplers = [stack.enter_context(CounterSampler(process.tree, witness)) for witness in counters]
        output = process.run(note_line)
    return WatchedRun(
        output=output,
        dispatch=trace.evidence() if trace else None,
        memory=sampler.evidence(),
        unwitnessed=trace.failure if trace else None,
        counters=tuple(sampler.evidence() for sampler in samplers),
        windows=phases.windows(),
    )


def _start(
    launch: Launch, tracer: DispatchTracer | None, stack: ExitStack
) -> tuple[OwnedProcess, Trace | None]:
    """Start the process under the tracer; anew without it when attaching failed and may have harmed it."""
    if tracer is None:
        return _started(launch, stack), None
    with ExitStack() as attempt:
        process = attempt.enter_context(OwnedProcess(launch))
        trace = attempt.enter_context(tracer.follow(process.pid))
        if trace.failure is None:
            process.open_gate()
            while not (trace.has_settled(0.02) or process.has_ended):
                pass
        if trace.failure is None:
            stack.push(attempt.pop_all())
            return process, trace
    return _started(launch, stack), trace


def _started(launch: Launch, stack: ExitStack) -> OwnedProcess:
    process = stack.enter_context(OwnedProcess(launch))
    process.open_gate()
    return process
