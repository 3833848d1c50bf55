"""Check a profile's document and say what is wrong with it, where, and what is allowed instead."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pytest_colibri.profiles.model import Backend, Tier
from pytest_colibri.profiles.yaml import Document, Location, Mark, describe_error

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError

VIOLATION_LIMIT = 20

Violation = tuple[Mark, str, str]

_TYPES = {
    "string": "text",
    "array": "a list",
    "object": "a mapping of keys to values",
    "boolean": "true or false",
}
_MOST_OR_LEAST = {
    "minItems": "at least {} in the list",
    "maxItems": "at most {} in the list",
    "minLength": "at least {} character",
    "maxLength": "at most {} characters",
    "minProperties": "at least {} key",
    "maxProperties": "at most {} keys",
}


def violations(document: Document, unreadable: Iterable[Violation] = ()) -> list[str]:
    """Return what breaks the schema and the rules beyond it, in order of place.

    ``unreadable`` is what hinders reading the recorded files. Where the schema refuses a value, no more is
    said of it.
    Each is one line, ``FILE:LINE:COLUMN: what; allowed: what is``; a last line counts those past the bound.
    """
    found = _schema_violations(document, load_schema())
    # The profile itself may lack several keys.
    refused = {mark for mark, _, _ in found} - {document.value_marks[()]}
    others = [*_rule_violations(document), *unreadable]
    return _lines(document, sorted([*found, *(other for other in others if other[0] not in refused)]))


def schema_violations(document: Document, schema: Mapping[str, Any]) -> list[str]:
    """Return what breaks a JSON Schema whose descriptions say what is allowed, as :func:`violations` does."""
    return _lines(document, _schema_violations(document, schema))


def _lines(document: Document, found: Sequence[Violation]) -> list[str]:
    lines = [describe_error(document.path, *violation) for violation in found[:VIOLATION_LIMIT]]
    if len(found) > VIOLATION_LIMIT:
        lines.append(f"{document.path}: and {len(found) - VIOLATION_LIMIT} more")
    return lines


def nearest(word: str, known: Iterable[str]) -> str:
    """Write the known words that look like ``word`` as ``; nearest: a, b``, or nothing."""
    close = difflib.get_close_matches(word[:64], list(known), n=3, cutoff=0.5)
    return f"; nearest: {', '.join(close)}" if close else ""


def load_schema() -> dict[str, Any]:
    """Read the JSON Schema (2020-12) of profiles."""
    schema: dict[str, Any] = json.loads(Path(__file__).with_name("schema.json").read_text(encoding="utf-8"))
    return schema


def _schema_violations(document: Document, schema: Mapping[str, Any]) -> list[Violation]:
    from jsonschema import Draft202012Validator

    errors = Draft202012Validator(schema).iter_errors(document.value)
    # A set, since jsonschema reports each missing key by itself without naming it but in prose.
    return sorted({violation for error in errors for violation in _explain(document, error)})


def _explain(document: Document, error: ValidationError) -> Iterator[Violation]:
    """Turn one error of jsonschema into sentences; the schema says what is allowed."""
    location: Location = tuple(error.absolute_path)
    instance: Any = error.instance
    schema: Any = error.schema
    if "propertyNames" in error.absolute_schema_path:
        mark = document.key_marks[(*location, instance)]
        yield mark, f"{_show(instance)} cannot be a key here", _phrase(schema)
    elif error.validator == "additionalProperties":
        yield from _unknown_keys(document, location, instance, list(schema["properties"]))
    elif error.validator == "required":
        mark, allowed = document.value_marks[location], _keys(schema["properties"], schema["required"])
        for key in schema["required"]:
            if key not in instance:
                yield mark, f"{_subject(location)} lacks the key {key}", allowed
    elif error.validator == "uniqueItems":
        yield from _repeated_items(document, location, instance)
    else:
        yield document.value_marks[location], *_wrong_value(location, error, schema)


def _wrong_value(location: Location, error: ValidationError, schema: Mapping[str, Any]) -> tuple[str, str]:
    subject, given = _subject(location), _show(error.instance)
    if error.validator == "type":
        wanted = _TYPES[schema["type"]]
        is_scalar = isinstance(error.instance, (bool, int, float))
        hint = f" in quotes: {_quoted(error.instance)}" if wanted == "text" and is_scalar else ""
        return f"{subject} must be {wanted}, not {given}", wanted + hint
    if error.validator == "enum":
        values = schema["enum"]
        return f"{subject} cannot be {given}{nearest(str(error.instance), values)}", ", ".join(values)
    if error.validator == "pattern":
        return f"{subject} cannot be {given}", _phrase(schema)
    bound = _MOST_OR_LEAST[str(error.validator)].format(error.validator_value)
    return f"{subject} holds too {'little' if 'min' in str(error.validator) else 'much'}", bound


def _unknown_keys(
    document: Document, location: Location, mapping: Mapping[str, object], known: list[str]
) -> Iterator[Violation]:
    for key in mapping:
        if key not in known:
            what = f"unknown key {_show(key)} in {_subject(location)}{nearest(key, known)}"
            yield document.key_marks[(*location, key)], what, ", ".join(known)


def _repeated_items(document: Document, location: Location, items: list[object]) -> Iterator[Violation]:
    for index, item in enumerate(items):
        if item in items[:index]:
            what = f"{_show(item)} stands twice in {_subject(location)}"
            yield document.value_marks[(*location, index)], what, "each value once"


def _rule_violations(document: Document) -> Iterator[Violation]:
    """Check what a schema cannot say with a place: the profile as a whole must make sense.

    The document may break the schema; a rule says nothing about what it cannot read.
    """
    profile = _mapping(document.value)
    name, backend, tiers = profile.get("name"), profile.get("backend"), profile.get("tiers")
    if isinstance(name, str) and name != document.path.stem:
        what = f"name is {_show(name)} in a file called {document.path.name}"
        yield document.value_marks[("name",)], what, _show(document.path.stem)
    if backend == "cpu":
        yield from _cpu_rules(document, _list(tiers))
    elif backend in get_args(Backend):
        yield from _gpu_rules(document, profile)
    yield from _recording_rules(document, [*map(_mapping, _list(profile.get("recordings")))])


def _cpu_rules(document: Document, tiers: list[Any]) -> Iterator[Violation]:
    for location in (("match", "device"), ("pool",)):
        if location in document.key_marks:
            what = f"{location[-1]} in a profile of the backend cpu"
            yield document.key_marks[location], what, "none, a cpu profile has no device"
    if "vram" in tiers:
        mark = document.value_marks[("tiers", tiers.index("vram"))]
        yield mark, "tier vram in a profile of the backend cpu", "ram, disk"


def _gpu_rules(document: Document, profile: Mapping[str, Any]) -> Iterator[Violation]:
    backend, match, tiers = profile["backend"], profile.get("match"), profile.get("tiers")
    if isinstance(match, dict) and "device" not in match:
        mark, what = document.value_marks[("match",)], f"match lacks the key device, which {backend} needs"
        yield mark, what, "device with vendor, type, name or driver"
    if "pool" not in profile:
        mark, what = document.value_marks[()], f"the profile lacks the key pool, which {backend} needs"
        yield mark, what, "unified, discrete, either"
    if isinstance(tiers, list) and "vram" not in tiers and all(tier in get_args(Tier) for tier in tiers):
        mark, what = document.value_marks[("tiers",)], f"tiers lack vram, which {backend} needs"
        yield mark, what, "vram with ram and disk"


def _recording_rules(document: Document, recordings: list[Mapping[str, Any]]) -> Iterator[Violation]:
    tools = [recording.get("tool") for recording in recordings]
    for index, (recording, tool) in enumerate(zip(recordings, tools, strict=True)):
        if not isinstance(tool, str):
            continue
        mark = document.value_marks[("recordings", index)]
        if tool in tools[:index]:
            tool_mark = document.value_marks[("recordings", index, "tool")]
            yield tool_mark, f"a second recording of {tool}", "one recording of each tool"
        if ("text" in recording) == ("file" in recording):
            yield mark, f"the recording of {tool} needs its output", "exactly one of text and file"
        if recording.get("provenance") == "reported" and "link" not in recording:
            yield mark, f"the reported recording of {tool} lacks the key link", "the address of the report"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _subject(location: Location) -> str:
    """Name a place in the document as a person would: ``match.device.type[1]``."""
    if not location:
        return "the profile"
    return "".join(f"[{step + 1}]" if isinstance(step, int) else f".{step:.64}" for step in location)[1:]


def _keys(properties: Mapping[str, object], required: list[str]) -> str:
    optional = [key for key in properties if key not in required]
    return ", ".join(required) + (f", and if wanted {', '.join(optional)}" if optional else "")


def _phrase(schema: Mapping[str, Any]) -> str:
    description: str = schema["description"].rstrip(".")
    return description[0].lower() + description[1:]


def _quoted(value: object) -> str:
    return json.dumps(json.dumps(value))


def _show(value: object) -> str:
    """Write a value of the file in at most a few words."""
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "a mapping"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 64 else f"{text[:60]}..."
