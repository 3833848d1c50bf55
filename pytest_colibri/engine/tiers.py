"""Where a batch's experts are served from: the device, the RAM slot cache, or the disk.

The cache is replayed exactly as the residency study replays ``lru``, so that study and engine agree on every
hit: a batch is served in blocks of the union of its experts; the misses of a block are offered after it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pytest_colibri.engine.weights import Expert, ExpertKey, ExpertLayout, WeightReader

Tier = Literal["vram", "ram", "disk"]
TIERS: tuple[Tier, ...] = ("vram", "ram", "disk")
BLOCK = 64


@dataclass
class TierCount:
    """Experts that a tier served, and their bytes in the container."""

    hits: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Served:
    """An expert and the tier that served it; ``weights`` is None where they lie on the device."""

    key: ExpertKey
    tier: Tier
    weights: Expert | None


@dataclass
class SlotCache:
    """The slots of one layer: least recently used first; an expert is only moved by a hit or an admission."""

    capacity: int
    _slots: OrderedDict[ExpertKey, Expert] = field(default_factory=OrderedDict)

    def look_up(self, key: ExpertKey) -> Expert | None:
        """Return the expert and make it the youngest, or None."""
        expert = self._slots.get(key)
        if expert is not None:
            self._slots.move_to_end(key)
        return expert

    def admit(self, misses: Sequence[tuple[ExpertKey, Expert]]) -> None:
        """Take the last ``capacity`` misses of a block, in reverse order, and evict from the old end."""
        for key, expert in list(reversed(misses))[: self.capacity]:
            if len(self._slots) == self.capacity:
                self._slots.popitem(last=False)
            self._slots[key] = expert


class ExpertTiers:
    """Serves the experts of a model, and counts each on the tier that served it."""

    def __init__(
        self, reader: WeightReader, layouts: Mapping[ExpertKey, ExpertLayout], slots_per_layer: int
    ) -> None:
        self._reader = reader
        self._layouts = layouts
        self._caches = {layer: SlotCache(slots_per_layer) for layer in sorted({key.layer for key in layouts})}
        self._resident: frozenset[ExpertKey] = frozenset()
        self._counts = {tier: TierCount() for tier in TIERS}

    def read(self, key: ExpertKey) -> Expert:
        """Read an expert from the disk, past the cache and the counters."""
        return self._reader.expert(self._layouts[key])

    def keep_on_device(self, keys: Sequence[ExpertKey]) -> None:
        """From now on the device serves these experts; they never enter the cache."""
        self._resident = frozenset(keys)

    def serve(self, layer: int, union: Sequence[int]) -> Iterator[Served]:
        """Serve the experts of one batch of a layer, in first-seen order.

        What is yielded is to be used before the next one is asked for: a miss that will not be admitted is
        held no longer, which bounds the memory of a wide batch.
        """
        cache = self._caches[layer]
        for begin in range(0, len(union), BLOCK):
            misses: deque[tuple[ExpertKey, Expert]] = deque(maxlen=cache.capacity)
            for expert in union[begin : begin + BLOCK]:
                served = self._serve_one(ExpertKey(layer, expert), cache)
                if served.tier == "disk" and served.weights is not None:
                    misses.append((served.key, served.weights))
                yield served
            cache.admit(misses)

    def _serve_one(self, key: ExpertKey, cache: SlotCache) -> Served:
        if key in self._resident:
            served = Served(key, "vram", None)
        elif (cached := cache.look_up(key)) is not None:
            served = Served(key, "ram", cached)
        else:
            served = Served(key, "disk", self.read(key))
        count = self._counts[served.tier]
        count.hits += 1
        count.bytes += self._layouts[key].nbytes
        return served

    def take_counts(self) -> dict[Tier, TierCount]:
        """Return what each tier served since the last call, and start anew."""
        taken, self._counts = self._counts, {tier: TierCount() for tier in TIERS}
        return taken
