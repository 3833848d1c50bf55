"""What every engine under test looks like to this project: a program, a request file, lines of JSON.

``PROGRAM... REQUEST.json`` runs one case under the environment that the plan exports. The request is the
JSON form of :class:`EngineRequest`; the program writes events as JSON lines to standard output
(``docs/engine-protocol.md``) and anything for people to standard error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pytest_colibri.planner.plan import Plan
from pytest_colibri.profiles.model import Backend

# The parts of an expert's computation that shaders can tell apart; their file names begin with these.
PIECES = ("gate_up", "down")


@dataclass(frozen=True)
class EngineRequest:
    """One run: tokens in, tokens out, and where the experts may live.

    ``prompt`` holds token ids. With ``score`` the ids after the prompt are given (teacher forcing): the
    engine answers with its best token at every position of ``prompt + score`` and generates nothing.
    ``device`` names the accelerator as ``uuid:HEX``, ``pci:ADDRESS``, ``name:NAME`` or ``index:N``, None
    without one. ``slots_per_layer`` is the RAM cache, ``vram_bytes`` bounds the GPU tier. ``usage`` is
    the usage history that ranks the hot experts (None: the one in the model folder, if any). ``route_trace``
    is a file that receives the routing.
    """

    model: Path
    prompt: tuple[int, ...]
    new_tokens: int
    score: tuple[int, ...] = ()
    device: str | None = None
    slots_per_layer: int = 1
    vram_bytes: int = 0
    usage: Path | None = None
    route_trace: Path | None = None


@dataclass(frozen=True)
class Launch:
    """A process to start: no shell, its own process group, ended after ``timeout_s`` seconds."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    directory: Path
    timeout_s: float = 120.0


@dataclass(frozen=True)
class ShaderFile:
    """A shader that a subject ships: its file name, what it computes, and the SHA-256 of its SPIR-V."""

    name: str
    piece: str
    sha256: str


class EngineSubject(Protocol):
    """An engine that can be put under test."""

    @property
    def name(self) -> str:
        """How reports call it: ``reference``, or the program."""

    @property
    def backends(self) -> tuple[Backend, ...] | None:
        """The backends that it can compute on, None when that is not known before it is run."""

    @property
    def shaders(self) -> tuple[ShaderFile, ...]:
        """The shaders it ships, by which a witness names what was dispatched; empty when unknown."""

    def launch(self, request: EngineRequest, plan: Plan, directory: Path) -> Launch:
        """Describe the process that answers ``request`` under ``plan``; its files go to ``directory``."""
