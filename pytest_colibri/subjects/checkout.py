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
        origin=f"{directory}, {_revision(directory)}",
        # Isolated, without site packages, and without writing bytecode into the checkout.
        command=(sys.executable, "-I", "-S", "-B", str(_DRIVER), str(code.absolute())),
        follows_stage=True,
    )


def _revision(directory: Path) -> str:
    """Say at which commit a checkout is; git is not run, since the settings of a checkout name programs."""
    try:
        git = directory / ".git"
        if git.is_file():  # of a worktree
            git = directory / git.read_text(encoding="utf-8").strip().removeprefix("gitdir: ")
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        name = head.removeprefix("ref: ")
        common = git / "commondir"
        shared = git / common.read_text(encoding="utf-8").strip() if common.is_file() else git
        return f"commit {head if name == head else _commit_of(shared, name)}"
    except (OSError, ValueError):
        return "commit unknown"


def _commit_of(git: Path, reference: str) -> str:
    loose = git / reference
    if loose.is_file():
        return loose.read_text(encoding="utf-8").strip()
    packed = (git / "packed-refs").read_text(encoding="utf-8").splitlines()
    return next((line.split()[0] for line in packed if line.endswith(f" {reference}")), "unknown")
