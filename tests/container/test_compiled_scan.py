"""The compiled header scan and the Python code agree, or the compiled one says that it does not know."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path

import pytest
from compiled_scan import DoNotKnow, compiled_outcome, needs_compiled_scan, python_outcome
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_colibri.container import scan
from pytest_colibri.container.families import FAMILIES, NamePattern
from pytest_colibri.container.geometry import Geometry
from pytest_colibri.container.safetensors import DTYPE_BITS, MAX_RANK
from pytest_colibri.container.tiny import write_tiny_model

pytestmark = needs_compiled_scan

CONFIG = '{"model_type": "glm_moe_dsa"}'
DTYPES = tuple((name.encode(), bits) for name, bits in DTYPE_BITS.items())


def add_up(*shards: tuple[bytes, int], patterns: tuple[str, ...] = ()):
    return scan.add_up_compiled(iter(shards), tuple(map(str.encode, patterns)), DTYPES)


def header(name: str, dtype: str, shape: list[int], end: int) -> bytes:
    return json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}).encode()


def write_folder(folder: Path, shards: list[tuple[bytes, int]], config: str = CONFIG) -> Path:
    (folder / "config.json").write_text(config)
    for index, (raw, payload_bytes) in enumerate(shards):
        with (folder / f"{index}.safetensors").open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            file.truncate(8 + len(raw) + payload_bytes)
    return folder


# Random containers: a tensor is (name, dtype, shape), a shard is a list of them in a style of writing.

NUMBERS = st.sampled_from(["0", "1", "2", "10", "00", "007", "999999", "1000000", "-1", "", "x"])
EXPERTS = st.builds(
    "model.layers.{}.mlp.experts.{}{}".format, NUMBERS, NUMBERS, st.sampled_from([".w", ".", ""])
)
INDEXERS = st.builds("model.layers.{}.self_attn.indexer.{}".format, NUMBERS, st.sampled_from(["w", ""]))
PLAIN = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E, exclude_characters='"\\'), max_size=20)
PLAIN_NAMES = st.one_of(EXPERTS, INDEXERS, PLAIN).filter(lambda name: name != "__metadata__")
NAMES = PLAIN_NAMES | st.text(max_size=8) | st.just("__metadata__")
WHOLE_DTYPES = st.sampled_from(sorted(set(DTYPE_BITS) - {"F4"}))
SHAPES = st.lists(st.integers(0, 5), max_size=4) | st.just([1] * MAX_RANK)
METADATA = st.dictionaries(PLAIN, PLAIN, max_size=3)


def tensors(names: st.SearchStrategy[str]) -> st.SearchStrategy[list[tuple[str, str, list[int]]]]:
    return st.lists(st.tuples(names, WHOLE_DTYPES, SHAPES), max_size=6)


@st.composite
def shards(draw: st.DrawFn, names: st.SearchStrategy[str]) -> tuple[bytes, int]:
    """A header whose tensors lie one behind the other, written in a random style, and its payload's bytes."""
    entries, position = [], 0
    for name, dtype, shape in draw(tensors(names)):
        end = position + product(shape) * DTYPE_BITS[dtype] // 8
        members = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        entries.append((name, dict(draw(st.permutations(sorted(members.items()))))))
        position = end
    if draw(st.booleans()):
        entries.insert(draw(st.integers(0, len(entries))), ("__metadata__", draw(METADATA)))
    colon, comma, space = draw(st.sampled_from([(":", ",", ""), (" :\n", ",\t", " \r\n")]))
    written = (
        f"{json.dumps(name)}{colon}{json.dumps(entry, separators=(comma, colon))}" for name, entry in entries
    )
    return f"{space}{{{space}{comma.join(written)}{space}}}{space}".encode(), position


def product(shape: list[int]) -> int:
    return list(itertools.accumulate([1, *shape], int.__mul__))[-1]


def outcomes(*written: tuple[bytes, int]):
    with tempfile.TemporaryDirectory() as name:
        folder = write_folder(Path(name), list(written))
        try:
            compiled = compiled_outcome(folder)
        except DoNotKnow:
            compiled = DoNotKnow
        return compiled, python_outcome(folder)


@settings(max_examples=200)
@given(shards(PLAIN_NAMES))
def test_a_plain_header_is_known_unless_it_is_refused(shard):
    compiled, python = outcomes(shard)
    assert compiled == python or (compiled is DoNotKnow and "appears twice" in python)


@settings(max_examples=200)
@given(st.lists(shards(NAMES), min_size=1, max_size=3))
def test_what_is_known_of_several_shards_is_right(written):
    compiled, python = outcomes(*written)
    assert compiled in (DoNotKnow, python)


DAMAGE = [
    b"-",
    b"0",
    b"9" * 19,
    b"18446744073709551616",
    b"1e1",
    b".5",
    b"null",
    b"[",
    b"]",
    b"{",
    b"}",
    b'"',
    b"\\",
]
DAMAGE += [
    b"\\u0041",
    b",",
    b":",
    b"\x00",
    b"\x1f",
    b"\x7f",
    b"\x80",
    b"\xff",
    b"\xc3\xa9",
    b'"a":{}',
    b"NaN",
    b"F32",
]


@settings(max_examples=400)
@given(shard=shards(NAMES), data=st.data(), extra_bytes=st.sampled_from([0, 0, 0, -1, 1, 8]))
def test_what_is_known_of_a_damaged_header_is_right(shard, data, extra_bytes):
    raw, payload_bytes = shard
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw)))
        removed = data.draw(st.integers(0, 5))
        raw = raw[:at] + data.draw(st.sampled_from(DAMAGE) | st.binary(max_size=4)) + raw[at + removed :]
    compiled, python = outcomes((raw, max(0, payload_bytes + extra_bytes)))
    assert compiled in (DoNotKnow, python)


@given(st.binary(max_size=200), st.integers(0, 2**62))
def test_any_bytes_can_be_asked_about(raw, payload_bytes):
    assert add_up((raw, payload_bytes)) in (None, (0, [(-1, 0, 0, 0)]))


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_takes_its_bytes(dtype):
    nbytes = 2 * 6 * DTYPE_BITS[dtype] // 8
    assert add_up((header("a", dtype, [2, 6], nbytes), nbytes)) == (1, [(-1, 0, 0, nbytes)])
    assert add_up((header("a", dtype, [2, 6], nbytes + 1), nbytes + 1)) is None


@pytest.mark.parametrize(
    ("shape", "nbytes", "known"),
    [
        ([2**60], 2**60, True),
        ([2**60 + 1], 2**60 + 1, False),
        ([9 * 10**17, 0], 0, True),
        ([0, 2**63], 0, False),
        ([2**32, 2**32], 0, False),
        ([2**62, 4, 2**62], 16, False),
        ([1] * MAX_RANK, 1, True),
        ([1] * (MAX_RANK + 1), 1, False),
        ([], 1, True),
    ],
)
def test_large_counts_neither_wrap_nor_pass_the_limits(shape, nbytes, known):
    assert (add_up((header("a", "U8", shape, nbytes), nbytes)) is not None) == known


def test_half_a_byte_is_not_known():
    assert add_up((header("a", "F4", [3], 1), 1)) is None
    assert add_up((header("a", "F4", [3], 2), 2)) is None


def test_payloads_do_not_add_up_beyond_all_sums():
    shard = header("a", "U8", [2**60], 2**60), 2**60
    assert add_up(shard, (header("b", "U8", [1], 1), 1)) is None


EXPERT_PATTERNS = sorted({pattern.text for family in FAMILIES for pattern in family.expert_names})
PATTERNS = [*EXPERT_PATTERNS, scan.INDEXER.text]


@st.composite
def near_names(draw: st.DrawFn) -> str:
    """A name that a pattern of a family may match, or only nearly."""
    text = draw(st.sampled_from(PATTERNS))
    for piece in ("{layer}", "{expert}"):
        text = text.replace(piece, draw(NUMBERS | st.integers(0, 10**7).map(str)))
    text = text.replace("*", draw(st.sampled_from(["", "w", "0", "down_proj.weight", "*", "{layer}"])))
    at = draw(st.integers(0, len(text)))
    return text[:at] + draw(st.sampled_from(["", "", "", ".", "0", "x"])) + text[at:]


@settings(max_examples=400)
@given(near_names(), st.sampled_from(PATTERNS))
def test_patterns_match_as_their_regular_expressions_do(name, pattern):
    numbers = NamePattern(pattern).numbers(name)
    expected = (-1, 0, 0) if numbers is None else (0, *numbers, 0)[:3]
    _, groups = add_up((header(name, "U8", [7], 7), 7), patterns=(pattern,))
    assert groups[-1] == (*expected, 7)


def test_many_names_stay_apart_and_the_last_repetition_is_seen():
    names = [f"tensor {index}" for index in range(30_000)]
    many = [(header(name, "U8", [1], 1), 1) for name in names]
    assert add_up(*many) == (30_000, [(-1, 0, 0, 30_000)])
    assert add_up(*many, many[0]) is None


def test_more_tensors_than_allowed_are_left_to_python(tmp_path, monkeypatch):
    folder = write_folder(tmp_path, [(header(name, "U8", [1], 1), 1) for name in "abc"])
    assert isinstance(compiled_outcome(folder), Geometry)
    monkeypatch.setattr(scan, "MAX_TENSORS", 2)
    with pytest.raises(DoNotKnow):
        compiled_outcome(folder)


def test_tensors_in_another_order_than_their_bytes_are_left_to_python(tmp_path):
    entries = {
        "b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]},
        "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
    }
    folder = write_folder(tmp_path, [(json.dumps(entries).encode(), 8)])
    with pytest.raises(DoNotKnow):
        compiled_outcome(folder)
    assert python_outcome(folder).total_bytes == 8


def test_a_tiny_model_is_known(tmp_path):
    folder = write_tiny_model(tmp_path, "int4-grouped")
    assert compiled_outcome(folder) == python_outcome(folder)


@pytest.mark.parametrize("model", ["glm_tiny", "glm_tiny_fmt4"])
def test_a_model_of_another_writer_is_known(shared_data, model):
    assert compiled_outcome(shared_data / model) == python_outcome(shared_data / model)


def test_an_error_of_the_reader_comes_through():
    def shards_of_a_broken_disk():
        yield header("a", "U8", [1], 1), 1
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        scan.add_up_compiled(shards_of_a_broken_disk(), (), DTYPES)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        (1, (), DTYPES),
        ([], [], DTYPES),
        ([], (), []),
        ([], ("text",), DTYPES),
        ([], (b"a",) * 9, DTYPES),
        ([], (), ((b"U8", 8),) * 33),
        ([], (), (b"U8",)),
        ([b"{}"], (), DTYPES),
        ([("{}", 0)], (), DTYPES),
        ([(b"{}",)], (), DTYPES),
        ([(b"{}", 2**64)], (), DTYPES),
        ([(b"{}", "0")], (), DTYPES),
    ],
)
def test_wrong_arguments_are_errors(arguments):
    with pytest.raises((TypeError, ValueError, OverflowError)):
        scan.add_up_compiled(*arguments)
