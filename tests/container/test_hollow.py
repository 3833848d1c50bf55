from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_colibri.container import hollow
from pytest_colibri.container.families import FAMILIES
from pytest_colibri.container.hollow import HOLLOW_MODELS, PROBE_BYTES, write_hollow_model
from pytest_colibri.container.scan import read_geometry
from pytest_colibri.container.usage import USAGE_FILE, read_usage
from pytest_colibri.errors import Unavailable, UsageError
from pytest_colibri.planner.families import family_of
from pytest_colibri.planner.runtime import kv_bytes, prompt_scratch_bytes, workspace_bytes

GLM_REPORTED = {
    "glm-mixed": (10_700_000_000, {**dict.fromkeys(range(3, 78), 18_915_328), 78: 37_789_696}),
    "glm-mixed-without-mtp": (10_700_000_000, dict.fromkeys(range(3, 78), 18_915_328)),
    "glm-g64": (11_900_000_000, dict.fromkeys(range(3, 78), 21_233_664)),
    "glm-g64-int8-mtp": (11_900_000_000, {**dict.fromkeys(range(3, 78), 21_233_664), 78: 37_789_696}),
}


def allocated(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


@pytest.mark.parametrize("name", GLM_REPORTED)
def test_glm_models_have_the_reported_figures(tmp_path, name):
    geometry = read_geometry(write_hollow_model(tmp_path / "model", name))
    dense_bytes, widths = GLM_REPORTED[name]
    assert geometry.dense_bytes == dense_bytes
    assert {layer.index: set(layer.expert_bytes.values()) for layer in geometry.layers} == {
        layer: {width} for layer, width in widths.items()
    }
    assert {len(layer.expert_bytes) for layer in geometry.layers} == {256}
    assert geometry.index_layers == geometry.config["num_hidden_layers"] == 78
    assert kv_bytes(geometry, 4096) == 4096 * (79 * (512 + 64) + 78 * 128) * 4
    assert workspace_bytes(geometry, 4096) == 4096 * 64 * (192 + 256) * 4


@pytest.mark.parametrize("name", HOLLOW_MODELS)
def test_headers_say_what_the_catalogue_says_and_every_rule_of_the_family_applies(tmp_path, name):
    geometry = read_geometry(write_hollow_model(tmp_path / "model", name))
    model = HOLLOW_MODELS[name]
    assert geometry.total_bytes == model.total_bytes
    assert geometry.dense_bytes == model.dense_bytes
    assert {layer.index: layer.width for layer in geometry.layers} == dict(model.widths)
    assert geometry.expert_count == model.experts * len(model.widths)
    assert kv_bytes(geometry, 8192) > kv_bytes(geometry, 4096) > 0
    assert prompt_scratch_bytes(geometry, 128) > prompt_scratch_bytes(geometry, 64) > 0
    assert workspace_bytes(geometry, 4096) >= 0


def test_every_family_has_a_model(tmp_path):
    families = {family_of(read_geometry(write_hollow_model(tmp_path / name, name))) for name in HOLLOW_MODELS}
    assert families == {family.name for family in FAMILIES}


def test_weights_are_holes(tmp_path):
    folder = write_hollow_model(tmp_path / "model", "glm-mixed")
    assert sum(path.stat().st_size for path in folder.iterdir()) > 383_000_000_000
    assert allocated(folder) < 8_000_000


def test_every_expert_has_a_rank(tmp_path):
    folder = write_hollow_model(tmp_path / "model", "glm-small")
    ranks = read_usage(folder / USAGE_FILE)
    experts = {
        (layer.index, expert) for layer in read_geometry(folder).layers for expert in layer.expert_bytes
    }
    assert ranks.keys() == experts
    assert min(ranks.values()) == 1


def test_the_small_model_is_small():
    assert HOLLOW_MODELS["glm-small"].total_bytes < 2_000_000_000


def test_a_name_in_another_script_is_utf_8_and_valid_in_no_code_page_of_windows(tmp_path):
    config = (write_hollow_model(tmp_path / "model", "olmoe-chinese-name") / "config.json").read_bytes()
    assert json.loads(config.decode("utf-8"))["_name_or_path"] == "量化"
    with pytest.raises(UnicodeDecodeError):
        config.decode("cp1252")


def test_a_model_can_come_with_other_files(tmp_path):
    folder = write_hollow_model(tmp_path / "model", "olmoe-damaged-record")
    assert (folder / ".coli_ssd").read_bytes() == b"inf\n"


def test_kimi_has_its_layers_of_both_kinds():
    config = json.loads(json.dumps(HOLLOW_MODELS["kimi-k3"].config))["text_config"]
    assert len(config["linear_attn_config"]["kda_layers"]) == 69
    assert config["num_hidden_layers"] == 93


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(UsageError, match=r"unknown hollow model 'glm'; allowed: glm-mixed, .*qwen36$"):
        write_hollow_model(tmp_path / "model", "glm")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("stat", [SimpleNamespace(st_blocks=PROBE_BYTES // 512), SimpleNamespace()])
def test_without_holes_nothing_is_written(tmp_path, monkeypatch, stat):
    monkeypatch.setattr(hollow, "os", SimpleNamespace(fstat=lambda _: stat))
    with pytest.raises(Unavailable, match="would take the space of its weights"):
        write_hollow_model(tmp_path, "glm-small")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match="file: the model cannot be written: File exists"):
        write_hollow_model(tmp_path / "file", "glm-small")
