from __future__ import annotations

import numpy as np
import pytest
from engine_helpers import reader_of

from pytest_colibri.container.safetensors import Container
from pytest_colibri.container.tiny import CONFIG
from pytest_colibri.engine import attention
from pytest_colibri.engine.attention import rotate
from pytest_colibri.engine.config import RouterConfig, parse_config
from pytest_colibri.engine.forward import Model, first_seen
from pytest_colibri.engine.router import route
from pytest_colibri.engine.tiers import ExpertTiers
from pytest_colibri.errors import UsageError

TOKENS = [3, 14, 159, 26, 53, 58, 200, 11, 77, 240, 5, 99]


def logits(*rows: list[float]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.array(rows, dtype=np.float32)


def test_weights_are_normalised_scores_of_the_best_experts_times_the_factor() -> None:
    config = RouterConfig(4, 2, 1, 1, normalise=True, scaling_factor=2.5)
    chosen, weights = route(logits([0.0, 2.0, -1.0, 1.0]), logits([0, 0, 0, 0])[0], config)
    scores = 1 / (1 + np.exp([-2.0, -1.0]))
    assert chosen.tolist() == [[1, 3]]
    np.testing.assert_allclose(weights, [2.5 * scores / scores.sum()], rtol=1e-6)


def test_the_bias_chooses_and_does_not_weigh() -> None:
    config = RouterConfig(3, 1, 1, 1, normalise=False, scaling_factor=1.0)
    chosen, weights = route(logits([3.0, 0.0, -3.0]), logits([0, 0, 9])[0], config)
    assert chosen.tolist() == [[2]]
    np.testing.assert_allclose(weights, [[1 / (1 + np.exp(3.0))]], rtol=1e-6)


def test_experts_of_a_group_that_is_not_kept_are_never_chosen() -> None:
    config = RouterConfig(6, 2, 3, 1, normalise=False, scaling_factor=1.0)
    # The best single expert, 0, is in a group whose two best sum lower than those of the last group.
    chosen, _weights = route(logits([4.0, -9.0, -9.0, -9.0, 1.0, 1.0]), np.zeros(6, np.float32), config)
    assert chosen.tolist() == [[4, 5]]


def test_a_negative_bias_does_not_let_a_dropped_group_in() -> None:
    config = RouterConfig(4, 2, 2, 1, normalise=False, scaling_factor=1.0)
    bias = np.full(4, -5, np.float32)
    assert sorted(route(logits([9.0, 9.0, -9.0, -9.0]), bias, config)[0][0].tolist()) == [0, 1]


def test_equal_scores_go_to_the_lower_expert() -> None:
    config = RouterConfig(4, 2, 1, 1, normalise=False, scaling_factor=1.0)
    assert route(np.zeros((1, 4), np.float32), np.zeros(4, np.float32), config)[0].tolist() == [[0, 1]]


def test_extreme_logits_stay_finite() -> None:
    config = RouterConfig(2, 2, 1, 1, normalise=True, scaling_factor=1.0)
    _chosen, weights = route(logits([1e4, -1e4]), np.zeros(2, np.float32), config)
    np.testing.assert_allclose(weights, [[1, 0]], atol=1e-6)


def test_the_union_keeps_the_order_of_first_sight() -> None:
    assert first_seen(np.array([[5, 1], [1, 7], [0, 5]])) == [5, 1, 7, 0]


def test_rotation_turns_neighbouring_pairs_by_position() -> None:
    pairs = np.array([[1, 0, 0, 1], [1, 0, 0, 1]], dtype=np.float32)
    turned = rotate(pairs, np.array([0, 3]), theta=100.0)
    np.testing.assert_allclose(turned[0], pairs[0])
    expected = [np.cos(3), np.sin(3), -np.sin(0.3), np.cos(0.3)]
    np.testing.assert_allclose(turned[1], expected, rtol=1e-5)


def load(tiny_container: Container) -> Model:
    reader, layouts = reader_of(tiny_container)
    return Model(reader, parse_config(CONFIG), ExpertTiers(reader, layouts, 2), None, None)


def test_a_batch_computes_what_single_steps_compute(tiny_container: Container) -> None:
    model = load(tiny_container)
    batch = model.run(TOKENS, 0, model.new_caches(len(TOKENS)))
    caches = model.new_caches(len(TOKENS))
    steps = [model.run([token], position, caches)[0] for position, token in enumerate(TOKENS)]
    np.testing.assert_allclose(batch, np.stack(steps), rtol=1e-3, atol=1e-4)


def test_a_token_never_sees_what_follows_it(tiny_container: Container) -> None:
    model = load(tiny_container)
    whole = model.run(TOKENS, 0, model.new_caches(len(TOKENS)))
    start = model.run(TOKENS[:5], 0, model.new_caches(5))
    np.testing.assert_allclose(whole[:5], start, rtol=1e-3, atol=1e-4)


def test_long_prompts_are_attended_block_by_block(
    tiny_container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny_container)
    whole = model.run(TOKENS, 0, model.new_caches(len(TOKENS)))
    monkeypatch.setattr(attention, "QUERY_BLOCK", 5)
    np.testing.assert_allclose(
        model.run(TOKENS, 0, model.new_caches(len(TOKENS))), whole, rtol=1e-5, atol=1e-5
    )


def test_no_token_is_picked_from_damaged_weights(tiny_container: Container) -> None:
    model = load(tiny_container)
    hidden = np.full((1, 128), np.nan, np.float32)
    with pytest.raises(UsageError, match="not finite: its weights are damaged"):
        model.best_tokens(hidden)
