from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pytest_colibri.container.formats import (
    GROUP_SIZES,
    SUPPORTED_KINDS,
    WeightFormat,
    dequantise,
    infer_format,
    quantise,
)
from pytest_colibri.container.safetensors import ContainerError, open_container
from pytest_colibri.container.tiny import write_tiny_model

PACKED = [
    WeightFormat("int8-row"),
    WeightFormat("int4-row"),
    WeightFormat("int4-grouped", 16),
    WeightFormat("int4-grouped", 32),
    WeightFormat("int4-grouped", 64),
]
RECOGNISED = [
    *PACKED,
    WeightFormat("f32"),
    WeightFormat("int2-row"),
    WeightFormat("int4-grouped", 128),
    WeightFormat("int3-g64", 64),
    WeightFormat("e8-iq3"),
    WeightFormat("mxfp4", 32),
    WeightFormat("fp8-e4m3-b128"),
]

magnitudes = st.floats(2.0**-60, 2.0**60, width=32)
weights = st.one_of(st.just(0.0), magnitudes, magnitudes.map(lambda value: -value))
matrices = st.tuples(st.integers(1, 4), st.integers(1, 150)).flatmap(
    lambda shape: arrays(np.float32, shape, elements=weights)
)


@given(matrix=matrices, weight_format=st.sampled_from(PACKED))
def test_a_weight_comes_back_within_half_a_scale(matrix, weight_format):
    outputs, inputs = matrix.shape
    payload, scales = quantise(matrix, weight_format)
    assert payload.dtype == np.uint8
    assert payload.size == weight_format.payload_bytes(outputs, inputs)
    assert scales.dtype == np.float32
    assert scales.size == weight_format.scales_count(outputs, inputs)
    back = dequantise(payload, scales, outputs, inputs, weight_format)
    assert back.dtype == np.float32
    size = weight_format.group_size or inputs
    for row in range(outputs):
        for group, start in enumerate(range(0, inputs, size)):
            piece = np.s_[row, start : start + size]
            scale = float(scales.reshape(outputs, -1)[row, group])
            error = np.abs(back[piece].astype(np.float64) - matrix[piece].astype(np.float64))
            assert error.max() <= scale * 0.50001


@given(matrix=matrices, weight_format=st.sampled_from(PACKED))
def test_packing_what_was_unpacked_changes_no_byte(matrix, weight_format):
    shape = matrix.shape
    payload, scales = quantise(matrix, weight_format)
    again, scales_again = quantise(dequantise(payload, scales, *shape, weight_format), weight_format)
    assert (again == payload).all()
    np.testing.assert_allclose(scales_again, scales, rtol=1e-6)


def test_f32_is_stored_as_it_is():
    matrix = np.array([[1.5, -2.25, 0.1]], dtype=np.float32)
    payload, scales = quantise(matrix, WeightFormat("f32"))
    assert scales is None
    assert payload.tobytes() == matrix.tobytes()
    assert (dequantise(payload, None, 1, 3, WeightFormat("f32")) == matrix).all()


def test_the_even_column_lies_in_the_low_nibble():
    payload, scales = quantise(np.array([[7, -7, 1]], dtype=np.float32), WeightFormat("int4-row"))
    assert payload.tolist() == [0x1F, 0x89]
    assert scales.tolist() == [1]
    assert dequantise(np.array([0x0F], np.uint8), scales, 1, 2, WeightFormat("int4-row")).tolist() == [
        [7, -8]
    ]


def test_int8_bytes_are_signed():
    payload, scales = quantise(np.array([[127, -127, 2]], dtype=np.float32), WeightFormat("int8-row"))
    assert payload.tolist() == [127, 129, 2]
    assert scales.tolist() == [1]


def test_a_ragged_group_has_its_own_scale():
    matrix = np.array([[7.0] * 16 + [14.0, -14.0, 2.0]], dtype=np.float32)
    payload, scales = quantise(matrix, WeightFormat("int4-grouped", 16))
    assert scales.tolist() == [1, 2]
    assert payload.size == 10
    assert (dequantise(payload, scales, 1, 19, WeightFormat("int4-grouped", 16)) == matrix).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_must_be_finite(value):
    with pytest.raises(ContainerError, match="finite"):
        quantise(np.array([[value]], dtype=np.float32), WeightFormat("int8-row"))


def test_counts_that_do_not_belong_to_the_format_are_refused():
    with pytest.raises(
        ContainerError, match=r"int4-grouped-64 of \[2, 80\] has 80 bytes and 4 scales, not 80 and 2"
    ):
        dequantise(np.zeros(80, np.uint8), np.zeros(2, np.float32), 2, 80, WeightFormat("int4-grouped", 64))


@pytest.mark.parametrize("kind", ["int2-row", "int3-g64", "e8-iq3", "mxfp4", "fp8-e4m3-b128"])
def test_an_unsupported_format_is_refused_by_name(kind):
    weight_format = WeightFormat(kind)
    assert not weight_format.supported
    with pytest.raises(
        ContainerError, match=f"{kind} is recognised but not supported; supported are f32, int8"
    ):
        quantise(np.ones((1, 64), np.float32), weight_format)
    scales = weight_format.scales_count(1, 64)
    with pytest.raises(ContainerError, match=f"{kind} is recognised but not supported"):
        dequantise(
            np.zeros(weight_format.payload_bytes(1, 64), np.uint8),
            None if scales is None else np.zeros(scales, np.float32),
            1,
            64,
            weight_format,
        )


@given(weight_format=st.sampled_from(RECOGNISED), outputs=st.integers(1, 600), inputs=st.integers(1, 600))
def test_an_inferred_format_is_the_right_one_or_the_doubt_is_told(weight_format, outputs, inputs):
    size = weight_format.group_size
    if weight_format.kind == "int4-grouped" and size >= inputs:
        expected = WeightFormat("int4-row")
    else:
        expected = weight_format
    try:
        inferred = infer_format(
            weight_format.payload_bytes(outputs, inputs),
            weight_format.scales_count(outputs, inputs),
            outputs,
            inputs,
            scales_dtype="U8" if weight_format.kind == "mxfp4" else "F32",
        )
    except ContainerError as doubt:
        named = str(doubt).split(" may be ")[1].split(":")[0].split(" or ")
        assert str(expected) in named
        assert len(named) > 1
    else:
        assert inferred == expected


@pytest.mark.parametrize("outputs", [128, 1408, 2048, 6144])
@pytest.mark.parametrize("inputs", [80, 128, 1408, 1536, 2048, 5120, 6144])
@pytest.mark.parametrize("weight_format", RECOGNISED, ids=str)
def test_widths_of_real_models_leave_no_doubt(weight_format, outputs, inputs):
    expected = weight_format if weight_format.group_size != 128 or inputs > 128 else WeightFormat("int4-row")
    inferred = infer_format(
        weight_format.payload_bytes(outputs, inputs),
        weight_format.scales_count(outputs, inputs),
        outputs,
        inputs,
        scales_dtype="U8" if weight_format.kind == "mxfp4" else "F32",
    )
    assert inferred == expected


def test_equal_counts_are_refused_with_both_names():
    with pytest.raises(ContainerError, match="may be int4-grouped-64 or int3-g64: the format cannot be told"):
        infer_format(128 * 48, 256, 128, 96)


def test_unknown_counts_are_refused():
    with pytest.raises(
        ContainerError, match=r"100 bytes with no scales for \[8, 8\] is no known weight format"
    ):
        infer_format(100, None, 8, 8)
    with pytest.raises(ContainerError, match="8 F64 scales"):
        infer_format(64, 8, 8, 8, scales_dtype="F64")
    with pytest.raises(ContainerError, match="has no weights"):
        infer_format(0, None, 0, 8)


@pytest.mark.parametrize("kind", SUPPORTED_KINDS)
def test_experts_of_a_tiny_model_are_recognised(tmp_path, kind):
    with open_container(write_tiny_model(tmp_path, kind, group_size=32)) as container:
        for part, shape in (("gate", (80, 128)), ("up", (80, 128)), ("down", (128, 80))):
            name = f"model.layers.4.mlp.experts.7.{part}_proj.weight"
            scales = container.tensors.get(f"{name}.qs")
            inferred = infer_format(
                container.info(name).nbytes, None if scales is None else scales.shape[0], *shape
            )
            assert inferred == WeightFormat(kind, 32 if kind == "int4-grouped" else None)


def test_group_sizes_are_told_apart_at_every_width():
    for inputs in range(2, 1000):
        counts = [-(-inputs // size) for size in GROUP_SIZES if size < inputs]
        assert len(set(counts)) == len(counts)


def test_the_experts_of_glm_tiny_fmt4_are_grouped_by_64(shared_data):
    with open_container(shared_data / "glm_tiny_fmt4") as container:
        name = "model.layers.3.mlp.experts.0.down_proj.weight"
        payload, scales = container.read(name), container.read_f32(f"{name}.qs")
        weight_format = infer_format(payload.size, scales.size, 256, 256)
        assert weight_format == WeightFormat("int4-grouped", 64)
        assert 0.03 < dequantise(payload, scales, 256, 256, weight_format).std() < 0.07
