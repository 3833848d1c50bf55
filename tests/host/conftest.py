from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def compile_library(tmp_path) -> Callable[[str, str], Path]:
    """Return a function that builds a shared library from a C file beside the tests."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build a misbehaving driver with")

    def build(source: str, library: str) -> Path:
        path = tmp_path / library
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-o", path, Path(__file__).with_name(source)],
            check=True,
            capture_output=True,
            timeout=60,
        )
        return path

    return build
