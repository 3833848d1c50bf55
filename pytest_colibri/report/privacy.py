"""What leaves the machine: no user, host name, home path, serial number or UUID unless asked for."""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

UUID = re.compile(r"\b(?:GPU-|MIG-)?[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")


def redactor(uuids: Iterable[str | None]) -> Callable[[object], object]:
    """Return a function that rewrites every string of a JSON value, and drops the values of identity keys.

    ``uuids`` are those of this machine's devices, which may stand in a text without dashes.
    """
    known = [(re.compile(re.escape(uuid), re.IGNORECASE), "(uuid)") for uuid in uuids if uuid]
    replacements = (*_private_words(), *known)

    def redact(value: object) -> object:
        if isinstance(value, dict):
            return {k: "(withheld)" if _is_identity(k, v) else redact(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [redact(item) for item in value]
        return _redact_text(value, replacements) if isinstance(value, str) else value

    return redact


def _is_identity(key: object, value: object) -> bool:
    return key in ("uuid", "serial") and value is not None


def _redact_text(text: str, replacements: tuple[tuple[re.Pattern[str], str], ...]) -> str:
    for pattern, replacement in replacements:
        text = pattern.sub(replacement, text)
    return text


def _private_words() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Pairs of a pattern and what stands for it, longest first, so that a path is replaced as a whole."""
    words = {str(Path.home()): "~", socket.gethostname(): "(host)", _user(): "(user)"}
    plain = [
        (re.compile(rf"(?<![^\W_]){re.escape(word)}(?![^\W_])"), mark)
        for word, mark in sorted(words.items(), key=lambda pair: -len(pair[0]))
        if len(word) > 2 and word not in ("root", "localhost")
    ]
    return (*plain, (UUID, "(uuid)"))


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return ""
