"""What the engine asks of a device that computes routed experts, whatever its programming interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pytest_colibri.engine.weights import Expert, ExpertKey, ExpertLayout, Floats
from pytest_colibri.host.model import DeviceIdentity


@dataclass(frozen=True)
class ExpertRows:
    """The rows of a batch that go to one expert, and the router's weight of each."""

    key: ExpertKey
    rows: NDArray[np.int64]
    weights: Floats

    def add_to(self, result: Floats, output: Floats) -> None:
        """Add the expert's weighted ``output`` [len(rows), hidden] to the rows of ``result``, in place."""
        result[self.rows] += self.weights[:, None] * output


@dataclass(frozen=True)
class Residency:
    """What lies on the device: the experts in rank order, and the bytes they take there."""

    experts: tuple[ExpertKey, ...]
    bytes: int


@dataclass(frozen=True)
class DeviceCounts:
    """Executed dispatches by shader file, and submissions to the queue."""

    dispatches: Mapping[str, int]
    submits: int


class ExpertDevice(Protocol):
    """A device that holds experts and computes them; closed with ``close``."""

    @property
    def identity(self) -> DeviceIdentity:
        """Which device was opened."""

    def fill(
        self,
        ranked: Sequence[tuple[ExpertKey, ExpertLayout]],
        budget_bytes: int,
        read: Callable[[ExpertKey], Expert],
    ) -> Residency:
        """Upload experts in rank order, up to the first that would exceed the budget."""

    def run_experts(self, batch: Sequence[ExpertRows], rows: Floats) -> list[Floats]:
        """Compute resident experts for their rows of ``rows`` [n, hidden]; outputs are not weighted yet."""

    def take_counts(self) -> DeviceCounts:
        """Return what was executed since the last call, and start anew."""

    def close(self) -> None:
        """Give everything back to the driver."""
