"""What witnesses saw, as frozen values. A witness without reach gives no evidence, and says why not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pytest_colibri.host.model import DeviceIdentity
from pytest_colibri.profiles.model import DeviceType


@dataclass(frozen=True)
class Reach:
    """What a witness can see on this host. ``able`` is False when it can see nothing; ``statement`` says
    what it sees, or why it cannot and how to change that."""

    witness: str
    able: bool
    statement: str


@dataclass(frozen=True)
class ShaderCount:
    """Dispatches of one shader in one phase. ``executed`` counts those that were submitted to a queue with at
    least one workgroup; ``recorded`` counts the calls that recorded them."""

    sha256: str
    recorded: int
    executed: int


@dataclass(frozen=True)
class PhaseCounts:
    """What one device was given in one phase (``load``, ``fill``, ``prefill``, ``decode``, ``score``, or
    ``outside`` for everything not within a phase that the engine announced)."""

    phase: str
    shaders: tuple[ShaderCount, ...]
    submits: int

    @property
    def executed(self) -> int:
        """Executed dispatches of all shaders."""
        return sum(shader.executed for shader in self.shaders)


@dataclass(frozen=True)
class DeviceDispatch:
    """All that one device was given. Memory figures are bytes by memory type index, freed ones included in
    ``allocated_bytes`` and left out at their time in ``peak_bytes``.
    ``type`` is the kind of device that its driver claims to be."""

    device: DeviceIdentity
    phases: tuple[PhaseCounts, ...]
    allocated_bytes: Mapping[int, int]
    peak_bytes: Mapping[int, int]
    type: DeviceType | None = None


@dataclass(frozen=True)
class DispatchEvidence:
    """What the dispatch witness counted over a whole run, on every device that the process opened.

    ``phases_seen`` are the (phase, state) lines in the order in which the process wrote them. ``complete`` is
    False when counts were lost; ``notes`` say how.
    """

    witness: str
    devices: tuple[DeviceDispatch, ...]
    notes: tuple[str, ...] = ()
    phases_seen: tuple[tuple[str, str], ...] = ()
    complete: bool = True


@dataclass(frozen=True)
class MemorySample:
    """One look at the memory: microseconds since the start of the run, and bytes. ``tree_bytes`` is the
    resident set of the process tree, ``proportional_bytes`` its PSS where that was read for this sample."""

    at_us: int
    available_bytes: int | None
    tree_bytes: int
    proportional_bytes: int | None = None


@dataclass(frozen=True)
class MemoryEvidence:
    """What the memory sampler saw. ``floor_bytes`` is the availability at which it stops the engine."""

    witness: str
    samples: tuple[MemorySample, ...]
    floor_bytes: int
    stopped_at_floor: bool

    @property
    def peak_tree_bytes(self) -> int:
        """Highest resident set of the process tree."""
        return max((sample.tree_bytes for sample in self.samples), default=0)

    @property
    def peak_proportional_bytes(self) -> int | None:
        """Highest proportional set size of the process tree, None when it was never read."""
        read = [s.proportional_bytes for s in self.samples if s.proportional_bytes is not None]
        return max(read, default=None)

    @property
    def least_available_bytes(self) -> int | None:
        """Lowest availability seen, None when it was never read."""
        read = [s.available_bytes for s in self.samples if s.available_bytes is not None]
        return min(read, default=None)


@dataclass(frozen=True)
class EngineUse:
    """How long one class of engines of a device has worked for a run so far, as its driver counts.

    ``busy_ns`` adds up over the engines of the class and is None while nothing measures it. ``compute`` tells
    whether the driver gives compute work to this class. ``bounded`` is False where such work can pass by the
    counter, so that no growth of it means nothing.
    """

    engine: str
    compute: bool
    busy_ns: int | None
    bounded: bool = True


@dataclass(frozen=True)
class DeviceUse:
    """What the processes of a run have had of one device up to one moment. ``resident_bytes`` is what they
    hold there now, None where it is not told; it is never evidence of work. ``ended_clients`` counts the
    users of the device that have gone: what they did between the last look and their end is not counted."""

    device: DeviceIdentity
    driver: str
    engines: tuple[EngineUse, ...]
    resident_bytes: int | None
    ended_clients: int = 0


@dataclass(frozen=True)
class CounterSample:
    """One look at the counters of a driver, at microseconds of the monotonic clock of the machine."""

    at_us: int
    devices: tuple[DeviceUse, ...]


@dataclass(frozen=True)
class ProcessAccount:
    """What a driver's accounts say of one process over its whole life: the share of it in which a kernel was
    executing, None where the driver does not tell it, how long it had the device open (0 while it still has),
    and the most memory that it held there."""

    device: DeviceIdentity
    pid: int
    busy_percent: int | None
    open_ms: int
    peak_bytes: int


@dataclass(frozen=True)
class CounterEvidence:
    """What a witness read from the counters of kernel and drivers over a whole run.

    A sample tells of work that was done up to ``lag_us`` before it. A share of the time below
    ``unseen_percent`` may read as none. ``notes`` say what could not be read.
    """

    witness: str
    samples: tuple[CounterSample, ...]
    lag_us: int = 0
    unseen_percent: int = 0
    notes: tuple[str, ...] = ()
    accounts: tuple[ProcessAccount, ...] = ()


@dataclass(frozen=True)
class Window:
    """A phase of a run, from and to microseconds of the monotonic clock, as its lines were read."""

    phase: str
    began_us: int
    ended_us: int


@dataclass(frozen=True)
class EngineTime:
    """How long one class of engines worked within a window: ``at_least_ns`` between looks that lie within it,
    ``at_most_ns`` between looks around it. Either is None where nothing measured it."""

    engine: str
    compute: bool
    at_least_ns: int | None
    at_most_ns: int | None


@dataclass(frozen=True)
class DeviceTime:
    """How long a device worked within a window, and the most that was held there at any look within it."""

    device: DeviceIdentity
    driver: str
    engines: tuple[EngineTime, ...]
    peak_resident_bytes: int | None

    @property
    def computed_at_least_ns(self) -> int | None:
        """Time that is sure to have gone into compute work, None when nothing measured any."""
        known = [e.at_least_ns for e in self.engines if e.compute and e.at_least_ns is not None]
        return sum(known) if known else None

    @property
    def computed_at_most_ns(self) -> int | None:
        """Time that can have gone into compute work, None unless all of it was measured."""
        limits = [engine.at_most_ns for engine in self.engines if engine.compute]
        known = [limit for limit in limits if limit is not None]
        return sum(known) if known and len(known) == len(limits) else None


@dataclass(frozen=True)
class Output:
    """What the process left behind. ``status`` is its exit status, negative for a signal. ``ended`` says who
    ended it; lines are without their newline. A stream is kept up to the first line that goes beyond its
    bounds (``truncated``). ``survivors`` names processes of the run that could not be ended."""

    status: int
    ended: Literal["itself", "timeout", "floor"]
    stdout: tuple[str, ...]
    stderr: tuple[str, ...]
    wall_us: int
    truncated: bool = False
    survivors: tuple[str, ...] = ()


@dataclass(frozen=True)
class WatchedRun:
    """One engine run with everything that was seen of it; ``dispatch`` is None without a witness in reach.
    ``unwitnessed`` says why a witness that was asked for gave nothing for this run. ``counters`` holds what
    each witness by driver counters saw, ``windows`` the phases that the engine announced."""

    output: Output
    dispatch: DispatchEvidence | None
    memory: MemoryEvidence
    unwitnessed: str | None = None
    counters: tuple[CounterEvidence, ...] = ()
    windows: tuple[Window, ...] = ()
