"""The forward pass of ``glm_moe_dsa`` in f32: embeddings in, best tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pytest_colibri.engine.attention import Attention, LatentCache, rms_norm
from pytest_colibri.engine.config import ModelConfig
from pytest_colibri.engine.device import ExpertDevice, ExpertRows
from pytest_colibri.engine.router import Ids, route
from pytest_colibri.engine.tiers import ExpertTiers
from pytest_colibri.engine.weights import Floats, WeightReader, gated_mlp
from pytest_colibri.errors import UsageError


class RoutingListener(Protocol):
    """Learns of every routing decision."""

    def routed(self, layer: int, chosen: Ids, weights: Floats) -> None:
        """Experts [rows, top_k] of one batch of a layer, and their weights."""


class DenseMlp:
    """A gated MLP whose weights stay in RAM: that of a dense layer, or the shared expert."""

    def __init__(self, reader: WeightReader, prefix: str, hidden: int, width: int) -> None:
        self._gate = reader.matrix(f"{prefix}.gate_proj.weight", width, hidden)
        self._up = reader.matrix(f"{prefix}.up_proj.weight", width, hidden)
        self._down = reader.matrix(f"{prefix}.down_proj.weight", hidden, width)

    def apply(self, rows: Floats) -> Floats:
        """Compute [n, hidden] to [n, hidden]."""
        return gated_mlp(rows, self._gate, self._up, self._down)


class SparseMlp:
    """Router, routed experts on their tiers, and the shared expert."""

    def __init__(
        self,
        reader: WeightReader,
        config: ModelConfig,
        layer: int,
        tiers: ExpertTiers,
        device: ExpertDevice | None,
        listener: RoutingListener | None,
    ) -> None:
        prefix = f"model.layers.{layer}.mlp"
        experts = config.router.experts
        self._layer = layer
        self._config = config.router
        self._router = reader.matrix(f"{prefix}.gate.weight", experts, config.hidden)
        self._correction_bias = reader.vector(f"{prefix}.gate.e_score_correction_bias", experts)
        self._shared = DenseMlp(
            reader, f"{prefix}.shared_experts", config.hidden, config.expert_width * config.shared_experts
        )
        self._tiers = tiers
        self._device = device
        self._listener = listener

    def apply(self, rows: Floats) -> Floats:
        """Compute [n, hidden] to [n, hidden]; every expert of the batch is used once, for all its rows."""
        chosen, weights = route(self._router.apply(rows), self._correction_bias, self._config)
        if self._listener is not None:
            self._listener.routed(self._layer, chosen, weights)
        result = self._shared.apply(rows)
        on_device: list[ExpertRows] = []
        for served in self._tiers.serve(self._layer, first_seen(chosen)):
            row_ids, places = np.nonzero(chosen == served.key.expert)
            share = ExpertRows(served.key, row_ids, weights[row_ids, places])
            if served.weights is None:
                on_device.append(share)
            else:
                share.add_to(result, served.weights.apply(rows[row_ids]))
        if on_device:
            assert self._device is not None
            for share, output in zip(on_device, self._device.run_experts(on_device, rows), strict=True):
                share.add_to(result, output)
        return result


def first_seen(chosen: Ids) -> list[int]:
    """The union of a batch's experts [rows, top_k], in the order in which the rows name them."""
    return list(dict.fromkeys(chosen.reshape(-1).tolist()))


class Layer:
    """One transformer layer."""

    def __init__(
        self, reader: WeightReader, config: ModelConfig, index: int, mlp: DenseMlp | SparseMlp
    ) -> None:
        prefix = f"model.layers.{index}"
        self._epsilon = config.norm_epsilon
        self._attention_norm = reader.vector(f"{prefix}.input_layernorm.weight", config.hidden)
        self._attention = Attention(reader, config, index)
        self._mlp_norm = reader.vector(f"{prefix}.post_attention_layernorm.weight", config.hidden)
        self._mlp = mlp

    def apply(self, rows: Floats, positions: NDArray[np.int64], cache: LatentCache) -> Floats:
        """Compute [n, hidden] to [n, hidden]."""
        rows = rows + self._attention.apply(
            rms_norm(rows, self._attention_norm, self._epsilon), positions, cache
        )
        return rows + self._mlp.apply(rms_norm(rows, self._mlp_norm, self._epsilon))


class Model:
    """A loaded model: dense weights in RAM, routed experts on their tiers."""

    def __init__(
        self,
        reader: WeightReader,
        config: ModelConfig,
        tiers: ExpertTiers,
        device: ExpertDevice | None,
        listener: RoutingListener | None,
    ) -> None:
        self._config = config
        self._embeddings = reader.matrix("model.embed_tokens.weight", config.vocabulary, config.hidden)
        self._layers = []
        for index in range(config.layers):
            mlp: DenseMlp | SparseMlp
            if index in config.sparse_layers:
                mlp = SparseMlp(reader, config, index, tiers, device, listener)
            else:
                mlp = DenseMlp(reader, f"model.layers.{index}.mlp", config.hidden, config.dense_width)
            self._layers.append(Layer(reader, config, index, mlp))
        self._norm = reader.vector("model.norm.weight", config.hidden)
        self._head = (
            self._embeddings
            if config.tied_embeddings
            else reader.matrix("lm_head.weight", config.vocabulary, config.hidden)
        )

    def new_caches(self, positions: int) -> list[LatentCache]:
        """Make an empty cache of ``positions`` for each layer."""
        shape = self._config.attention
        return [LatentCache(positions, shape.latent_rank, shape.rope_width) for _ in self._layers]

    def run(self, tokens: Sequence[int], begin: int, caches: Sequence[LatentCache]) -> Floats:
        """Run one batch of tokens at the positions from ``begin`` on; return hidden states [n, hidden]."""
        positions = np.arange(begin, begin + len(tokens))
        rows = self._embeddings.dense()[list(tokens)]
        for layer, cache in zip(self._layers, caches, strict=True):
            rows = layer.apply(rows, positions, cache)
        return rows

    def best_tokens(self, rows: Floats) -> list[int]:
        """Return the most likely next token after each row of hidden states [n, hidden]; ties: the lowest.

        Raises UsageError where the weights lead to no number, so that no token is picked from nonsense.
        """
        logits = self._head.apply(rms_norm(rows, self._norm, self._config.norm_epsilon))
        if not np.isfinite(logits).all():
            raise UsageError("the model computes values that are not finite: its weights are damaged")
        return [int(token) for token in np.argmax(logits, axis=1)]
