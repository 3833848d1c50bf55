from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from pytest_colibri.container.safetensors import open_container
from pytest_colibri.container.tiny import write_tiny_model
from pytest_colibri.container.usage import read_usage
from pytest_colibri.errors import UsageError

GOLDEN = sorted((Path(__file__).parents[2] / "conformance" / "engine" / "golden").glob("tiny-*.json"))


def test_every_format_has_its_reference():
    assert [path.stem for path in GOLDEN] == [
        "tiny-f32",
        "tiny-int4-grouped-32",
        "tiny-int4-grouped-64",
        "tiny-int4-row",
        "tiny-int8-row",
    ]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_the_writer_gives_the_bytes_that_the_reference_was_made_of(tmp_path, path):
    golden = json.loads(path.read_text())
    write_tiny_model(tmp_path, **golden["write_tiny_model"])
    written = hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    assert written == golden["model_sha256"]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_reference_is_whole_and_its_margins_are_safe(path):
    golden = json.loads(path.read_text())
    prompt, full, best = golden["prompt_ids"], golden["full_ids"], golden["tf_pred"]
    assert full[:12] == prompt
    assert len(full) == len(best) == 32
    # Greedy generation and scoring in one pass are two ways to the same tokens.
    assert full[12:] == best[11:-1]
    assert len(set(full[12:])) > 10
    assert golden["smallest_margin"] > 0.05
    assert "transformers" in golden["provenance"]


def test_the_formats_can_be_told_by_their_tokens():
    tokens = {tuple(json.loads(path.read_text())["full_ids"]) for path in GOLDEN}
    assert len(tokens) >= 4


def test_names_and_shapes_are_those_of_the_architecture(tmp_path, shared_data):
    with (
        open_container(write_tiny_model(tmp_path, "f32")) as ours,
        open_container(shared_data / "glm_tiny") as theirs,
    ):
        assert set(ours.tensors) == set(theirs.tensors)
        assert set(ours.config) <= set(theirs.config)
        # The one difference: 80 and 32 are the widths of an expert.
        for name, info in theirs.tensors.items():
            widened = tuple(80 if size == 32 and "experts" in name else size for size in info.shape)
            assert ours.tensors[name].shape == widened


def test_scales_have_the_name_of_their_weights(tmp_path, shared_data):
    with (
        open_container(write_tiny_model(tmp_path, "int4-grouped")) as ours,
        open_container(shared_data / "glm_tiny_fmt4") as theirs,
    ):
        assert {(name, info.dtype) for name, info in ours.tensors.items()} == {
            (name, info.dtype) for name, info in theirs.tensors.items()
        }


def test_the_usage_history_ranks_every_expert(tmp_path):
    counts = read_usage(write_tiny_model(tmp_path, "int4-row") / ".coli_usage")
    assert set(counts) == {(layer, expert) for layer in (3, 4) for expert in range(8)}
    assert sorted(counts.values()) == list(range(1, 17))


def test_the_usage_history_can_be_left_out(tmp_path):
    write_tiny_model(tmp_path, "int4-row", usage=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_another_seed_gives_other_weights(tmp_path):
    with (
        open_container(write_tiny_model(tmp_path / "0", "f32")) as first,
        open_container(write_tiny_model(tmp_path / "1", "f32", seed=1)) as second,
    ):
        for name in first.tensors:
            assert not np.array_equal(first.read_f32(name), second.read_f32(name)), name


def test_a_matrix_keeps_the_variance_of_its_input(tmp_path):
    with open_container(write_tiny_model(tmp_path, "f32")) as container:
        weights = container.read_f32("model.layers.0.self_attn.o_proj.weight")
    assert abs(weights.mean()) < 0.01
    assert weights.std() * np.sqrt(128) == pytest.approx(1, abs=0.02)


def test_a_group_size_must_fit_every_row(tmp_path):
    with pytest.raises(UsageError, match="groups of 16, 32 or 64 inputs, not 128"):
        write_tiny_model(tmp_path, "int4-grouped", group_size=128)
