"""The engine's side of the protocol: one JSON object per line, each line one write."""

from __future__ import annotations

import json
import os
import sys
import time


class Events:
    """Writes events to a file descriptor (standard output) and short notes to standard error."""

    def __init__(self, descriptor: int = 1) -> None:
        self._descriptor = descriptor
        self._started_ns = time.monotonic_ns()

    def emit(self, event: str, **fields: object) -> None:
        """Write one event as one line with one system call, so that lines never mix with others' output."""
        at_us = (time.monotonic_ns() - self._started_ns) // 1000
        line = json.dumps({"event": event, **fields, "at_us": at_us}, separators=(",", ":")) + "\n"
        os.write(self._descriptor, line.encode())

    def note(self, text: str) -> None:
        """Tell a person something; nothing reads it back."""
        print(f"[engine] {text}", file=sys.stderr, flush=True)
