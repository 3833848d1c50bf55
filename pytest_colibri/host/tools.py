"""Running the tools that describe a machine: bounded in time and output, killed as a group, no shell."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from pytest_colibri.errors import Unavailable, UsageError
from pytest_colibri.units import MIB

MAX_OUTPUT_BYTES = 4 * MIB


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
) -> Output:
    """Run a program and return what it wrote, at most 4 MiB of each stream.

    A program that outlives ``timeout_s`` is killed with all that it started. Raises Unavailable when the
    program is not installed or cannot be started.
    """
    program = shutil.which(arguments[0])
    if program is None:
        raise Unavailable(f"{arguments[0]} is not installed")
    with tempfile.TemporaryFile() as text, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                [program, *arguments[1:]],
                stdin=subprocess.DEVNULL,
                stdout=text,
                stderr=errors,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
        except OSError as error:
            raise Unavailable(f"{program} cannot be started: {error.strerror}") from error
        status = _wait(process, timeout_s)
        return Output(status, _head(text), _head(errors))


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
    finally:
        if process.returncode is None:
            _kill_group(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    if os.name == "posix":
        with suppress(PermissionError):  # macOS refuses when only the ended leader is left
            os.killpg(process.pid, signal.SIGKILL)
    else:
        import psutil

        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
    process.wait()


def _head(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read(MAX_OUTPUT_BYTES).decode("utf-8", "replace")
