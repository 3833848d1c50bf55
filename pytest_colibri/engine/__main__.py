"""``python -m pytest_colibri.engine REQUEST.json``: see docs/engine-protocol.md."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pytest_colibri.engine.events import Events
from pytest_colibri.engine.request import read_request
from pytest_colibri.errors import ColibriError, UsageError

EXIT_FAILED = 1
EXIT_REFUSED = 2


def main(arguments: list[str]) -> int:
    """Run one request; return the exit status. Only an unforeseen failure is 1."""
    events = Events()
    try:
        if len(arguments) != 1:
            raise UsageError("usage: python -m pytest_colibri.engine REQUEST.json")
        request = read_request(Path(arguments[0]))
        # Numpy and the container are loaded only for a request that is worth it.
        from pytest_colibri.engine.session import run

        run(request, os.environ, events)
    except ColibriError as refusal:
        events.emit("refused", reason=str(refusal))
        events.note(f"refused: {refusal}")
        return EXIT_REFUSED
    except Exception as error:
        events.note(f"failed: {type(error).__name__}: {error}")
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
