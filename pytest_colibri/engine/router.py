"""Which experts a token goes to, and with what weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pytest_colibri.engine.config import RouterConfig

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


def route(logits: Floats, correction_bias: Floats, config: RouterConfig) -> tuple[Ids, Floats]:
    """Choose experts for each row of ``logits`` [rows, experts].

    Returns the chosen ids [rows, top_k], best first (ties: the lower id), and their weights, same shape. The
    bias takes part in the choice only; the weights come from the sigmoid scores.
    """
    scores = np.float32(0.5) * (1 + np.tanh(logits * np.float32(0.5)))
    for_choice = _mask_groups(scores + correction_bias, config)
    chosen = np.argsort(-for_choice, axis=1, kind="stable")[:, : config.experts_per_token]
    weights = np.take_along_axis(scores, chosen, axis=1)
    if config.normalise:
        weights = weights / (weights.sum(axis=1, keepdims=True) + 1e-20)
    return chosen, (weights * config.scaling_factor).astype(np.float32)


def _mask_groups(scores: Floats, config: RouterConfig) -> Floats:
    """Keep the groups whose two best experts sum highest; the experts of the others become -inf."""
    if config.groups == config.groups_per_token:
        return scores
    grouped = scores.reshape(len(scores), config.groups, -1)
    group_scores = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
    kept = np.argsort(-group_scores, axis=1, kind="stable")[:, : config.groups_per_token]
    allowed = np.zeros(group_scores.shape, dtype=bool)
    np.put_along_axis(allowed, kept, True, axis=1)
    return np.where(allowed[:, :, None], grouped, np.float32(-np.inf)).reshape(scores.shape)
