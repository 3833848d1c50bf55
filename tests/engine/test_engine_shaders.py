from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from pytest_colibri.engine.shaders import FOLDER, SHADERS, Shader
from pytest_colibri.engine.shaders.build import (
    compile_shader,
    compiler_version,
    read_manifest,
    source_sha256,
)

by_file = pytest.mark.parametrize("shader", SHADERS, ids=lambda shader: shader.file_name)
needs_glslc = pytest.mark.skipif(shutil.which("glslc") is None, reason="glslc is not installed")


def test_the_manifest_lists_every_shader_and_nothing_else() -> None:
    files = {path.name for path in FOLDER.glob("*.spv")}
    assert files == set(read_manifest().shaders) == {shader.file_name for shader in SHADERS}


@by_file
def test_the_committed_spirv_was_made_from_the_committed_source(shader: Shader) -> None:
    entry = read_manifest().shaders[shader.file_name]
    assert entry.piece == shader.piece
    assert entry.source_sha256 == source_sha256(shader), (
        "compile anew: python -m pytest_colibri.engine.shaders.build"
    )
    assert entry.spirv_sha256 == hashlib.sha256(shader.read_spirv()).hexdigest()


@needs_glslc
@by_file
def test_compiling_the_source_gives_the_committed_spirv(shader: Shader, tmp_path: Path) -> None:
    compile_shader(shader, tmp_path / "compiled.spv")
    committed, here = read_manifest().compiler, compiler_version()
    if here != committed:
        pytest.skip(f"SPIR-V differs between compilers: committed {committed}, here {here}")
    assert (tmp_path / "compiled.spv").read_bytes() == shader.read_spirv()


@pytest.mark.skipif(shutil.which("spirv-val") is None, reason="spirv-val is not installed")
@by_file
def test_the_committed_spirv_is_valid(shader: Shader) -> None:
    command = ["spirv-val", "--target-env", "vulkan1.1", str(FOLDER / shader.file_name)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


@by_file
def test_shaders_of_different_weights_differ(shader: Shader) -> None:
    hashes = [entry.spirv_sha256 for entry in read_manifest().shaders.values()]
    assert hashes.count(read_manifest().shaders[shader.file_name].spirv_sha256) == 1
