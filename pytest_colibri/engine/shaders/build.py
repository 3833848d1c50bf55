"""Compile the shaders and write the manifest: ``python -m pytest_colibri.engine.shaders.build``.

SPIR-V differs between compiler versions. The manifest therefore records the compiler, and for each shader
the hash of the sources that its committed SPIR-V was made from.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from pytest_colibri.engine.shaders import FOLDER, SHADERS, Shader
from pytest_colibri.errors import Unavailable

MANIFEST = FOLDER / "manifest.json"
COMPILER = ("glslc", "-O", "--target-env=vulkan1.1")


@dataclass(frozen=True)
class ManifestEntry:
    """What a committed SPIR-V file is and comes from; hashes are SHA-256, hexadecimal."""

    piece: str
    source_sha256: str
    spirv_sha256: str


@dataclass(frozen=True)
class Manifest:
    """The compiler that made the SPIR-V files, and each file by its name."""

    compiler: str
    shaders: dict[str, ManifestEntry]


def read_manifest() -> Manifest:
    """Return the committed manifest."""
    document = json.loads(MANIFEST.read_text(encoding="utf-8"))
    shaders = {name: ManifestEntry(**entry) for name, entry in document["shaders"].items()}
    return Manifest(document["compiler"], shaders)


def source_sha256(shader: Shader) -> str:
    """Hash all that the SPIR-V is made from: the macro and both source files."""
    digest = hashlib.sha256(_macro(shader).encode())
    for source in (f"{shader.piece}.comp", "weights.glsl"):
        digest.update((FOLDER / source).read_text(encoding="utf-8").encode())
    return digest.hexdigest()


def compile_shader(shader: Shader, target: Path) -> None:
    """Compile to ``target``. Raises Unavailable without glslc, or with what glslc says."""
    _run([*COMPILER, _macro(shader), f"{shader.piece}.comp", "-o", str(target)])


def compiler_version() -> str:
    """Return the versions that glslc prints, on one line. Raises Unavailable without glslc."""
    return "; ".join(line.strip() for line in _run(["glslc", "--version"]).splitlines() if line.strip())


def build() -> None:
    """Compile every shader into its folder and write the manifest."""
    entries = {}
    for shader in SHADERS:
        target = FOLDER / shader.file_name
        compile_shader(shader, target)
        spirv_sha256 = hashlib.sha256(target.read_bytes()).hexdigest()
        entries[shader.file_name] = ManifestEntry(shader.piece, source_sha256(shader), spirv_sha256)
    text = json.dumps(asdict(Manifest(compiler_version(), entries)), indent=2)
    MANIFEST.write_text(text + "\n", encoding="utf-8")


def _macro(shader: Shader) -> str:
    return f"-DWEIGHTS_{shader.weights.upper()}"


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        raise Unavailable("glslc is not installed; it comes with shaderc and the Vulkan SDK") from None
    if done.returncode:
        raise Unavailable(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    build()
