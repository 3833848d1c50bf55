"""docs/profile-schema.md says what schema.json says, and its examples are true."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from pytest_colibri.errors import UsageError
from pytest_colibri.profiles import model
from pytest_colibri.profiles.loader import RECORDING_LIMIT_BYTES, find_profile
from pytest_colibri.profiles.validation import load_schema
from pytest_colibri.profiles.yaml import DEPTH_LIMIT, FILE_LIMIT_BYTES, NODE_LIMIT
from pytest_colibri.units import MIB

PAGE = (Path(__file__).parents[2] / "docs" / "profile-schema.md").read_text(encoding="utf-8")
ROWS = {
    row[1]: row for row in re.finditer(r"^\| `([a-z._-]+)`( \*)? \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
}
BOUNDS = ("maxLength", "maxItems", "maxProperties")


def keys(schema: dict[str, Any], above: str = "") -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """Yield each key's name with dots, whether it must be there, and its schema."""
    for key, value in schema.get("properties", {}).items():
        name = f"{above}{key}"
        yield name, key in schema.get("required", []), value
        yield from keys(value, f"{name}.")
        yield from keys(value.get("items", {}), f"{name}.")


def block(name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)
    assert found
    return found[1]


def mappings(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield schema
        for value in schema.values():
            yield from mappings(value)


@pytest.mark.parametrize(("key", "required", "schema"), list(keys(load_schema())))
def test_the_page_has_every_key_with_its_values_and_bounds(
    key: str, required: bool, schema: dict[str, Any]
) -> None:
    row = ROWS[key]
    items = schema.get("items", {})
    allowed = schema.get("enum", items.get("enum", []))
    assert bool(row[2]) is required
    assert re.findall(r"`([\w-]+)`", row[3]) == allowed
    names_and_values = (schema.get("propertyNames", {}), schema.get("additionalProperties") or {})
    for part in (schema, items, names_and_values[1]):
        for bound in BOUNDS:
            assert bound not in part or str(part[bound]) in row[3]


def test_the_page_has_no_key_that_the_schema_lacks() -> None:
    assert set(ROWS) == {name for name, _, _ in keys(load_schema())}


def test_the_page_says_what_every_recording_is_the_output_of() -> None:
    assert set(re.findall(r"^\| `([\w-]+)` \| `(?:[^|]|\\\|)+ \|$", PAGE, re.MULTILINE)) == set(
        get_args(model.Tool)
    )


def test_the_schema_is_strict_at_every_level_and_described() -> None:
    for mapping in mappings(load_schema()):
        assert mapping["additionalProperties"] is False or "propertyNames" in mapping
    assert all(schema["description"] for _, _, schema in keys(load_schema()))


def test_the_schema_is_a_valid_schema() -> None:
    from jsonschema import Draft202012Validator

    Draft202012Validator.check_schema(load_schema())


@pytest.mark.parametrize(
    ("key", "type_"),
    [
        ("backend", model.Backend),
        ("tiers", model.Tier),
        ("match.device.type", model.DeviceType),
        ("recordings.tool", model.Tool),
        ("recordings.provenance", model.Provenance),
    ],
)
def test_the_schema_allows_what_the_model_knows(key: str, type_: Any) -> None:
    schema = {name: schema for name, _, schema in keys(load_schema())}[key]
    assert set(schema.get("enum", schema.get("items", {}).get("enum"))) == set(get_args(type_))


def test_the_example_loads_and_its_fault_reads_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("my-laptop.yaml")
    path.write_text(block("example"), encoding="utf-8")
    assert find_profile("my-laptop.yaml").name == "my-laptop"
    path.write_text(block("example").replace('"16"', "16"), encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        find_profile("my-laptop.yaml")
    assert str(caught.value) == block("fault").strip()


def test_the_page_gives_the_limits_of_the_reader() -> None:
    assert f"at most {FILE_LIMIT_BYTES // MIB} MiB, {DEPTH_LIMIT} levels and {NODE_LIMIT} values" in PAGE
    assert f"at most {RECORDING_LIMIT_BYTES // MIB} MiB;" in PAGE
