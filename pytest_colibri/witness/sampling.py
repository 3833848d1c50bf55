"""Witnesses by the counters of kernel and drivers: sampled over a run, without any code in the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, Self

from pytest_colibri.errors import Unavailable
from pytest_colibri.host.model import DeviceIdentity
from pytest_colibri.witness.counters import PhaseMarkers
from pytest_colibri.witness.evidence import (
    CounterEvidence,
    CounterSample,
    DeviceTime,
    DeviceUse,
    EngineTime,
    EngineUse,
    ProcessAccount,
    Reach,
    Window,
)
from pytest_colibri.witness.process import ProcessTree

MAX_SAMPLES = 4096


class CounterSession(Protocol):
    """Reads the counters for one run; what a client of a device once had is kept when it ends."""

    def read(self, pids: Iterable[int], at_us: int) -> tuple[DeviceUse, ...]:
        """Return what these processes, and those of earlier looks, have had of each device so far.

        Raises Unavailable when the look shows nothing that can be used.
        """
        ...

    def notes(self) -> tuple[str, ...]:
        """Return what could not be read, or is not what it seems."""
        ...

    def accounts(self) -> tuple[ProcessAccount, ...]:
        """Return what the driver's own accounts say of these processes; empty where it keeps none."""
        ...


class CounterWitness(Protocol):
    """A source of counters. The check of its reach and each run open it anew."""

    @property
    def name(self) -> str:
        """What it is called in reports."""
        ...

    @property
    def interval_s(self) -> float:
        """Time between two looks, so that these cost a small part of one core."""
        ...

    @property
    def lag_us(self) -> int:
        """How long ago the work may have been done that a look tells of."""
        ...

    @property
    def unseen_percent(self) -> int:
        """The share of the time below which work may read as none."""
        ...

    def reach(self) -> Reach:
        """Tell what can be seen on this machine, or why nothing can."""
        ...

    def session(self) -> AbstractContextManager[CounterSession]:
        """Open the source for one run. Raises Unavailable with the reason."""
        ...


class CounterSampler:
    """Samples the counters for ``tree`` from a thread of its own while the context is open."""

    def __init__(self, tree: ProcessTree, witness: CounterWitness) -> None:
        self._tree = tree
        self._witness = witness
        self._samples: list[CounterSample] = []
        self._notes: dict[str, None] = {}
        self._accounts: tuple[ProcessAccount, ...] = ()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, name=f"colibri-{witness.name}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def evidence(self) -> CounterEvidence:
        """Return what was seen, once the context is left."""
        return CounterEvidence(
            witness=self._witness.name,
            samples=tuple(self._samples),
            lag_us=self._witness.lag_us,
            unseen_percent=self._witness.unseen_percent,
            notes=tuple(self._notes),
            accounts=self._accounts,
        )

    def _sample(self) -> None:
        try:
            with self._witness.session() as session:
                while True:
                    self._look(session)
                    if self._done.wait(self._witness.interval_s):
                        break
                self._look(session)
                self._accounts = session.accounts()
                self._notes.update(dict.fromkeys(session.notes()))
        except Unavailable as error:
            self._notes[str(error)] = None

    def _look(self, session: CounterSession) -> None:
        at_us = monotonic_us()
        try:
            devices = session.read([process.pid for process in self._tree.processes()], at_us)
        except Unavailable as error:
            self._notes[str(error)] = None
            return
        self._samples.append(CounterSample(at_us, devices))
        if len(self._samples) >= MAX_SAMPLES:
            # Counters add up, so that a sample that is left out takes no work with it.
            self._samples = [*self._samples[:-1:2], self._samples[-1]]


class PhaseTimes:
    """Notes when the phase lines of an engine were read."""

    def __init__(self, markers: PhaseMarkers) -> None:
        self._markers = markers
        self._began: dict[str, int] = {}
        self._windows: list[Window] = []

    def note(self, line: str) -> None:
        """Take a line of standard output at the moment at which it is read."""
        marker = self._markers.read(line) if line.startswith(self._markers.prefixes) else None
        if marker is None:
            return
        phase, state = marker
        if state == "begin":
            self._began[phase] = monotonic_us()
        elif phase in self._began:
            self._windows.append(Window(phase, self._began.pop(phase), monotonic_us()))

    def windows(self) -> tuple[Window, ...]:
        """Return the phases that began and ended, in the order of their ends."""
        return tuple(self._windows)


def monotonic_us() -> int:
    """Return the time of the clock of all samples and windows."""
    return time.monotonic_ns() // 1000


def time_within(evidence: CounterEvidence, window: Window) -> tuple[DeviceTime, ...]:
    """Return how long each device that was ever seen worked for the run within the window."""
    inside = [
        sample
        for sample in evidence.samples
        if window.began_us + evidence.lag_us <= sample.at_us <= window.ended_us
    ]
    before = [sample for sample in evidence.samples if sample.at_us <= window.began_us]
    after = [sample for sample in evidence.samples if sample.at_us >= window.ended_us + evidence.lag_us]
    around = [before[-1], after[0]] if before and after else []
    devices = {use.device: use.driver for sample in evidence.samples for use in sample.devices}
    return tuple(
        DeviceTime(
            device,
            driver,
            tuple(_engine_times(device, inside, around, evidence)),
            _peak_resident(device, [s for s in evidence.samples if _is_within(s, window)]),
        )
        for device, driver in devices.items()
    )


def _is_within(sample: CounterSample, window: Window) -> bool:
    return window.began_us <= sample.at_us <= window.ended_us


def _engine_times(
    device: DeviceIdentity,
    inside: Sequence[CounterSample],
    around: Sequence[CounterSample],
    evidence: CounterEvidence,
) -> Iterable[EngineTime]:
    uses = [use for sample in evidence.samples for use in sample.devices if use.device == device]
    engines = {engine.engine: engine.compute for use in uses for engine in use.engines}
    for engine, compute in engines.items():
        yield EngineTime(
            engine,
            compute,
            _growth(device, engine, inside),
            _most_growth(device, engine, around, evidence.unseen_percent),
        )


def _growth(device: DeviceIdentity, engine: str, samples: Sequence[CounterSample]) -> int | None:
    """Return by how much the counter grew from the first sample that tells it to the last one, which must."""
    read = [_busy_ns(_use(sample, device), engine) for sample in samples]
    told = [busy for busy in read if busy is not None]
    return told[-1] - told[0] if len(told) > 1 and read[-1] is not None else None


def _most_growth(
    device: DeviceIdentity, engine: str, around: Sequence[CounterSample], unseen_percent: int
) -> int | None:
    if not around:
        return None
    first, last = (_use(sample, device) for sample in around)
    growth = _growth(device, engine, around)
    if growth is None or _ended(first) != _ended(last) or not _is_bounded(last, engine):
        return None
    return growth + (around[1].at_us - around[0].at_us) * 1000 * unseen_percent // 100


def _use(sample: CounterSample, device: DeviceIdentity) -> DeviceUse | None:
    return next((use for use in sample.devices if use.device == device), None)


def _busy_ns(use: DeviceUse | None, engine: str) -> int | None:
    if use is None:
        return 0  # a device that the run had not opened did nothing for it
    found = _engine(use, engine)
    return found.busy_ns if found else None


def _engine(use: DeviceUse, engine: str) -> EngineUse | None:
    return next((one for one in use.engines if one.engine == engine), None)


def _ended(use: DeviceUse | None) -> int:
    return use.ended_clients if use else 0


def _is_bounded(use: DeviceUse | None, engine: str) -> bool:
    found = _engine(use, engine) if use else None
    return found.bounded if found else use is None


def _peak_resident(device: DeviceIdentity, samples: Sequence[CounterSample]) -> int | None:
    uses = [use for sample in samples if (use := _use(sample, device)) is not None]
    return max((use.resident_bytes for use in uses if use.resident_bytes is not None), default=None)
