"""Routing traces: which experts a model chose, as ``<call> <row> <layer> <expert>:<gate> ...`` lines.

The rows of one contiguous (call, layer) group are one batch; calls count the groups from 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader, BufferedWriter
from pathlib import Path
from types import TracebackType

from pytest_colibri.errors import UsageError

MAX_LINE_BYTES = 2**20
MAX_BATCH_ROWS = 2**20

Row = tuple[tuple[int, float], ...]

_NUMBER = rb"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_CHOICE = re.compile(rb"(\d{1,9}):(" + _NUMBER + rb")")
_COUNT = re.compile(rb"\d{1,18}")


@dataclass(frozen=True)
class RouteBatch:
    """One call of one layer: for each row its (expert, gate) choices, in the order of the trace."""

    call: int
    layer: int
    rows: tuple[Row, ...]


class RouteTraceWriter:
    """Writes a trace batch by batch, numbering the calls; a context manager."""

    def __init__(self, path: Path) -> None:
        self._file: BufferedWriter = path.open("wb")
        self._call = 0

    def write(self, layer: int, rows: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Append one batch: for each row its (expert, gate) choices. Nine digits keep an f32 gate exact."""
        if not rows or not all(rows):
            raise ValueError("a batch has at least one row, and a row at least one choice")
        for row, choices in enumerate(rows):
            text = " ".join(f"{expert}:{gate:.9g}" for expert, gate in choices)
            self._file.write(f"{self._call} {row} {layer} {text}\n".encode("ascii"))
        self._call += 1

    def close(self) -> None:
        """Write what is buffered and close the file."""
        self._file.close()

    def __enter__(self) -> RouteTraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_route_trace(path: Path) -> Iterator[RouteBatch]:
    """Yield the batches of a trace, holding one at a time; blank lines and CRLF are accepted.

    Raises UsageError, with file and line, at the first line that is not as the format says: a truncated last
    line, a row out of sequence, a call that does not follow the one before, a trace without any event.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    with file:
        yield from _batches(path, file)


def _batches(path: Path, file: BufferedReader) -> Iterator[RouteBatch]:
    call, layer = -1, -1
    rows: list[Row] = []
    for where, line in _lines(path, file):
        next_call, row, next_layer, choices = _parse(where, line)
        if rows and (next_call, next_layer) != (call, layer):
            yield RouteBatch(call, layer, tuple(rows))
            rows = []
        if not rows and next_call != call + 1:
            raise UsageError(f"{where}: {_call_fault(call, next_call)}")
        if row != len(rows):
            raise UsageError(f"{where}: row {row} where row {len(rows)} of the batch is due")
        if row >= MAX_BATCH_ROWS:
            raise UsageError(f"{where}: a batch of more than {MAX_BATCH_ROWS} rows")
        call, layer = next_call, next_layer
        rows.append(choices)
    if not rows:
        raise UsageError(f"{path}: the trace holds no event")
    yield RouteBatch(call, layer, tuple(rows))


def _lines(path: Path, file: BufferedReader) -> Iterator[tuple[str, bytes]]:
    """Yield (file:line, text) of the lines that are not blank."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        where = f"{path}:{number}"
        if len(line) > MAX_LINE_BYTES:
            raise UsageError(f"{where}: a line of more than {MAX_LINE_BYTES} bytes")
        if not line.endswith(b"\n"):
            raise UsageError(f"{where}: the last line has no end: the trace was truncated")
        if line.strip():
            yield where, line


def _parse(where: str, line: bytes) -> tuple[int, int, int, Row]:
    fields = line.split()
    if len(fields) < 4:
        raise UsageError(
            f"{where}: {len(fields)} fields; at least call, row, layer and one expert:gate are due"
        )
    call, row, layer = (
        _count(where, name, field) for name, field in zip(("call", "row", "layer"), fields, strict=False)
    )
    return call, row, layer, tuple(_choice(where, field) for field in fields[3:])


def _count(where: str, name: str, field: bytes) -> int:
    if not _COUNT.fullmatch(field):
        raise UsageError(f"{where}: {name} {_shown(field)} is not a count")
    return int(field)


def _choice(where: str, field: bytes) -> tuple[int, float]:
    match = _CHOICE.fullmatch(field)
    gate = float(match[2]) if match else math.nan
    if match is None or not math.isfinite(gate):
        raise UsageError(f"{where}: {_shown(field)} is not expert:gate, digits and a finite number")
    return int(match[1]), gate


def _shown(field: bytes) -> str:
    return repr(field[:40].decode("latin-1"))


def _call_fault(call: int, next_call: int) -> str:
    if call < 0:
        return f"the first call is {next_call}; a trace starts at call 0"
    if next_call < call:
        return f"call {next_call} after call {call}: a batch must not come back"
    return f"call {next_call} after call {call}: traces whose calls do not advance by one are not supported"
