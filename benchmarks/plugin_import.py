"""What the plugin adds to a start of pytest, and to a run without a profile.

Compares, in pairs: importing pytest with and without the plugin module; ``pytest --version --version``,
which loads every plugin and stops; and a run of one trivial test. The runs without the plugin have
``-p no:colibri``. Then lists the modules that such a process has only because of the plugin.

    python benchmarks/plugin_import.py --pairs 40
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

from paired import (
    Pairs,
    compiled_modules,
    interleave,
    print_machine,
    print_pairs,
    print_target,
    run_program,
    seconds_of,
)

TARGET_MS = 30.0
WITHOUT_US = ("-p", "no:colibri")
# Runs pytest as its command does, then tells which modules the process has.
LIST_MODULES = """
import json, sys, pytest
status = pytest.main(sys.argv[1:])
print(json.dumps(sorted(sys.modules)))
sys.exit(status)
"""


def main() -> None:
    """Measure, and print the figures and the modules."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    pairs = parser.parse_args().pairs
    os.environ.pop("COLIBRI_PROFILE", None)
    print_machine()
    with compiled_modules(), tempfile.TemporaryDirectory() as folder:
        test = Path(folder) / "test_trivial.py"
        test.write_text("def test_trivial():\n    pass\n")
        run = ("-q", "-p", "no:cacheprovider", "--rootdir", folder, str(test))
        _compare(
            "importing",
            (sys.executable, "-c", "import pytest"),
            (sys.executable, "-c", "import pytest, pytest_colibri.plugin"),
            pairs,
        )
        _compare_pytest("pytest --version --version", ("--version", "--version"), pairs)
        _compare_pytest("pytest -q, one trivial test", run, pairs)
        added = sorted(_modules(run) - _modules((*run, *WITHOUT_US)))
    print(f"\nmodules of such a run that only the plugin brings: {', '.join(added)}")


def _compare_pytest(title: str, arguments: tuple[str, ...], pairs: int) -> None:
    command = (sys.executable, "-m", "pytest", *arguments)
    _compare(title, (*command, *WITHOUT_US), command, pairs)


def _compare(title: str, without: tuple[str, ...], with_plugin: tuple[str, ...], pairs: int) -> None:
    base, other = interleave(lambda: seconds_of(without), lambda: seconds_of(with_plugin), pairs)
    timings = Pairs(tuple(s * 1e3 for s in base), tuple(s * 1e3 for s in other), "ms")
    print_pairs(title, timings, "without the plugin", "with the plugin")
    print_target("median added", median(timings.differences), TARGET_MS, " ms")


def _modules(arguments: tuple[str, ...]) -> set[str]:
    """Return the names of all modules that a run of pytest has loaded at its end."""
    output = run_program((sys.executable, "-c", LIST_MODULES, *arguments))
    return set(json.loads(output.splitlines()[-1]))


if __name__ == "__main__":
    main()
