"""The request of one run, read from JSON and checked before anything else happens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_colibri.errors import UsageError

MAX_REQUEST_BYTES = 16 * 2**20
MAX_BYTES = 2**50
MAX_SLOTS = 2**20
DEVICE_SELECTORS = ("uuid", "pci", "name", "index")


@dataclass(frozen=True)
class Request:
    """One run as docs/engine-protocol.md describes it; every field is checked for its type and sign."""

    model: Path
    prompt: tuple[int, ...]
    new_tokens: int
    score: tuple[int, ...]
    device: str | None
    slots_per_layer: int
    vram_bytes: int
    usage: Path | None
    route_trace: Path | None

    @property
    def context(self) -> int:
        """How many positions the run needs: those fed to the model, the last new token excluded."""
        return len(self.prompt) + (len(self.score) if self.score else self.new_tokens - 1)

    @property
    def widest_batch(self) -> int:
        """Rows of the widest batch."""
        return len(self.prompt) + len(self.score)


def read_request(path: Path) -> Request:
    """Read and check a request file. Raises UsageError with one sentence that names the fault."""
    try:
        if path.stat().st_size > MAX_REQUEST_BYTES:
            raise UsageError(f"request {path.name} is longer than {MAX_REQUEST_BYTES} bytes")
        document = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except OSError as error:
        raise UsageError(f"cannot read request {path.name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"request {path.name} is not valid JSON: {error}") from None
    return parse_request(document)


def parse_request(document: object) -> Request:
    """Check a parsed request: known keys only, right types, sane sizes. Raises UsageError."""
    if not isinstance(document, dict):
        raise UsageError("a request is a JSON object")
    allowed = tuple(Request.__dataclass_fields__)
    unknown = sorted(set(document) - set(allowed))
    if unknown:
        raise UsageError(f"unknown request key {unknown[0]!r}; allowed: {', '.join(allowed)}")
    missing = [key for key in ("model", "prompt", "new_tokens") if key not in document]
    if missing:
        raise UsageError(f"the request lacks {missing[0]!r}")
    request = Request(
        model=_path(document, "model"),
        prompt=_token_ids(document, "prompt"),
        new_tokens=_count(document, "new_tokens", MAX_REQUEST_BYTES),
        score=_token_ids(document, "score"),
        device=_device(document),
        slots_per_layer=_count(document, "slots_per_layer", MAX_SLOTS, default=1),
        vram_bytes=_count(document, "vram_bytes", MAX_BYTES, default=0),
        usage=_optional_path(document, "usage"),
        route_trace=_optional_path(document, "route_trace"),
    )
    if not request.prompt:
        raise UsageError("'prompt' must hold at least one token id")
    if not request.score and not request.new_tokens:
        raise UsageError("nothing is asked for: 'new_tokens' is 0 and 'score' is empty")
    return request


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return document


def _count(document: Mapping[str, object], key: str, largest: int, default: int = 0) -> int:
    value = document.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= largest:
        raise UsageError(f"{key!r} must be an integer from 0 to {largest}")
    return value


def _token_ids(document: Mapping[str, object], key: str) -> tuple[int, ...]:
    value = document.get(key, [])
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise UsageError(f"{key!r} must be a list of token ids (integers from 0)")
    return tuple(value)


def _path(document: Mapping[str, object], key: str) -> Path:
    value = document[key]
    if not isinstance(value, str) or not value or "\0" in value:
        raise UsageError(f"{key!r} must be a path")
    return Path(value)


def _optional_path(document: Mapping[str, object], key: str) -> Path | None:
    return None if document.get(key) is None else _path(document, key)


def _device(document: Mapping[str, object]) -> str | None:
    value = document.get("device")
    if value is None:
        return None
    kind, _, identity = value.partition(":") if isinstance(value, str) else ("", "", "")
    if kind not in DEVICE_SELECTORS or not identity:
        raise UsageError("'device' must be uuid:HEX, pci:ADDRESS, name:NAME, index:N or null")
    return str(value)
