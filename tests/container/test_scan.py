from __future__ import annotations

import json

import pytest

from pytest_colibri.container.safetensors import ContainerError, open_container
from pytest_colibri.container.scan import read_geometry
from pytest_colibri.container.tiny import write_tiny_model


def expert(layer: int, index: int, part: str = "down_proj.weight") -> str:
    return f"model.layers.{layer}.mlp.experts.{index}.{part}"


@pytest.fixture
def write_model(tmp_path, write_shard):
    """Write a model of tensors of the given sizes, and its configuration."""

    def write(sizes: dict[str, int], **config: object):
        header, position = {}, 0
        for name, size in sizes.items():
            header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [position, position + size]}
            position += size
        write_shard(header, bytes(position))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm_moe_dsa", **config}))
        return tmp_path

    return write


def test_experts_are_told_from_the_dense_rest(write_model):
    sizes = {
        expert(3, 0): 10,
        expert(3, 0, "down_proj.weight.qs"): 4,
        expert(3, 1): 30,
        expert(10, 0): 5,
        expert(10, 1): 6,
        "model.layers.3.mlp.shared_experts.down_proj.weight": 100,
        "model.layers.3.mlp.gate.weight": 200,
        "lm_head.weight": 400,
    }
    geometry = read_geometry(write_model(sizes, n_routed_experts=2))
    assert geometry.family == "glm_moe_dsa"
    assert geometry.dense_bytes == 700
    assert [layer.index for layer in geometry.layers] == [3, 10]
    assert dict(geometry.layers[0].expert_bytes) == {0: 14, 1: 30}
    assert geometry.layers[0].width == 30
    assert geometry.total_bytes == 755
    assert geometry.shards == 1


@pytest.mark.parametrize("name", ["n_routed_experts", "num_experts", "num_local_experts"])
def test_experts_under_other_names_are_refused_with_the_family(write_model, name):
    folder = write_model({"layers.0.ffn.experts.0.w1.weight": 8}, model_type="deepseek_v4", **{name: 64})
    with pytest.raises(
        ContainerError, match=f"{name} = 64 for the family 'deepseek_v4', but no tensor is named"
    ):
        read_geometry(folder)


def test_a_model_without_experts_is_dense(write_model):
    geometry = read_geometry(write_model({"lm_head.weight": 8}, model_type="llama"))
    assert geometry.layers == ()
    assert geometry.widest == 0
    assert geometry.total_bytes == geometry.dense_bytes == 8


def test_a_missing_expert_is_refused(write_model):
    folder = write_model({expert(3, 0): 4, expert(3, 2): 4}, n_routed_experts=4)
    with pytest.raises(ContainerError, match="layer 3 lacks 2 experts, the first is 1; is a shard missing"):
        read_geometry(folder)


def test_an_expert_beyond_the_configuration_is_refused(write_model):
    with pytest.raises(ContainerError, match=r"layer 3 has expert 9; n_routed_experts = 4 .* allows 0 to 3"):
        read_geometry(write_model({expert(3, 9): 4}, n_routed_experts=4))


@pytest.mark.parametrize("count", [-1, 10**6, "8", 8.0, True])
def test_a_count_of_experts_that_is_none_is_refused(write_model, count):
    with pytest.raises(ContainerError, match="is no count of experts"):
        read_geometry(write_model({expert(3, 0): 4}, n_routed_experts=count))


@pytest.mark.parametrize("family", [None, "", 7])
def test_a_family_must_be_named(write_model, family):
    with pytest.raises(ContainerError, match="model_type"):
        read_geometry(write_model({"lm_head.weight": 8}, model_type=family))


@pytest.mark.parametrize(
    ("kind", "group_size", "width"),
    [
        ("f32", 64, 3 * 80 * 128 * 4),
        ("int8-row", 64, 3 * 80 * 128 + (80 + 80 + 128) * 4),
        ("int4-row", 64, 3 * 80 * 64 + (80 + 80 + 128) * 4),
        ("int4-grouped", 64, 3 * 80 * 64 + (80 * 2 + 80 * 2 + 128 * 2) * 4),
        ("int4-grouped", 32, 3 * 80 * 64 + (80 * 4 + 80 * 4 + 128 * 3) * 4),
    ],
)
def test_the_geometry_of_a_tiny_model(tmp_path, kind, group_size, width):
    geometry = read_geometry(write_tiny_model(tmp_path, kind, group_size=group_size))
    assert [layer.index for layer in geometry.layers] == [3, 4]
    assert all(set(layer.expert_bytes.values()) == {width} for layer in geometry.layers)
    assert geometry.expert_count == 16


@pytest.mark.parametrize(("model", "width"), [("glm_tiny", 49_152), ("glm_tiny_fmt4", 110_592)])
def test_the_geometry_of_the_shared_models(shared_data, model, width):
    geometry = read_geometry(shared_data / model)
    assert [(layer.index, len(layer.expert_bytes), layer.width) for layer in geometry.layers] == [
        (3, 8, width),
        (4, 8, width),
    ]
    with open_container(shared_data / model) as container:
        assert geometry.total_bytes == sum(tensor.nbytes for tensor in container.tensors.values())
