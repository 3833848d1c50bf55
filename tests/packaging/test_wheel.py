"""The wheel carries all that a reporter needs: plugin, suite, profiles, shaders, agent; and one name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def compiled_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which(os.environ.get("CC", "cc")) is None:
        pytest.skip("no C compiler")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        pytest.skip("no headers of Python to compile with")
    return build_wheel(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module")
def pure_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if os.name != "posix":
        pytest.skip("the compiler of this system cannot be taken away by CC")
    return build_wheel(tmp_path_factory.mktemp("pure"), CC="false")


@pytest.fixture(scope="module", params=["compiled_wheel", "pure_wheel"])
def wheel(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


def build_wheel(folder: Path, **environment: str) -> Path:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    process = subprocess.run(
        build, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return next(folder.glob("*.whl"))


def compiled_files(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if name.endswith((".so", ".pyd"))]


def test_a_compiler_makes_one_wheel_for_every_cpython(compiled_wheel: Path, tmp_path: Path) -> None:
    assert "-cp311-abi3-" in compiled_wheel.name
    [compiled] = compiled_files(compiled_wheel)
    with zipfile.ZipFile(compiled_wheel) as archive:
        archive.extractall(tmp_path)
    process = subprocess.run(
        [sys.executable, "-c", "import pytest_colibri.container._headers as m; print(m.__file__)"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(process.stdout.strip()) == tmp_path / compiled


def test_without_a_compiler_the_wheel_is_pure(pure_wheel: Path) -> None:
    assert pure_wheel.name.endswith("-py3-none-any.whl")
    assert compiled_files(pure_wheel) == []


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
