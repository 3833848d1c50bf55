"""The command line of a program under test, as an option gives it."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from pytest_colibri.errors import UsageError


def parse_command(option: str, line: str, protocol_page: str) -> tuple[str, tuple[str, ...]]:
    """Return the name of a program and the command that starts it; UsageError when it is not there.

    The line is split as a shell splits words, and no shell sees it. Words that are files become absolute,
    since the program is started in another folder. ``option`` and ``protocol_page`` stand in the error.
    """
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{option}={line!r}: {error}") from None
    program = shutil.which(words[0]) if words else None
    if program is None:
        raise UsageError(
            f"{option}={line!r}: no such program; give one that speaks the protocol of {protocol_page}"
        )
    files = [word for word in words[1:] if Path(word).is_file()]
    arguments = (str(Path(word).resolve()) if word in files else word for word in words[1:])
    return Path(files[0] if files else program).name, (str(Path(program).absolute()), *arguments)
