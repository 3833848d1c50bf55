"""Public fixes are measured on real commits; the page with the results names what the benchmark asks."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pytest_colibri.judge.issues import read_issues
from pytest_colibri.suite import registry_file

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "measured.md"

PLANNER = """
def build_plan(model, ram_gb=0, context=4096, gpu_indices=None, vram_gb=0):
    ram = {"available_bytes": None, "budget_bytes": 0}
    return {"version": 2, "tiers": {"ram": ram, "vram": {"devices": [], "budget_bytes": 0}}}

def environment_for_plan(plan, env): return {**env, **VARIABLES}
"""


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = ROOT / "benchmarks" / "public_fixes.py"
    spec = importlib.util.spec_from_file_location("public_fixes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


def rows(columns: int) -> list[list[str]]:
    """The cells of the tables with so many columns, headings left out."""
    lines = [
        line[2:-2].split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if "| " in line
    ]
    return [cells for cells in lines if len(cells) == columns and cells[0] != "fault"]


def test_the_page_has_a_row_for_each_fix_and_each_open_fault(benchmark: ModuleType) -> None:
    fixes = [
        (fix.issue, fix.parent, fix.commit, "reproduced", "not_reproduced" if fix.mends else "reproduced")
        for fix in benchmark.FIXES
    ]
    assert [(name_of(cells), *cells[3:]) for cells in rows(7)] == fixes
    assert [(name_of(cells), cells[3]) for cells in rows(4)] == [
        (issue, "reproduced") for issue in benchmark.OPEN
    ]


def test_the_page_says_what_the_registry_says() -> None:
    issues = {issue.id: issue for issue in read_issues(registry_file())}
    for cells in (*rows(7), *rows(4)):
        issue = issues[name_of(cells)]
        profiles = ", ".join(dict.fromkeys(question.profile for question in issue.planner))
        assert (cells[1], cells[2]) == (issue.title, profiles)
        if "(" in cells[0]:
            assert cells[0] == f"[{issue.id}]({issue.link})"


def name_of(cells: list[str]) -> str:
    return re.sub(r"^\[(.*)\]\(.*\)$", r"\1", cells[0])


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_a_fault_is_told_from_its_fix(benchmark: ModuleType, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    (clone / "c").mkdir(parents=True)
    git(clone, "init", "--quiet")
    bound = commit(clone, PLANNER.replace("VARIABLES", "{'OMP_PROC_BIND': 'spread'}"))
    unbound = commit(clone, PLANNER.replace("VARIABLES", "{}"))
    before = sorted(path.name for path in clone.iterdir())
    questions = [(bound, "325-affinity"), (unbound, "325-affinity")]
    found = benchmark.measure(clone, questions, tmp_path / "planners")
    assert found == dict(zip(questions, ("reproduced", "not_reproduced"), strict=True))
    assert sorted(path.name for path in clone.iterdir()) == before


def commit(clone: Path, planner: str) -> str:
    (clone / "c" / "resource_plan.py").write_text(planner, encoding="utf-8")
    git(clone, "add", "c")
    git(
        clone,
        "-c",
        "user.name=test",
        "-c",
        "user.email=test@example.org",
        "commit",
        "--quiet",
        "-m",
        "planner",
    )
    return git(clone, "rev-parse", "HEAD").strip()


def git(clone: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(clone), *arguments], check=True, capture_output=True, text=True, timeout=60
    )
    return done.stdout
