"""Read one YAML 1.2 document and remember where everything in it stands.

PyYAML reads YAML 1.1 and forgets positions: it takes ``no`` for a boolean and the last of two equal keys.
This reader builds plain values from PyYAML's events by the YAML 1.2 core schema, and refuses what a
description by hand never needs and an attack does: anchors, tags, several documents, depth and size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import yaml

from pytest_colibri.errors import UsageError
from pytest_colibri.units import MIB

FILE_LIMIT_BYTES = MIB
DEPTH_LIMIT = 16
NODE_LIMIT = 10_000
NUMBER_LIMIT_CHARACTERS = 64

Value = str | int | float | bool | None | list["Value"] | dict[str, "Value"]
Location = tuple[str | int, ...]

# Also refused: NEL, LS and PS, which end a line for PyYAML (YAML 1.1) but not in YAML 1.2.
_REFUSED_CHARACTER = re.compile(
    "[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)
_NUMBERS: tuple[tuple[re.Pattern[str], Callable[[str], int | float]], ...] = (
    (re.compile(r"[-+]?[0-9]+"), int),
    (re.compile(r"0o[0-7]+"), lambda text: int(text, 8)),
    (re.compile(r"0x[0-9a-fA-F]+"), lambda text: int(text, 16)),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), lambda text: float(text.replace(".", ""))),
)
_CONSTANTS: Mapping[str, bool | None] = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True,
    "false": False, "False": False, "FALSE": False,
}  # fmt: skip


@dataclass(frozen=True, order=True)
class Mark:
    """A place in a file; line and column count from 1, the column in characters."""

    line: int
    column: int


@dataclass(frozen=True)
class Document:
    """A document as plain values, with the place of every value and of every key.

    A location is the way from the root to a value: keys of mappings and indices of lists.
    """

    path: Path
    value: Value
    value_marks: Mapping[Location, Mark]
    key_marks: Mapping[Location, Mark]


def describe_error(path: Path, mark: Mark, what: str, allowed: str) -> str:
    """Write an error as ``FILE:LINE:COLUMN: what; allowed: what is``."""
    return f"{path}:{mark.line}:{mark.column}: {what}; allowed: {allowed}"


def read_document(path: Path) -> Document:
    """Read the file as one YAML 1.2 document.

    Raises UsageError, with file, line and column, for anything that is not plain YAML: see the module.
    """
    return parse_document(read_text(path), path)


def read_text(path: Path, limit_bytes: int = FILE_LIMIT_BYTES) -> str:
    """Read a regular UTF-8 file of at most ``limit_bytes``; UsageError says why another cannot be read."""
    try:
        if not path.is_file():
            raise UsageError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
        with path.open("rb") as file:
            content = file.read(limit_bytes + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    if len(content) > limit_bytes:
        raise UsageError(f"{path}:1:1: the file is too large; allowed: at most {limit_bytes} bytes")
    try:
        # A checkout on Windows may end its lines with CR LF; the parsers of recordings expect LF.
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        before = content[: error.start].decode("utf-8", errors="replace")
        what = f"byte 0x{content[error.start]:02x} is not UTF-8"
        raise UsageError(describe_error(path, _mark_after(before), what, "a file in UTF-8")) from error


def parse_document(text: str, path: Path) -> Document:
    """Read ``text`` as one YAML 1.2 document; ``path`` is named in errors. Raises UsageError."""
    refused = _REFUSED_CHARACTER.search(text)
    if refused:
        what = f"character U+{ord(refused.group()):04X}"
        mark = _mark_after(text[: refused.start()])
        raise UsageError(describe_error(path, mark, what, "printable text, tabs and line ends"))
    composer = _Composer(path, yaml.parse(text, Loader=yaml.SafeLoader))
    try:
        return composer.document()
    except yaml.MarkedYAMLError as error:
        place = error.problem_mark or error.context_mark
        mark = Mark(place.line + 1, place.column + 1) if place else composer.last_mark
        what = " ".join(filter(None, ("this is not YAML:", error.context, error.problem)))
        raise UsageError(describe_error(path, mark, what, "one YAML 1.2 document")) from error
    except (ValueError, OverflowError) as error:
        # PyYAML passes escapes and version numbers on to chr() and int() unchecked.
        what = f"this is not YAML after this place: {error}"
        raise UsageError(describe_error(path, composer.last_mark, what, "one YAML 1.2 document")) from error


def _brief(text: str) -> str:
    return repr(text if len(text) <= 64 else f"{text[:60]}...")


def _mark_after(text: str) -> Mark:
    lines = re.split("\r\n|\r|\n", text)
    return Mark(len(lines), len(lines[-1]) + 1)


class _Composer:
    """Builds values from events; keeps the place of the last event for errors without one."""

    def __init__(self, path: Path, events: Iterator[yaml.Event]) -> None:
        self.path = path
        self.events = events
        self.last_mark = Mark(1, 1)
        self.value_marks: dict[Location, Mark] = {}
        self.key_marks: dict[Location, Mark] = {}

    def document(self) -> Document:
        self.next_event()
        start = self.next_event()
        if not isinstance(start, yaml.DocumentStartEvent):
            self.refuse("the file is empty", "one YAML 1.2 document")
        if start.version or start.tags:
            self.refuse("a directive (%)", "a document without directives")
        value = self.value((), self.next_event())
        self.next_event()
        if not isinstance(self.next_event(), yaml.StreamEndEvent):
            self.refuse("a second document", "one document in a file")
        return Document(self.path, value, self.value_marks, self.key_marks)

    def next_event(self) -> yaml.Event:
        event = next(self.events)
        assert event.start_mark is not None
        self.last_mark = Mark(event.start_mark.line + 1, event.start_mark.column + 1)
        return event

    def refuse(self, what: str, allowed: str, mark: Mark | None = None) -> NoReturn:
        raise UsageError(describe_error(self.path, mark or self.last_mark, what, allowed))

    def value(self, location: Location, event: yaml.Event) -> Value:
        self.check_plain(event)
        if len(location) > DEPTH_LIMIT:
            self.refuse("nesting is too deep", f"at most {DEPTH_LIMIT} levels")
        if len(self.value_marks) >= NODE_LIMIT:
            self.refuse("too many values", f"at most {NODE_LIMIT} in a file")
        self.value_marks[location] = self.last_mark
        if isinstance(event, yaml.MappingStartEvent):
            return self.mapping(location)
        if isinstance(event, yaml.SequenceStartEvent):
            return self.sequence(location)
        assert isinstance(event, yaml.ScalarEvent)
        return self.scalar(event)

    def check_plain(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.AliasEvent):
            self.refuse(f"the alias {_brief(str(event.anchor))}", "values written out")
        assert isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent))
        if event.anchor is not None:
            self.refuse(f"the anchor {_brief(event.anchor)}", "values without anchors")
        if event.tag is not None:
            self.refuse(f"the tag {_brief(event.tag)}", "values without tags")

    def sequence(self, location: Location) -> list[Value]:
        values: list[Value] = []
        while not isinstance(event := self.next_event(), yaml.SequenceEndEvent):
            values.append(self.value((*location, len(values)), event))
        return values

    def mapping(self, location: Location) -> dict[str, Value]:
        values: dict[str, Value] = {}
        while not isinstance(event := self.next_event(), yaml.MappingEndEvent):
            key = self.key(event)
            mark = self.last_mark
            if key in values:
                first = self.key_marks[(*location, key)].line
                self.refuse(f"the key {_brief(key)} stands twice (first in line {first})", "each key once")
            self.key_marks[(*location, key)] = mark
            values[key] = self.value((*location, key), self.next_event())
        return values

    def key(self, event: yaml.Event) -> str:
        self.check_plain(event)
        key = self.scalar(event) if isinstance(event, yaml.ScalarEvent) else None
        if not isinstance(key, str):
            self.refuse("a key that is not text", "text as key, in quotes where it reads as something else")
        return key

    def scalar(self, event: yaml.ScalarEvent) -> Value:
        text: str = event.value
        if _REFUSED_CHARACTER.search(text):
            self.refuse("an escape for a control character or surrogate", "printable text")
        return self.plain_scalar(text) if event.implicit[0] else text

    def plain_scalar(self, text: str) -> Value:
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        for pattern, convert in _NUMBERS:
            if pattern.fullmatch(text):
                if len(text) > NUMBER_LIMIT_CHARACTERS:
                    self.refuse(
                        "a number of too many digits", f"at most {NUMBER_LIMIT_CHARACTERS} characters"
                    )
                return convert(text)
        return text
