from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_helpers import reader_of

from pytest_colibri.container.safetensors import open_container
from pytest_colibri.container.tiny import CONFIG, write_tiny_model
from pytest_colibri.engine.config import parse_config
from pytest_colibri.errors import UsageError


def test_the_longest_context_is_where_the_indexer_still_selects_every_key() -> None:
    assert parse_config(CONFIG).longest_context == 4096
    assert parse_config({**CONFIG, "index_topk": 7}).longest_context == 7


def test_the_sparse_layers_come_from_either_key() -> None:
    older = {key: value for key, value in CONFIG.items() if key != "mlp_layer_types"}
    assert parse_config(older) == parse_config(CONFIG)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "olmoe"}, "model_type 'olmoe' is not computed"),
        ({"attention_bias": True}, "attention_bias True is not computed"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not computed"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, "only the default rope_type"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"num_key_value_heads": 2}, "num_key_value_heads must equal"),
        ({"q_lora_rank": None}, "q_lora_rank must be an integer"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even"),
        ({"index_topk": None}, "index_topk must be an integer"),
        ({"hidden_size": 2**40}, "hidden_size must be an integer from 1 to"),
        ({"hidden_size": True}, "hidden_size must be an integer from 1 to"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be an integer"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types must name"),
        ({"n_group": 3}, "n_group 3 does not divide 8 experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be an integer from 1 to 8"),
        ({"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, "num_experts_per_tok .* from 1 to 2"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number above 0"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        parse_config({**CONFIG, **changes})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"mlp_layer_types": ["dense"] * 4 + ["sparse"]}, r"experts in the layers \[3, 4\]; .* \[4\]"),
        ({"moe_intermediate_size": 96}, "is no known weight format"),
    ],
)
def test_a_container_that_contradicts_its_configuration_is_refused(
    tmp_path: Path, changes: dict[str, object], complaint: str
) -> None:
    model = write_tiny_model(tmp_path, "int8-row")
    (model / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    with open_container(model) as container, pytest.raises(UsageError, match=complaint):
        reader_of(container)
