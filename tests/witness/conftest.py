from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest
from watching import PROGRAMS, launch

from pytest_colibri.witness.dispatch import DispatchTracer
from pytest_colibri.witness.evidence import WatchedRun
from pytest_colibri.witness.memory import MemoryGuard
from pytest_colibri.witness.run import watch


@dataclass(frozen=True)
class Shader:
    path: Path
    sha256: str


@pytest.fixture(scope="session")
def shaders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Shader, Shader]:
    if shutil.which("glslc") is None:
        pytest.skip("glslc is not installed: it compiles the shaders of the test programs")
    folder = tmp_path_factory.mktemp("shaders")

    def compiled(width: int) -> Shader:
        source, binary = folder / f"empty{width}.comp", folder / f"empty{width}.spv"
        source.write_text(f"#version 450\nlayout(local_size_x = {width}) in;\nvoid main() {{}}\n")
        subprocess.run(["glslc", source, "-o", binary], check=True, timeout=60)
        return Shader(binary, sha256(binary.read_bytes()).hexdigest())

    return compiled(32), compiled(64)


@pytest.fixture(scope="session")
def tracer() -> DispatchTracer:
    tracer = DispatchTracer()
    reach = tracer.reach()
    if not reach.able:
        pytest.skip(reach.statement)
    return tracer


@pytest.fixture(scope="session")
def run_scenario(tracer: DispatchTracer, shaders: tuple[Shader, Shader]) -> Callable[..., WatchedRun]:
    pytest.importorskip("vulkan", exc_type=(ImportError, OSError))

    def run(
        name: str, timeout_s: float = 60.0, wrapper: tuple[str, ...] = (), **environment: str
    ) -> WatchedRun:
        paths = [str(shader.path) for shader in shaders]
        program = (sys.executable, str(PROGRAMS / "scenarios.py"), name, *paths)
        scenario = launch(*wrapper, *program, timeout_s=timeout_s, **environment)
        return watch(scenario, tracer=tracer, guard=MemoryGuard())

    return run
