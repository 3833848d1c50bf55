"""Multi-head latent attention with interleaved rotary positions, over a cache of latents.

The cache holds, per position, the normalised latent that keys and values are made from, and the one rotary
key that all heads share. The key and value parts of ``kv_b`` are applied to queries and results instead of to
every cached position. The sparse indexer is left out: it selects every key at the lengths that are accepted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pytest_colibri.engine.config import ModelConfig
from pytest_colibri.engine.weights import Floats, WeightReader

LATENT_NORM_EPSILON = 1e-6
QUERY_BLOCK = 256


def rms_norm(rows: Floats, weight: Floats, epsilon: float) -> Floats:
    """Scale each row of [n, width] to a root mean square of one, then by ``weight`` [width]."""
    mean_square: Floats = np.mean(np.square(rows), axis=-1, keepdims=True, dtype=np.float32)
    normalised: Floats = rows / np.sqrt(mean_square + np.float32(epsilon))
    return weight * normalised


def rotate(pairs: Floats, positions: NDArray[np.int64], theta: float) -> Floats:
    """Rotate neighbouring pairs of the last axis of [n, ..., width] by the angles of ``positions`` [n]."""
    width = pairs.shape[-1]
    frequencies = theta ** -(np.arange(0, width, 2, dtype=np.float32) / np.float32(width))
    angles = positions.astype(np.float32)[:, None] * frequencies
    angles = angles.reshape(len(positions), *(1,) * (pairs.ndim - 2), width // 2)
    cosine, sine = np.cos(angles), np.sin(angles)
    even, odd = pairs[..., 0::2], pairs[..., 1::2]
    return np.stack((even * cosine - odd * sine, even * sine + odd * cosine), axis=-1).reshape(pairs.shape)


class LatentCache:
    """Latents [positions, latent rank] and rotary keys [positions, rope width] of one layer."""

    def __init__(self, positions: int, latent_rank: int, rope_width: int) -> None:
        self._latents = np.empty((positions, latent_rank), dtype=np.float32)
        self._keys = np.empty((positions, rope_width), dtype=np.float32)
        self._length = 0

    def extend(self, latents: Floats, keys: Floats) -> tuple[Floats, Floats]:
        """Append the rows of a batch and return all rows so far."""
        begin, self._length = self._length, self._length + len(latents)
        self._latents[begin : self._length] = latents
        self._keys[begin : self._length] = keys
        return self._latents[: self._length], self._keys[: self._length]


class Attention:
    """The attention of one layer."""

    def __init__(self, reader: WeightReader, config: ModelConfig, layer: int) -> None:
        shape = config.attention
        prefix = f"model.layers.{layer}.self_attn"
        query_width = shape.nope_width + shape.rope_width
        self._shape = shape
        self._query_a = reader.matrix(f"{prefix}.q_a_proj.weight", shape.query_rank, config.hidden)
        self._query_norm = reader.vector(f"{prefix}.q_a_layernorm.weight", shape.query_rank)
        self._query_b = reader.matrix(
            f"{prefix}.q_b_proj.weight", shape.heads * query_width, shape.query_rank
        )
        self._latent_a = reader.matrix(
            f"{prefix}.kv_a_proj_with_mqa.weight", shape.latent_rank + shape.rope_width, config.hidden
        )
        self._latent_norm = reader.vector(f"{prefix}.kv_a_layernorm.weight", shape.latent_rank)
        self._latent_b = reader.matrix(
            f"{prefix}.kv_b_proj.weight",
            shape.heads * (shape.nope_width + shape.value_width),
            shape.latent_rank,
        )
        self._output = reader.matrix(
            f"{prefix}.o_proj.weight", config.hidden, shape.heads * shape.value_width
        )

    def apply(self, rows: Floats, positions: NDArray[np.int64], cache: LatentCache) -> Floats:
        """Attend from the rows [n, hidden] at ``positions`` to everything in the cache and before them."""
        latents, keys = cache.extend(*self._compress(rows, positions))
        nope, rope = self._queries(rows, positions)
        expand = self._latent_b.dense().reshape(self._shape.heads, -1, self._shape.latent_rank)
        key_part, value_part = expand[:, : self._shape.nope_width], expand[:, self._shape.nope_width :]
        mixed = np.empty((len(rows), self._shape.heads, self._shape.value_width), dtype=np.float32)
        for begin in range(0, len(rows), QUERY_BLOCK):
            block = slice(begin, begin + QUERY_BLOCK)
            queries = nope[block].transpose(1, 0, 2) @ key_part
            scores = queries @ latents.T + rope[block].transpose(1, 0, 2) @ keys.T
            weights = self._softmax(scores, positions[block])
            mixed[block] = (weights @ latents @ value_part.transpose(0, 2, 1)).transpose(1, 0, 2)
        return self._output.apply(mixed.reshape(len(rows), -1))

    def _compress(self, rows: Floats, positions: NDArray[np.int64]) -> tuple[Floats, Floats]:
        compressed = self._latent_a.apply(rows)
        latents, keys = np.split(compressed, [self._shape.latent_rank], axis=1)
        normalised = rms_norm(latents, self._latent_norm, LATENT_NORM_EPSILON)
        return normalised, rotate(keys, positions, self._shape.rope_theta)

    def _queries(self, rows: Floats, positions: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """The two parts of the queries, [n, heads, nope width] and [n, heads, rope width]."""
        normalised = rms_norm(self._query_a.apply(rows), self._query_norm, LATENT_NORM_EPSILON)
        queries = self._query_b.apply(normalised).reshape(len(rows), self._shape.heads, -1)
        nope, rope = np.split(queries, [self._shape.nope_width], axis=2)
        return nope, rotate(rope, positions, self._shape.rope_theta)

    def _softmax(self, scores: Floats, positions: NDArray[np.int64]) -> Floats:
        """Causal softmax of [heads, n, keys]: a query sees the keys up to its own position."""
        width = self._shape.nope_width + self._shape.rope_width
        visible = np.arange(scores.shape[2]) <= positions[:, None]
        scaled = np.where(visible, scores * np.float32(width**-0.5), np.float32(-np.inf))
        exponents = np.exp(scaled - scaled.max(axis=2, keepdims=True))
        weights: Floats = exponents / exponents.sum(axis=2, keepdims=True)
        return weights
