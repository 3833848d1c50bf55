"""Running the tools that describe a machine: bounded in time and output, killed as a group, no shell."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from pytest_colibri.errors import Unavailable, UsageError
from pytest_colibri.units import KIB, MIB

MAX_OUTPUT_BYTES = 4 * MIB

_CHUNK_BYTES = 64 * KIB
_LAST_WORDS_S = 1.0


@dataclass(frozen=True)
class Output:
    """What a tool wrote, and how it ended: ``status`` is None after a timeout, negative after a signal."""

    status: int | None
    text: str
    errors: str


def run_tool(
    arguments: Sequence[str],
    *,
    timeout_s: float = 10,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    stdin: str = "",
) -> Output:
    """Run a program and return what it wrote, at most 4 MiB of each stream; the rest is read and dropped.

    What it started is killed when it ends, and with it when it outlives ``timeout_s``. Raises Unavailable
    when the program is not installed or cannot be started.
    """
    program = shutil.which(arguments[0])
    if program is None:
        raise Unavailable(f"{arguments[0]} is not installed")
    with tempfile.TemporaryFile() as given:
        given.write(stdin.encode())
        given.seek(0)
        try:
            process = subprocess.Popen(
                [program, *arguments[1:]],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
        except OSError as error:
            raise Unavailable(f"{program} cannot be started: {error.strerror}") from error
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        text, errors = _Head(process.stdout), _Head(process.stderr)
        status = _wait(process, timeout_s)
    finally:
        _kill_group(process)
    return Output(status, text.read(), errors.read())


class _Head:
    """Reads a pipe to its end in a thread, and keeps its first MAX_OUTPUT_BYTES."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._kept = bytearray()
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        with self._pipe:
            while chunk := self._pipe.read1(_CHUNK_BYTES):  # type: ignore[attr-defined]
                self._kept += chunk[: MAX_OUTPUT_BYTES - len(self._kept)]

    def read(self) -> str:
        """Return what was kept; a process that escaped from the group may still hold the pipe."""
        self._thread.join(_LAST_WORDS_S)
        return bytes(self._kept).decode("utf-8", "replace")


def printed_files(text: str, what: str) -> dict[PurePosixPath, dict[str, str]]:
    """Return the files that ``tail -n +1`` printed one after another, by folder and name."""
    parts = re.split(r"^==> (.{1,4096}) <==$\n?", bounded(text, what), flags=re.MULTILINE)
    folders: dict[PurePosixPath, dict[str, str]] = {}
    for name, content in zip(parts[1::2], parts[2::2], strict=True):
        path = PurePosixPath(name)
        folders.setdefault(path.parent, {})[path.name] = content
    return folders


def bounded(text: str, what: str) -> str:
    """Return the text, or raise UsageError when it is longer than any tool output that is read here."""
    if len(text) > MAX_OUTPUT_BYTES:
        raise UsageError(f"{what}: {len(text)} characters, at most {MAX_OUTPUT_BYTES} are read")
    return text


def printable(text: str, longest: int = 256) -> str:
    """Return a name as one short printable line: it comes from a driver or a file and is shown to people."""
    return "".join(char if char.isprintable() else "?" for char in text[:longest]).strip()


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    if os.name == "posix":
        # Nothing is left in the group of a tidy program; macOS refuses when only the ended leader is left.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    elif process.returncode is None:
        import psutil

        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
    process.wait()
