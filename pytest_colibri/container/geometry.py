"""Where the bytes of a model lie: dense weights, and the experts of each sparse layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SparseLayer:
    """The routed experts of one layer: ``expert_bytes`` maps each expert id to its bytes."""

    index: int
    expert_bytes: Mapping[int, int]

    @property
    def width(self) -> int:
        """Bytes of the widest expert: what a slot of this layer must hold."""
        return max(self.expert_bytes.values())

    @property
    def bytes(self) -> int:
        """Bytes of all its experts."""
        return sum(self.expert_bytes.values())


@dataclass(frozen=True)
class Geometry:
    """A model container as its headers and ``config.json`` describe it; no weight has been read.

    ``family`` is the ``model_type`` of ``config.json``, ``config`` its part that describes the text model.
    ``layers`` are the sparse layers in ascending order; ``index_layers`` counts those with tensors of a
    sparse-attention indexer. ``total_bytes`` = ``dense_bytes`` + ``expert_bytes``, payloads only.
    """

    path: Path
    family: str
    config: Mapping[str, object]
    shards: int
    dense_bytes: int
    layers: tuple[SparseLayer, ...]
    index_layers: int

    @property
    def expert_bytes(self) -> int:
        """Bytes of all routed experts."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def expert_count(self) -> int:
        """How many routed experts there are over all layers."""
        return sum(len(layer.expert_bytes) for layer in self.layers)

    @property
    def total_bytes(self) -> int:
        """Bytes of all weights."""
        return self.dense_bytes + self.expert_bytes

    @property
    def widest(self) -> int:
        """Bytes of the widest expert of the model, 0 without experts."""
        return max((layer.width for layer in self.layers), default=0)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one more cache slot in every sparse layer: the sum of the layers' widths."""
        return sum(layer.width for layer in self.layers)
