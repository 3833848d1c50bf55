"""The wheel carries all that a reporter needs: plugin, suite, profiles, shaders, agent; and one name."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    process = subprocess.run(build, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    return next(folder.glob("*.whl"))


def test_only_one_top_level_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pytest_colibri"}


def test_suite_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    process = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
            "--profile=software-vulkan",
            "-k",
            "f32",
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "held (exit status 0)" in process.stdout
    assert str(ROOT) not in process.stdout
