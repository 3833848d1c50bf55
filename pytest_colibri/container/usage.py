"""The usage history ``.coli_usage``: how often each expert was used, one ``layer expert count`` per line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pytest_colibri.errors import UsageError

USAGE_FILE = ".coli_usage"
MAX_USAGE_BYTES = 64 * 2**20

_COUNTS = re.compile(rb"(\d{1,6})[ \t]+(\d{1,6})[ \t]+(\d{1,18})")
_RECORD = re.compile(rb"-\d{1,18}([ \t].*)?")


def read_usage(path: Path) -> dict[tuple[int, int], int]:
    """Return the count of each (layer, expert), in the order of the file.

    Records whose first field is negative belong to the engine and are skipped, and so are blank lines.
    Raises UsageError with file and line for anything else, and for an expert that is listed twice.
    """
    counts: dict[tuple[int, int], int] = {}
    for number, line in enumerate(_read(path).split(b"\n"), start=1):
        text = line.strip()
        if not text or _RECORD.fullmatch(text):
            continue
        match = _COUNTS.fullmatch(text)
        if match is None:
            raise UsageError(
                f"{path}:{number}: {text[:80].decode('latin-1')!r} is not 'layer expert count', three counts"
            )
        layer, expert, count = map(int, match.groups())
        if (layer, expert) in counts:
            raise UsageError(f"{path}:{number}: expert {expert} of layer {layer} is listed twice")
        counts[layer, expert] = count
    return counts


def _read(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise UsageError(f"{path}: no such usage history")
        with path.open("rb") as file:
            raw = file.read(MAX_USAGE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    if len(raw) > MAX_USAGE_BYTES:
        raise UsageError(f"{path}: a usage history of more than {MAX_USAGE_BYTES} bytes is not read")
    return raw


def write_usage(path: Path, counts: Mapping[tuple[int, int], int]) -> None:
    """Write the counts of (layer, expert) pairs in ascending order."""
    lines = (f"{layer} {expert} {count}\n" for (layer, expert), count in sorted(counts.items()))
    path.write_bytes("".join(lines).encode("ascii"))
