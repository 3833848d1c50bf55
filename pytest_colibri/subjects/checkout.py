"""The planner of a colibri checkout, run in a child process by a driver of ours and never imported here."""

from __future__ import annotations

import sys
from pathlib import Path

from pytest_colibri.errors import UsageError
from pytest_colibri.subjects.planner_program import ProgramPlanner

_DRIVER = Path(__file__).with_name("checkout_driver.py")


def checkout_planner(directory: Path) -> ProgramPlanner:
    """Return the planner of the checkout in ``directory``, whatever its version; UsageError without one."""
    code = directory / "c"
    if not (code / "resource_plan.py").is_file():
        raise UsageError(
            f"--colibri={directory}: no c/resource_plan.py there; give the top folder of a colibri checkout"
        )
    return ProgramPlanner(
        name="colibri",
        # Isolated, without site packages, and without writing bytecode into the checkout.
        command=(sys.executable, "-I", "-S", "-B", str(_DRIVER), str(code.absolute())),
        follows_stage=True,
    )
