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
    ``unwitnessed`` says why a witness that was asked for gave nothing for this run."""

    output: Output
    dispatch: DispatchEvidence | None
    memory: MemoryEvidence
    unwitnessed: str | None = None
