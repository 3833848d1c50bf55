from __future__ import annotations

import json
import os
import re
import tempfile
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from compiled_scan import DoNotKnow, compiled_outcome, needs_compiled_scan, python_outcome
from hypothesis import given
from hypothesis import strategies as st

from pytest_colibri.container.safetensors import (
    MAX_HEADER_BYTES,
    MAX_JSON_VALUES,
    ContainerError,
    open_container,
    read_config,
    scan_shard,
)


def entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_tensors_lie_where_the_header_says(write_shard):
    header = {
        "__metadata__": {"format": "pt"},
        "b": entry("F32", [2, 2], [4, 20]),
        "a": entry(),
        "empty": entry("I64", [0, 7], [4, 4]),
        "nibbles": entry("F4", [3, 2], [20, 23]),
    }
    path = write_shard(header, bytes(range(23)))
    tensors = scan_shard(path)
    assert list(tensors) == ["b", "a", "empty", "nibbles"]
    assert tensors["b"].shape == (2, 2)
    assert tensors["b"].nbytes == 16
    assert path.read_bytes()[tensors["b"].offset :][:16] == bytes(range(4, 20))
    assert tensors["nibbles"].nbytes == 3


hostile_headers = pytest.mark.parametrize(
    ("header", "payload", "said"),
    [
        pytest.param({"a": entry(offsets=(0, 5))}, b"12345", "does not take the 5 bytes", id="size"),
        pytest.param({"a": entry()}, b"123", "do not lie within 0 and 3", id="outside"),
        pytest.param({"a": entry(offsets=(4, 0))}, b"1234", "do not lie within", id="backwards"),
        pytest.param({"a": entry(offsets=(-4, 0))}, b"1234", "not two counts", id="negative-offset"),
        pytest.param({"a": entry(offsets=(0, 2, 4))}, b"1234", "not two counts", id="three-offsets"),
        pytest.param({"a": entry(offsets=(0, True))}, b"1", "not two counts", id="boolean-offset"),
        pytest.param({"a": entry(offsets=(0, 2**63))}, b"1234", "not two counts", id="huge-offset"),
        pytest.param({"a": entry(shape=(-2, -2))}, b"1234", "list of at most 16 counts", id="negative-shape"),
        pytest.param({"a": entry(shape=(2**63,))}, b"1234", "list of at most 16 counts", id="2^63"),
        pytest.param({"a": entry(shape=(2**62, 4, 2**62))}, b"1234", "does not take", id="overflow"),
        pytest.param({"a": entry(shape=(2**32, 2**32))}, b"1234", "does not take", id="overflow-to-zero"),
        pytest.param({"a": entry(shape=(4.0,))}, b"1234", "list of at most 16 counts", id="float-shape"),
        pytest.param({"a": entry(shape=[1] * 17)}, b"1234", "list of at most 16 counts", id="rank"),
        pytest.param({"a": entry(shape="4")}, b"1234", "list of at most 16 counts", id="text-shape"),
        pytest.param({"a": entry("F5")}, b"1234", "dtype 'F5' is not one of F4, BOOL", id="dtype"),
        pytest.param({"a": entry(["U8"])}, b"1234", "dtype ['U8'] is not one of", id="dtype-list"),
        pytest.param({"a": 3}, b"", "exactly the keys data_offsets, dtype, shape", id="no-object"),
        pytest.param({"a": {"dtype": "U8"}}, b"", "exactly the keys", id="missing-keys"),
        pytest.param({"a": entry(), "b": entry(offsets=(2, 6))}, b"123456", "overlaps tensor", id="overlap"),
        pytest.param({"a": entry(), "b": entry()}, b"1234", "overlaps tensor", id="same-place"),
        pytest.param({"a": entry(), "b": entry(offsets=(6, 10))}, b"1234567890", "2 unused bytes", id="hole"),
        pytest.param({"a": entry(offsets=(2, 6))}, b"123456", "bytes after the header", id="first-hole"),
        pytest.param({"a": entry()}, b"123456", "2 bytes after tensor 'a' belong to no tensor", id="tail"),
        pytest.param({"__metadata__": {"a": 1}}, b"", "must map strings to strings", id="metadata"),
        pytest.param(b"[1]", b"", "must be a JSON object, not list", id="list"),
        pytest.param(b'{"a": NaN}', b"", "NaN is not a JSON number", id="nan"),
        pytest.param(b'{"a": -Infinity}', b"", "-Infinity is not a JSON number", id="infinity"),
        pytest.param(b'{"a": 1, "b": 2, "a": 1}', b"", "'a' appears twice", id="duplicate"),
        pytest.param(b'{"a": {"b": "U8", "b": "I8"}}', b"", "'b' appears twice", id="inner-duplicate"),
        pytest.param(b'{"a": ' + b"[" * 100_000, b"", "nested too deeply", id="deep"),
        pytest.param(b'{"a": ' + b"9" * 10_000 + b"}", b"", "not valid JSON", id="huge-number"),
        pytest.param(b'{"\xff": 1}', b"", "not valid JSON", id="no-utf-8"),
        pytest.param(b'{"a"', b"", "line 1 column 5", id="cut-json"),
        pytest.param(b"", b"", "not valid JSON", id="empty-header"),
    ],
)  # fmt: skip


@hostile_headers
def test_a_hostile_header_is_refused_with_its_reason(write_shard, header, payload, said):
    path = write_shard(header, payload)
    with pytest.raises(ContainerError) as refusal:
        scan_shard(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert said in str(refusal.value)


@needs_compiled_scan
@hostile_headers
def test_the_compiled_scan_leaves_a_hostile_header_to_the_reader_that_explains(
    tmp_path, write_shard, header, payload, said
):
    write_shard(header, payload)
    (tmp_path / "config.json").write_text('{"model_type": "glm"}')
    with pytest.raises(DoNotKnow):
        compiled_outcome(tmp_path)
    assert said in python_outcome(tmp_path)


@pytest.mark.parametrize("raw", [b"", b"\x02\x00", (10).to_bytes(8, "little") + b"{}"])
def test_a_truncated_file_is_refused(tmp_path, raw):
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(ContainerError, match=r"too short|at most 2 are allowed"):
        scan_shard(path)


@pytest.mark.parametrize("claimed", [2**64 - 1, 2**63, MAX_HEADER_BYTES + 1])
def test_a_huge_header_is_refused_before_it_is_read(tmp_path, claimed):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(claimed.to_bytes(8, "little"))
        file.truncate(2 * MAX_HEADER_BYTES)
    tracemalloc.start()
    try:
        with pytest.raises(ContainerError, match=f"claims {claimed} bytes; at most {MAX_HEADER_BYTES}"):
            scan_shard(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20


def test_a_header_of_too_many_values_is_refused_before_it_is_parsed(write_shard):
    path = write_shard(b'{"a":[' + b"0," * MAX_JSON_VALUES + b"0]}")
    file_bytes = path.stat().st_size
    tracemalloc.start()
    try:
        with pytest.raises(ContainerError, match=f"more than {MAX_JSON_VALUES} values"):
            scan_shard(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < file_bytes + 2**20


VALID_HEADER = json.dumps({"a": entry(), "b": entry("F32", [1, 2], [4, 12])}).encode()


@given(
    cut=st.integers(0, len(VALID_HEADER)),
    removed=st.integers(0, 6),
    inserted=st.binary(max_size=6)
    | st.sampled_from([b"-", b"99", b"null", b"[", b"}", b'"a"', b",", b"NaN"]),
)
def test_a_damaged_header_never_fails_in_another_way(cut, removed, inserted):
    raw = VALID_HEADER[:cut] + inserted + VALID_HEADER[cut + removed :]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(12))
        try:
            tensors = scan_shard(path)
        except ContainerError:
            return
    assert sum(tensor.nbytes for tensor in tensors.values()) == 12


def test_names_from_a_file_cannot_write_to_the_terminal(write_shard):
    with pytest.raises(ContainerError) as refusal:
        scan_shard(write_shard({"\x1b[2J" + "x" * 1000: 1}))
    assert "\x1b" not in str(refusal.value)
    assert len(str(refusal.value)) < 400


def test_a_folder_is_no_shard(tmp_path):
    with pytest.raises(ContainerError, match="not a regular file"):
        scan_shard(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_refused_instead_of_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ContainerError, match="not a regular file"):
        scan_shard(tmp_path / "model.safetensors")


@pytest.fixture
def two_shards(tmp_path, write_shard):
    (tmp_path / "config.json").write_text('{"model_type": "test"}')
    write_shard(
        {"a": entry("F32", [2, 2], [0, 16])}, np.arange(4, dtype="<f4").tobytes(), name="1.safetensors"
    )
    write_shard({"b": entry("U8", [256], [0, 256])}, bytes(range(256)), name="2.safetensors")
    return tmp_path


def test_a_container_reads_tensors_of_all_its_shards(two_shards):
    with open_container(two_shards) as container:
        assert container.config == {"model_type": "test"}
        assert container.shards == 2
        assert container.read_f32("a").tolist() == [[0, 1], [2, 3]]
        assert container.read("b").tolist() == list(range(256))
        assert container.read_at(container.info("b"), 250, 6) == bytes(range(250, 256))
        with pytest.raises(ContainerError, match="there is no tensor 'c'"):
            container.read("c")
        with pytest.raises(ContainerError, match="is U8; only F32"):
            container.read_f32("b")


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (0, 257), (256, 1), (0, -1)])
def test_a_read_cannot_leave_its_tensor(two_shards, start, length):
    with (
        open_container(two_shards) as container,
        pytest.raises(ContainerError, match="do not lie within 256"),
    ):
        container.read_at(container.info("b"), start, length)


def test_reads_at_positions_agree_with_and_without_preadv(two_shards, monkeypatch):
    with open_container(two_shards) as container:
        direct = container.read_at(container.info("b"), 3, 100)
    monkeypatch.delattr(os, "preadv", raising=False)
    with open_container(two_shards) as container:
        assert container.read_at(container.info("b"), 3, 100) == direct


@pytest.mark.parametrize("positioned", [True, False])
def test_threads_can_read_at_once(two_shards, monkeypatch, positioned):
    if not positioned:
        monkeypatch.delattr(os, "preadv", raising=False)
    wrong: list[int] = []

    def read(start: int) -> None:
        for _ in range(200):
            if container.read_at(container.info("b"), start, 16) != bytes(range(start, start + 16)):
                wrong.append(start)

    with open_container(two_shards) as container:
        threads = [threading.Thread(target=read, args=(start,)) for start in (0, 64, 128, 192)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_a_file_that_was_cut_after_the_scan_is_an_error(two_shards):
    with open_container(two_shards) as container:
        os.truncate(two_shards / "2.safetensors", 200)
        with pytest.raises(ContainerError, match="it was cut meanwhile"):
            container.read("b")


def test_shards_may_be_links(two_shards, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    try:
        for file in two_shards.iterdir():
            (cache / file.name).symlink_to(file)
    except OSError as error:
        pytest.skip(f"links cannot be made here: {error}")
    with open_container(cache) as container:
        assert container.read("b").size == 256


def test_a_tensor_in_two_shards_is_refused(two_shards, write_shard):
    write_shard({"a": entry()}, b"1234", name="3.safetensors")
    with pytest.raises(ContainerError, match=r"3\.safetensors: tensor 'a': lies in 1\.safetensors too"):
        open_container(two_shards)


def test_a_folder_without_shards_or_configuration_is_refused(tmp_path):
    with pytest.raises(ContainerError, match=r"config\.json: cannot be read: No such file"):
        open_container(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ContainerError, match=r"there is no \*\.safetensors file"):
        open_container(tmp_path)


@pytest.mark.parametrize("linked", ["model.safetensors", "config.json"])
def test_a_link_to_itself_is_refused(tmp_path, linked):
    (tmp_path / "config.json").write_text('{"model_type": "glm"}')
    (tmp_path / linked).unlink(missing_ok=True)
    try:
        (tmp_path / linked).symlink_to(tmp_path / linked)
    except OSError as error:
        pytest.skip(f"links cannot be made here: {error}")
    with pytest.raises(ContainerError, match=rf"{re.escape(linked)}: cannot be read: "):
        open_container(tmp_path)


def test_a_folder_that_links_to_itself_is_refused(tmp_path):
    try:
        (tmp_path / "model").symlink_to(tmp_path / "model")
    except OSError as error:
        pytest.skip(f"links cannot be made here: {error}")
    with pytest.raises(ContainerError, match=r"config\.json: cannot be read: "):
        open_container(tmp_path / "model")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b'"glm"',
        b'{"a": 1, "a": 2}',
        b'{"a": NaN}',
        b"{" * 5000,
        b'{"\xff": 1}',
        b"\xff\xfe{}",
    ],
)
def test_a_bad_configuration_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ContainerError, match=r"config\.json: the configuration"):
        read_config(tmp_path)


def test_a_huge_configuration_is_refused(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(ContainerError, match="more than 16777216 bytes"):
        read_config(tmp_path)
