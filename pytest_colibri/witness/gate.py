"""Waits until the witnesses are in place, then becomes the program it was told to run.

Run as a script. It writes an empty line once it can be traced, and reads one line of JSON from standard
input, ``{"argv": [...], "env": {...}}``. The process keeps its identifier, so that its exit status stays
visible to the one who started it.
"""

import json
import os
import signal
import sys


def main() -> None:
    """Wait for the order, put back what Python changed for itself, and execute the program."""
    print(flush=True)
    line = sys.stdin.buffer.readline()
    if not line:
        return
    order = json.loads(line)
    for changed in ("SIGPIPE", "SIGXFSZ"):
        if hasattr(signal, changed):
            signal.signal(getattr(signal, changed), signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        os.execve(order["argv"][0], order["argv"], order["env"])  # noqa: S606
    except OSError as error:
        print(f"{order['argv'][0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
