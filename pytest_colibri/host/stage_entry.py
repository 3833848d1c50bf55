"""Enters a mount namespace, binds files over others in it, and becomes a program; run as a script.

``stage_entry.py BINDINGS [PROGRAM ARGUMENT ...]`` where BINDINGS is a JSON file that maps each path to what
is bound over it. Without a program it ends with status 0 when the bindings are possible, so that this can be
tried. As a user without the right to mount, it enters a user namespace too. Linux only. The process keeps its
identifier: ``/proc/self`` may be bound over.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 0x40000

_FAILED_STATUS = 126


def enter(bindings: dict[str, str]) -> None:
    """Bind each value over its key, for this process and what it starts. OSError when that is refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(_CLONE_NEWNS) != 0:
        _check(libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS), "a mount namespace cannot be entered")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    # Without this the machine itself would see the bindings.
    _check(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "the mounts cannot be made private")
    for target, source in bindings.items():
        bound = libc.mount(os.fsencode(source), os.fsencode(target), None, _MS_BIND | _MS_REC, None)
        _check(bound, f"nothing can be bound over {target}")


def _check(status: int, what: str) -> None:
    if status != 0:
        raise OSError(f"{what}: {os.strerror(ctypes.get_errno())}")


def main(bindings: str, *program: str) -> None:
    """Enter, and become the program."""
    try:
        enter(json.loads(Path(bindings).read_text(encoding="utf-8")))
        if program:
            signal.signal(
                signal.SIGPIPE, signal.SIG_DFL
            )  # Python ignores it, and a program would inherit that
            os.execvp(program[0], program)  # noqa: S606
    except OSError as error:
        print(f"stage: {error}", file=sys.stderr)
        sys.exit(_FAILED_STATUS)


if __name__ == "__main__":
    main(*sys.argv[1:])
