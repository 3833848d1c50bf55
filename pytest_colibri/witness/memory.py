"""The memory witness: samples the process tree and the room that is left, and guards the floor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

from pytest_colibri.host.memory import AvailableMemory
from pytest_colibri.witness.evidence import MemoryEvidence, MemorySample
from pytest_colibri.witness.process import ProcessTree

MAX_SAMPLES = 4096

_SHARE_OF_TIME_FOR_PSS = 0.005


@dataclass(frozen=True)
class MemoryGuard:
    """When to stop an engine: as soon as less than ``floor_bytes`` can still be taken (0: never).

    ``interval_s`` is the time between two looks. At the default, an engine that touches 3 GB/s takes 75 MB
    between them. ``proportional_interval_s`` is the shortest time between two readings of the PSS.
    """

    floor_bytes: int = 0
    interval_s: float = 0.025
    proportional_interval_s: float = 0.5


class MemorySampler:
    """Watches ``tree`` from its own thread while the context is open.

    ``stop_engine`` is called once, from that thread, when the floor is passed.
    """

    def __init__(self, tree: ProcessTree, guard: MemoryGuard, stop_engine: Callable[[], None]) -> None:
        self._guard = guard
        self._stop_engine = stop_engine
        self._tree = tree
        self._began = time.monotonic()
        self._samples: list[MemorySample] = []
        self._proportional: int | None = None
        self._stopped_at_floor = False
        self._done = threading.Event()
        # Reading the PSS of a large process takes long: it must not delay the look at the floor.
        self._threads = [
            threading.Thread(target=self._sample, name="colibri-memory", daemon=True),
            threading.Thread(target=self._read_proportional, name="colibri-pss", daemon=True),
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    def evidence(self) -> MemoryEvidence:
        """Return what was seen so far."""
        return MemoryEvidence(
            witness="memory sampler",
            samples=tuple(self._samples),
            floor_bytes=self._guard.floor_bytes,
            stopped_at_floor=self._stopped_at_floor,
        )

    def _sample(self) -> None:
        with AvailableMemory() as memory:
            while True:
                available = memory.read()
                self._keep(available)
                if self._below_floor(available) and not self._stopped_at_floor:
                    self._stopped_at_floor = True
                    self._stop_engine()
                if self._done.wait(self._guard.interval_s):
                    return

    def _below_floor(self, available: int | None) -> bool:
        return available is not None and available < self._guard.floor_bytes

    def _keep(self, available: int | None) -> None:
        tree_bytes = self._tree.resident_bytes()
        if tree_bytes is None:
            return
        proportional, self._proportional = self._proportional, None
        at_us = int((time.monotonic() - self._began) * 1e6)
        self._samples.append(MemorySample(at_us, available, tree_bytes, proportional))
        if len(self._samples) >= MAX_SAMPLES:
            self._samples = thin_out(self._samples)

    def _read_proportional(self) -> None:
        pause_s = self._guard.interval_s
        while not self._done.wait(pause_s):
            began = time.monotonic()
            self._proportional = self._tree.proportional_bytes()
            took_s = time.monotonic() - began
            pause_s = max(self._guard.proportional_interval_s, took_s / _SHARE_OF_TIME_FOR_PSS)


def thin_out(samples: Iterable[MemorySample]) -> list[MemorySample]:
    """Drop every other sample; keep the ends, the highest of both sizes and the lowest availability."""
    every = list(samples)
    with_pss = [s for s in every if s.proportional_bytes is not None]
    with_available = [s for s in every if s.available_bytes is not None]
    extremes = [every[-1], max(every, key=lambda s: s.tree_bytes)]
    if with_pss:
        extremes.append(max(with_pss, key=lambda s: s.proportional_bytes or 0))
    if with_available:
        extremes.append(min(with_available, key=lambda s: s.available_bytes or 0))
    kept = {id(sample) for sample in (*every[::2], *extremes)}
    return [sample for sample in every if id(sample) in kept]
