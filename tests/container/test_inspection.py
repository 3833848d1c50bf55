"""Each check of a container has a fault that it finds, and finds none in a whole container."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from pytest_colibri.container.inspection import INDEX_FILE, Inspection, inspect_container
from pytest_colibri.container.model import read_model
from pytest_colibri.container.safetensors import quote
from pytest_colibri.container.scan import read_geometry
from pytest_colibri.container.tiny import write_tiny_model
from pytest_colibri.container.usage import USAGE_FILE, write_usage
from pytest_colibri.errors import UsageError
from pytest_colibri.findings import Finding

Header = dict[str, dict[str, object]]
Breaks = Callable[[Path], None]

SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


def write_shard(path: Path, header: Mapping[str, object] | bytes, payload: bytes) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + payload)


def read_shard(path: Path) -> tuple[Header, bytes]:
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    header.pop("__metadata__", None)
    return header, raw[end:]


def write_part(path: Path, header: Header, payload: bytes, names: Iterable[str]) -> None:
    """Write a shard of these tensors of another, one behind the other."""
    part: Header = {}
    taken = b""
    for name in names:
        begin, end = header[name]["data_offsets"]  # type: ignore[misc]
        part[name] = {**header[name], "data_offsets": [len(taken), len(taken) + end - begin]}
        taken += payload[begin:end]
    write_shard(path, part, taken)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A whole model of three shards with an index."""
    folder = write_tiny_model(tmp_path / "model", "f32")
    header, payload = read_shard(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(header)
    weight_map = {}
    cuts = (0, 30, 65, len(names))  # the second ends among the experts of a layer
    for number, shard in enumerate(SHARDS):
        part = names[cuts[number] : cuts[number + 1]]
        write_part(folder / shard, header, payload, part)
        weight_map.update(dict.fromkeys(part, shard))
    write_index(folder, weight_map, len(payload))
    write_usage(folder / USAGE_FILE, {(3, 1): 5, (3, 0): 2})
    return folder


def write_index(folder: Path, weight_map: object, total: object) -> None:
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")


def by_check(inspection: Inspection) -> dict[str, Finding]:
    findings = {finding.check.removeprefix("container."): finding for finding in inspection.findings}
    assert len(findings) == len(inspection.findings), "one finding each"
    return findings


def states(inspection: Inspection, state: str) -> set[str]:
    return {check for check, finding in by_check(inspection).items() if finding.state == state}


def test_a_whole_container_passes_every_check(model: Path) -> None:
    inspection = inspect_container(model)
    assert states(inspection, "ok") == set(by_check(inspection))
    assert inspection.model == read_model(model)
    experts = by_check(inspection)["experts"].figures
    assert experts["experts"].bytes == read_geometry(model).expert_bytes


def test_a_model_in_one_file_needs_no_index(tmp_path: Path) -> None:
    inspection = inspect_container(write_tiny_model(tmp_path / "model", "int4-row"))
    assert states(inspection, "ok") == set(by_check(inspection))


def change_entry(**changes: object) -> Breaks:
    """Change the entry of the tensor at the end of the second shard."""

    def breaks(folder: Path) -> None:
        header, payload = read_shard(folder / SHARDS[1])
        name = max(header, key=lambda name: header[name]["data_offsets"])  # type: ignore[arg-type,return-value]
        begin, end = header[name]["data_offsets"]  # type: ignore[misc]
        values = {key: value(begin, end) if callable(value) else value for key, value in changes.items()}
        write_shard(folder / SHARDS[1], {**header, name: {**header[name], **values}}, payload)

    return breaks


def cut(folder: Path) -> None:
    os.truncate(folder / SHARDS[1], 100)


def add_bytes(folder: Path) -> None:
    with (folder / SHARDS[1]).open("ab") as file:
        file.write(b"more")


def name_twice_in_one(folder: Path) -> None:
    entry = '{"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}'
    write_shard(folder / SHARDS[1], f'{{"a": {entry}, "a": {entry}}}'.encode(), b"1")


def name_twice_in_two(folder: Path) -> None:
    header, payload = read_shard(folder / SHARDS[0])
    write_part(folder / SHARDS[1], header, payload, [next(iter(header))])


def not_utf_8(folder: Path) -> None:
    (folder / "config.json").write_bytes(b'{"model_type": "\xff"}')


def no_json(folder: Path) -> None:
    (folder / "config.json").write_text("null", encoding="utf-8")


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def change_config(**changes: object) -> Breaks:
    def breaks(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}))

    return breaks


def lose_shard(folder: Path) -> None:
    (folder / SHARDS[1]).unlink()


def lose_part(folder: Path) -> None:
    """Lose one tensor of one expert."""
    lost = "model.layers.4.mlp.experts.5.up_proj.weight"
    for shard in SHARDS:
        header, payload = read_shard(folder / shard)
        write_part(folder / shard, header, payload, [name for name in header if name != lost])


def damage_history(folder: Path) -> None:
    (folder / USAGE_FILE).write_text("much\n", encoding="utf-8")


def lose_all(folder: Path) -> None:
    for shard in SHARDS:
        (folder / shard).unlink()


def surplus_shard(folder: Path) -> None:
    entry = {"surplus": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    write_shard(folder / "model-00004-of-00003.safetensors", entry, b"1")


def pipe_for_a_shard(folder: Path) -> None:
    (folder / SHARDS[1]).unlink()
    os.mkfifo(folder / SHARDS[1])


IN_HEADER = {"names", "dtypes", "sizes", "bounds", "overlaps", "holes"}


@pytest.mark.parametrize(
    ("breaks", "failed", "said"),
    [
        pytest.param(cut, {"headers"}, "the header claims", id="cut"),
        pytest.param(pipe_for_a_shard, {"headers"}, "not a regular file", id="pipe"),
        pytest.param(change_entry(dtype="F5"), {"dtypes"}, "dtype 'F5' is not one of", id="dtype"),
        pytest.param(change_entry(shape=[3]), {"sizes"}, "does not take the", id="size"),
        pytest.param(
            change_entry(data_offsets=lambda begin, end: [begin + 4, end + 4]),
            {"bounds"},
            "do not lie within",
            id="bounds",
        ),
        pytest.param(
            change_entry(data_offsets=lambda begin, end: [begin - 4, end - 4]),
            {"overlaps"},
            "overlaps tensor",
            id="overlap",
        ),
        pytest.param(add_bytes, {"holes"}, "4 bytes after tensor", id="hole"),
        pytest.param(name_twice_in_one, {"names"}, "'a' appears twice", id="twice-in-one-shard"),
        pytest.param(
            name_twice_in_two, {"names", "index"}, f"in {SHARDS[0]} and {SHARDS[1]}", id="twice-in-two-shards"
        ),
        pytest.param(not_utf_8, {"config"}, "not valid JSON", id="config-utf-8"),
        pytest.param(no_json, {"config"}, "must be a JSON object", id="config-null"),
        pytest.param(no_config, {"config"}, "cannot be read", id="config-missing"),
        pytest.param(change_config(model_type="gpt2"), {"family"}, "'gpt2' in config.json", id="family"),
        pytest.param(change_config(model_type=None), {"family"}, "None in config.json", id="no-family"),
        pytest.param(change_config(n_routed_experts=9), {"experts"}, "lacks 1 experts", id="expert-missing"),
        pytest.param(change_config(n_routed_experts=7), {"experts"}, "allows 0 to 6", id="expert-surplus"),
        pytest.param(
            lose_shard, {"shards", "index", "experts"}, "model: 1 of 3 missing: 2", id="shard-missing"
        ),
        pytest.param(lose_part, {"index", "experts"}, "lacks 'up_proj.weight'", id="part-of-an-expert"),
        pytest.param(surplus_shard, {"shards", "index"}, "model: 4 beyond the 3", id="shard-surplus"),
        pytest.param(damage_history, {"usage"}, ".coli_usage:1: 'much' is not", id="history-damaged"),
        pytest.param(lose_all, {"shards", "index"}, "there is no *.safetensors file", id="no-shard"),
    ],
)
def test_each_fault_fails_its_own_check(model: Path, breaks: Breaks, failed: set[str], said: str) -> None:
    breaks(model)
    inspection = inspect_container(model)
    found = by_check(inspection)
    assert states(inspection, "failed") == failed
    assert any(said in found[check].sentence for check in failed), [found[check] for check in failed]
    assert (inspection.model is None) == (reader_of_plans_says(model) is not None)


def reader_of_plans_says(folder: Path) -> str | None:
    try:
        read_model(folder)
    except UsageError as error:
        return str(error)
    return None


def test_what_a_refused_shard_hides_is_unknown(model: Path) -> None:
    cut(model)
    inspection = inspect_container(model)
    assert states(inspection, "unknown") == {*IN_HEADER, "index", "experts"}
    assert SHARDS[1] in by_check(inspection)["dtypes"].sentence


def test_a_model_needs_no_history(model: Path) -> None:
    (model / USAGE_FILE).unlink(missing_ok=True)
    finding = by_check(inspect_container(model))["usage"]
    assert (finding.state, finding.sentence) == ("ok", "there is no .coli_usage, so no expert is ranked")


@pytest.mark.parametrize(
    ("names", "state", "said"),
    [
        (["a.safetensors"], "ok", "one shard"),
        (["glm-5.safetensors"], "ok", "one shard"),
        (["a.safetensors", "b.safetensors"], "unknown", "tell no sequence"),
        (["m-1-of-2.safetensors", "m-2-of-2.safetensors"], "ok", "2 of 2"),
        (["m-1-of-2.safetensors", "m-2-of-2.safetensors", "mtp.safetensors"], "warning", "mtp.safetensors"),
        (["m-1-of-2.safetensors", "m-01-of-2.safetensors"], "failed", "more than one file is number 1"),
        (["m-1-of-2.safetensors", "m-2-of-3.safetensors"], "failed", "2 sequences"),
        (["m-1-of-1.safetensors", "mtp-1-of-1.safetensors"], "ok", "2 of 2"),
        (["m-1-of-1.safetensors", "mtp-1-of-2.safetensors"], "failed", "mtp: 1 of 2 missing: 2"),
        (["m-0-of-1.safetensors", "m-1-of-1.safetensors"], "failed", "0 beyond the 1"),
        (["m-1-of-999999999.safetensors"], "failed", "999999998 of 999999999 missing: 2, 3, 4 and 999999995"),
        (["out-00000.safetensors", "out-00001.safetensors"], "ok", "do not tell how many"),
        (["out-00001.safetensors", "out-00002.safetensors"], "ok", "do not tell how many"),
        (["out-00000.safetensors", "out-00002.safetensors"], "failed", "1 missing before 2: 1"),
        (["out-00003.safetensors"], "failed", "2 missing before 3: 1, 2"),
    ],
)
def test_numbers_in_the_names_of_shards(tmp_path: Path, names: list[str], state: str, said: str) -> None:
    for name in names:
        write_shard(tmp_path / name, {}, b"")
    finding = by_check(inspect_container(tmp_path))["shards"]
    assert finding.state == state
    assert said in finding.sentence


def move(weight_map: dict[str, object]) -> None:
    name = next(iter(weight_map))
    weight_map[name] = next(shard for shard in SHARDS if shard != weight_map[name])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda weights: weights.update(ghost=SHARDS[0]), "1 tensors are in no shard: 'ghost'"),
        (lambda weights: weights.popitem(), "1 tensors are in a shard and not in it"),
        (move, "1 tensors are in another shard than it says"),
        (lambda weights: weights.update(ghost="../other"), "1 files that are not there: '../other'"),
        (lambda weights: weights.update(ghost=None), "must map names of tensors to names of files"),
    ],
)
def test_the_index_is_held_against_the_shards(
    model: Path, change: Callable[[dict[str, object]], None], said: str
) -> None:
    weight_map = json.loads((model / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
    change(weight_map)
    write_index(model, weight_map, 0)
    inspection = inspect_container(model)
    assert states(inspection, "failed") == {"index"}
    assert said in by_check(inspection)["index"].sentence
    assert inspection.model is not None


@pytest.mark.parametrize("total", [12, -1, 10**4000], ids=["less", "negative", "endless"])
def test_a_wrong_total_in_the_index_is_a_warning(model: Path, total: int) -> None:
    weight_map = json.loads((model / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
    write_index(model, weight_map, total)
    finding = by_check(inspect_container(model))["index"]
    assert finding.state == "warning"
    assert f"gives {quote(total)} bytes" in finding.sentence
    assert all(str(figure) for figure in finding.figures.values())


@pytest.mark.parametrize("content", [b"", b"[]", b'{"weight_map": []}', b'{"a": 1, "a": 1}', b"\xff"])
def test_an_index_of_no_use_fails(model: Path, content: bytes) -> None:
    (model / INDEX_FILE).write_bytes(content)
    assert states(inspect_container(model), "failed") == {"index"}


def test_shards_without_an_index_are_not_called_right(model: Path) -> None:
    (model / INDEX_FILE).unlink()
    assert states(inspect_container(model), "unknown") == {"index"}


def test_an_index_that_leads_nowhere_is_not_overlooked(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", "int4-row")
    (model / INDEX_FILE).symlink_to("nowhere")
    assert states(inspect_container(model), "failed") == {"index"}


def test_a_folder_that_cannot_be_listed_is_not_called_empty(tmp_path: Path) -> None:
    found = by_check(inspect_container(tmp_path / "nothing"))
    assert found["shards"].state == "failed"
    assert "cannot be listed: No such file" in found["shards"].sentence
    assert found["index"].state == found["headers"].state == "unknown"
