"""Any program that speaks the engine protocol, the embedded reference engine among them."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from pytest_colibri.errors import UsageError
from pytest_colibri.planner.environment import engine_variables
from pytest_colibri.planner.plan import Plan
from pytest_colibri.profiles.model import Backend
from pytest_colibri.subjects.command import parse_command
from pytest_colibri.subjects.protocol import PIECES, EngineRequest, Launch, ShaderFile


@dataclass(frozen=True)
class ProgramSubject:
    """An engine started as ``command REQUEST.json`` (see ``docs/engine-protocol.md``)."""

    name: str
    command: tuple[str, ...]
    backends: tuple[Backend, ...] | None = None
    shaders: tuple[ShaderFile, ...] = ()
    environment: tuple[tuple[str, str], ...] = field(default=())

    def launch(self, request: EngineRequest, plan: Plan, directory: Path) -> Launch:
        """Write the request to ``directory`` and describe the process that answers it.

        Of the caller's environment the engine gets what does not speak to engines; the rest is the plan's,
        which has the user's own values in it. :class:`OSError` when writing fails.
        """
        path = directory / "request.json"
        path.write_text(json.dumps(_request_to_json(request), indent=1), encoding="utf-8")
        bystanders = os.environ.keys() - engine_variables(os.environ).keys()
        inherited = {name: os.environ[name] for name in bystanders}
        environment = {**inherited, **dict(self.environment), **plan.environment}
        return Launch((*self.command, str(path)), environment, directory)


def reference_engine() -> ProgramSubject:
    """Return the embedded engine as a subject; it is judged by the same code as any other."""
    package = Path(__file__).parents[1]
    return ProgramSubject(
        name="reference",
        command=(sys.executable, "-m", "pytest_colibri.engine"),
        backends=("cpu", "vulkan"),
        shaders=shaders_in(package / "engine" / "shaders"),
        environment=(("PYTHONPATH", _prepend(package.parent, os.environ.get("PYTHONPATH"))),),
    )


def program_engine(command_line: str, shader_folder: Path | None) -> ProgramSubject:
    """Return the program of ``--colibri-engine`` as a subject; :class:`UsageError` when it is not there.

    With ``shader_folder`` a witness can tell the pieces of the computation apart.
    """
    name, command = parse_command("--colibri-engine", command_line, "docs/engine-protocol.md")
    shaders = shaders_in(shader_folder) if shader_folder is not None else ()
    if shader_folder is not None and {shader.piece for shader in shaders}.isdisjoint(PIECES):
        raise UsageError(
            f"--colibri-shaders={shader_folder}: no shader of a known piece; give a folder with files named "
            f"{' or '.join(f'{piece}*.spv' for piece in PIECES)}"
        )
    return ProgramSubject(name=name, command=command, shaders=shaders)


def shaders_in(folder: Path) -> tuple[ShaderFile, ...]:
    """List the SPIR-V files of a folder; the piece is the part of the name that :data:`PIECES` begin."""
    return tuple(
        ShaderFile(path.name, _piece(path.name), sha256(path.read_bytes()).hexdigest())
        for path in sorted(folder.glob("*.spv"))
    )


def _piece(name: str) -> str:
    return next((piece for piece in PIECES if name.startswith(piece)), "other")


def _prepend(folder: Path, paths: str | None) -> str:
    return os.pathsep.join([str(folder), *([paths] if paths else [])])


def _request_to_json(request: EngineRequest) -> dict[str, object]:
    return {
        "model": str(request.model),
        "prompt": list(request.prompt),
        "new_tokens": request.new_tokens,
        "score": list(request.score),
        "device": request.device,
        "slots_per_layer": request.slots_per_layer,
        "vram_bytes": request.vram_bytes,
        "usage": None if request.usage is None else str(request.usage),
        "route_trace": None if request.route_trace is None else str(request.route_trace),
    }
