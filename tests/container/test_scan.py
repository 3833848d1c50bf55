from __future__ import annotations

import json
import math

import pytest
from compiled_scan import NOT_BUILT

from pytest_colibri.container import scan
from pytest_colibri.container.safetensors import ContainerError, open_container
from pytest_colibri.container.scan import read_geometry
from pytest_colibri.container.tiny import write_tiny_model


@pytest.fixture(autouse=True, params=["python", "compiled"])
def header_scan(request, monkeypatch):
    """Every test here runs twice: with the Python code alone, and with the compiled code before it."""
    if request.param == "python":
        monkeypatch.setattr(scan, "add_up_compiled", None)
    elif scan.add_up_compiled is None:
        pytest.skip(NOT_BUILT)


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


FAMILIES = [
    ("glm_moe_dsa", "n_routed_experts", "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"),
    ("deepseek_v4", "n_routed_experts", "layers.{layer}.ffn.experts.{expert}.w1.weight"),
    ("kimi_k3", "num_experts", "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight"),
    (
        "kimi_k3",
        "num_experts",
        "language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
    ),
    ("olmoe", "num_experts", "model.layers.{layer}.mlp.experts.{expert}.merged_weight"),
    ("qwen3_5_moe", "num_experts", "model.layers.{layer}.mlp.experts.{expert}.qs"),
]


@pytest.mark.parametrize(("family", "key", "name"), FAMILIES)
def test_each_family_names_its_experts(write_model, family, key, name):
    pairs = [(layer, expert) for layer in (1, 2) for expert in (0, 1, 2)]
    sizes = {name.format(layer=layer, expert=expert): 10 * layer for layer, expert in pairs}
    dense = {
        "model.layers.1.block_sparse_moe.shared_experts.w1.weight": 5,
        "layers.1.ffn.shared_experts.w1.weight": 7,
        "model.layers.1.mlp.shared_experts.down_proj": 11,
    }
    geometry = read_geometry(write_model(sizes | dense, model_type=family, **{key: 3}))
    assert [(layer.index, dict(layer.expert_bytes)) for layer in geometry.layers] == [
        (1, {0: 10, 1: 10, 2: 10}),
        (2, {0: 20, 1: 20, 2: 20}),
    ]
    assert geometry.dense_bytes == 23
    assert geometry.family == family


@pytest.mark.parametrize(("family", "key"), sorted({(family, key) for family, key, _ in FAMILIES}))
def test_experts_under_the_names_of_another_family_are_refused(write_model, family, key):
    folder = write_model({"model.layers.0.moe.0.w1.weight": 8}, model_type=family, **{key: 64})
    with pytest.raises(ContainerError, match=f"{key} = 64 for the family '{family}', but no tensor is named"):
        read_geometry(folder)


@pytest.mark.parametrize("count", [{"num_experts": 64}, {}])
def test_an_unknown_family_is_refused_by_name(write_model, count):
    folder = write_model({"model.layers.0.moe.experts.0.w1.weight": 8}, model_type="mystery_moe", **count)
    with pytest.raises(
        ContainerError, match="the model family 'mystery_moe' is unknown; known: deepseek_v4,"
    ):
        read_geometry(folder)


def fused(layer: int, part: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{part}"


@pytest.fixture
def write_fused(tmp_path, write_shard):
    """Write an Inkling model of U8 tensors of the given shapes."""

    def write(shapes: dict[str, list[int]], **config: object):
        header, position = {}, 0
        for name, shape in shapes.items():
            end = position + math.prod(shape)
            header[name] = {"dtype": "U8", "shape": shape, "data_offsets": [position, end]}
            position = end
        write_shard(header, bytes(position))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "inkling_mm_model", **config}))
        return tmp_path

    return write


def test_an_expert_of_a_fused_tensor_is_a_slice_of_its_first_dimension(write_fused):
    shapes = {
        fused(1, "gate_up_proj"): [4, 6, 10],
        fused(1, "gate_up_proj.qs"): [4 * 6],
        fused(1, "down_proj"): [4 * 3 * 5],
        fused(7, "down_proj"): [4, 1],
        "model.layers.1.mlp.shared_experts.down_proj": [100],
    }
    geometry = read_geometry(write_fused(shapes, text_config={"n_routed_experts": 4}))
    assert [(layer.index, dict(layer.expert_bytes)) for layer in geometry.layers] == [
        (1, dict.fromkeys(range(4), 60 + 6 + 15)),
        (7, dict.fromkeys(range(4), 1)),
    ]
    assert geometry.dense_bytes == 100
    assert geometry.total_bytes == 100 + 4 * 82


@pytest.mark.parametrize(
    ("shape", "text_config", "fault"),
    [
        ([6, 2], {"n_routed_experts": 4}, r"shape \[6, 2\] cannot be divided among n_routed_experts = 4"),
        ([], {"n_routed_experts": 4}, "cannot be divided"),
        ([4, 2], {}, "does not say in n_routed_experts how many"),
        ([4, 2], {"n_routed_experts": 0}, "does not say in n_routed_experts how many"),
    ],
)
def test_a_fused_tensor_that_cannot_be_divided_is_refused(write_fused, shape, text_config, fault):
    with pytest.raises(ContainerError, match=fault):
        read_geometry(write_fused({fused(1, "down_proj"): shape}, text_config=text_config))


def test_few_fused_tensors_do_not_stand_for_endless_experts(write_fused):
    shapes = {fused(layer, "down_proj"): [600_000] for layer in (1, 2)}
    with pytest.raises(ContainerError, match="more than 1000000 experts"):
        read_geometry(write_fused(shapes, n_routed_experts=600_000))


def test_nested_configuration_is_the_one_that_describes_the_model(write_model):
    text = {"num_experts": 1, "hidden_size": 64}
    folder = write_model({expert(0, 0): 8}, model_type="qwen3_5_moe", text_config=text)
    assert read_geometry(folder).config == text


@pytest.mark.parametrize("section", [7, [], "text"])
def test_nested_configuration_that_is_no_object_is_refused(write_model, section):
    with pytest.raises(ContainerError, match=r"text_config .* is no JSON object"):
        read_geometry(write_model({expert(0, 0): 8}, model_type="qwen3_5_moe", text_config=section))


def test_layers_with_an_indexer_are_counted(write_model):
    sizes = {
        expert(3, 0): 8,
        "model.layers.0.self_attn.indexer.wk.weight": 4,
        "model.layers.0.self_attn.indexer.wq_b.weight": 4,
        "model.layers.3.self_attn.indexer.wk.weight": 4,
    }
    assert read_geometry(write_model(sizes)).index_layers == 2


def test_a_model_without_experts_is_dense(write_model):
    geometry = read_geometry(write_model({"lm_head.weight": 8}))
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
