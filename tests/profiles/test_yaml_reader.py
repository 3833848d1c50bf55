"""The YAML reader: YAML 1.2 values, places of keys and values, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_colibri.errors import UsageError
from pytest_colibri.profiles.yaml import (
    DEPTH_LIMIT,
    FILE_LIMIT_BYTES,
    NODE_LIMIT,
    Mark,
    parse_document,
    read_document,
)

PATH = Path("some.yaml")


def refusal(text: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse_document(text, PATH)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("Yes", "Yes"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("tRUE", "tRUE"),
        ("~", None),
        ("null", None),
        ("''", ""),
        ("'true'", "true"),
        ('"16"', "16"),
        ("|\n  16", "16"),
        ("16", 16),
        ("-3", -3),
        ("+3", 3),
        ("010", 10),
        ("0o17", 15),
        ("0o18", "0o18"),
        ("0x1F", 31),
        ("0b11", "0b11"),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("2024-01-31", "2024-01-31"),
        ("1.5", 1.5),
        (".5", 0.5),
        ("1e3", 1000.0),
        ("-1.5E-1", -0.15),
        ("-.inf", -math.inf),
        ("=", "="),
        ("1.2.3", "1.2.3"),
    ],
)
def test_scalars_follow_the_core_schema_of_yaml_1_2(text: str, value: object) -> None:
    read = parse_document(text, PATH).value
    assert (read, type(read)) == (value, type(value))


def test_not_a_number_is_read() -> None:
    read = parse_document(".nan", PATH).value
    assert isinstance(read, float)
    assert math.isnan(read)


def test_every_key_and_value_has_its_place() -> None:
    document = parse_document('# first\na: 1\nlist:\n  - x\n  - {deep: "y"}\n', PATH)
    assert document.value == {"a": 1, "list": ["x", {"deep": "y"}]}
    assert document.value_marks == {
        (): Mark(2, 1),
        ("a",): Mark(2, 4),
        ("list",): Mark(4, 3),
        ("list", 0): Mark(4, 5),
        ("list", 1): Mark(5, 5),
        ("list", 1, "deep"): Mark(5, 12),
    }
    assert document.key_marks == {
        ("a",): Mark(2, 1),
        ("list",): Mark(3, 1),
        ("list", 1, "deep"): Mark(5, 6),
    }


def test_columns_count_characters_not_bytes() -> None:
    assert refusal("é: {ü: 1, ü: 2}").startswith("some.yaml:1:11: the key 'ü' stands twice (first in line 1)")


def test_a_merge_key_is_a_plain_key() -> None:
    assert parse_document("<<: {a: b}", PATH).value == {"<<": {"a": "b"}}


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("", "1:1", "the file is empty"),
        ("# only a comment\n", "2:1", "the file is empty"),
        ("a: 1\nb: 2\na: 3\n", "3:1", "the key 'a' stands twice (first in line 1)"),
        ("a: &x 1\n", "1:4", "the anchor 'x'"),
        ("a: *x\n", "1:4", "the alias 'x'"),
        ("&k a: 1\n", "1:1", "the anchor 'k'"),
        ("a: !!str 1\n", "1:4", "the tag 'tag:yaml.org,2002:str'"),
        ("a: !!python/object/apply:os.system [ls]\n", "1:4", "the tag 'tag:yaml.org,2002:python/object"),
        ("a: ! 1\n", "1:4", "the tag '!'"),
        ("!!map {a: 1}\n", "1:1", "the tag 'tag:yaml.org,2002:map'"),
        ("a: 1\n---\nb: 2\n", "2:1", "a second document"),
        ("a: !%1b[2J b\n", "1:4", "the tag '!\\x1b[2J'"),
        ("a: !" + "x" * 5000 + " b", "1:4", f"the tag '!{'x' * 59}...'"),
        ("%YAML 1.2\n---\na: 1\n", "1:1", "a directive (%)"),
        ("%TAG ! tag:example.org,2000:\n---\na: 1\n", "1:1", "a directive (%)"),
        ("1: a\n", "1:1", "a key that is not text"),
        ("true: a\n", "1:1", "a key that is not text"),
        ("? [a]\n: b\n", "1:3", "a key that is not text"),
        ("?\n: b\n", "1:2", "a key that is not text"),
        ("a: [1, 2\n", "2:1", "this is not YAML"),
        ("a: 'x\n", "2:1", "this is not YAML"),
        ("a:\n\t- b\n", "2:1", "this is not YAML"),
        ("a: b: c\n", "1:5", "this is not YAML"),
        ("a: \x07\n", "1:4", "character U+0007"),
        ("ab\nc: x\u2028y\n", "2:5", "character U+2028"),
        ("a: \ufeff\n", "1:4", "character U+FEFF"),
        ('a: "\\0"\n', "1:4", "an escape for a control character"),
        ('a: "\\e[2J"\n', "1:4", "an escape for a control character"),
        ('a: "\\ud800"\n', "1:4", "an escape for a control character or surrogate"),
        ('a: 1\nb: "\\UFFFFFFFF"\n', "2:1", "this is not YAML after this place"),
        ("a: " + "9" * 65, "1:4", "a number of too many digits"),
        ("a: 0x" + "f" * 63, "1:4", "a number of too many digits"),
    ],
)
def test_what_is_refused_is_placed(text: str, place: str, what: str) -> None:
    assert refusal(text).startswith(f"some.yaml:{place}: {what}")
    assert "; allowed: " in refusal(text)


def test_depth_is_bounded() -> None:
    levels = DEPTH_LIMIT
    assert parse_document("[" * levels + "]" * levels, PATH).value
    assert refusal("[" * 100_000).startswith(f"some.yaml:1:{levels + 2}: nesting is too deep")
    assert "nesting is too deep" in refusal("- " * 50_000)


def test_the_number_of_values_is_bounded() -> None:
    assert len(str(parse_document("[" + "1," * (NODE_LIMIT - 1) + "]", PATH).value)) > NODE_LIMIT
    assert "too many values" in refusal("[" + "1," * 200_000 + "]")


def test_files_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_bytes(b"#" * FILE_LIMIT_BYTES + b"\n")
    with pytest.raises(
        UsageError, match=rf"large.yaml:1:1: the file is too large; allowed: at most {2**20} bytes"
    ):
        read_document(path)


def test_bytes_that_are_not_utf_8_are_placed(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("a: é\nb: ".encode() + b"\xe9t\xe9\n")
    with pytest.raises(UsageError, match=r"latin.yaml:2:4: byte 0xe9 is not UTF-8; allowed: a file in UTF-8"):
        read_document(path)


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: |\r\n  x\r\n  y\r\nb: 2\r\n")
    document = read_document(path)
    assert document.value == {"a": "x\ny\n", "b": 2}
    assert document.key_marks[("b",)] == Mark(4, 1)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path, what in ((tmp_path / "none.yaml", "no such file"), (tmp_path, "not a file")):
        with pytest.raises(UsageError, match=what):
            read_document(path)


_PIECES = st.sampled_from(
    ["a", "b: ", "- ", "\n", "  ", "{", "}", "[", "]", ", ", ": ", "? ", "'", '"', "|\n", ">-\n", "&x ", "*x",
     "!!int ", "%YAML 1.1\n", "---\n", "...\n", "#", "\\", "\\x00", "\\U00110000", "\t", "\r", "0x", "1e9",
     ".inf", "true", "no", "~", "<<: ", "\x85", "é", "\ud7ff"]
)  # fmt: skip


@settings(deadline=None)
@given(st.one_of(st.lists(_PIECES, max_size=40).map("".join), st.text(max_size=60)))
def test_any_text_gives_a_document_or_a_usage_error_with_a_place(text: str) -> None:
    try:
        document = parse_document(text, PATH)
    except UsageError as error:
        name, line, column, message = str(error).split(":", 3)
        assert (name, int(line) > 0, int(column) > 0, message[0]) == ("some.yaml", True, True, " ")
    else:
        assert () in document.value_marks
