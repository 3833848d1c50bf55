"""The compute shaders: GLSL sources, and the SPIR-V made from them by :mod:`.build`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pytest_colibri.errors import Unavailable

Piece = Literal["gate_up", "down"]
WeightKind = Literal["f32", "int8", "int4"]

FOLDER = Path(__file__).parent
PIECES: tuple[Piece, ...] = ("gate_up", "down")
WEIGHT_KINDS: tuple[WeightKind, ...] = ("f32", "int8", "int4")


@dataclass(frozen=True)
class Shader:
    """One compute shader: a piece of an expert for one kind of weights."""

    piece: Piece
    weights: WeightKind

    @property
    def file_name(self) -> str:
        """File of its SPIR-V, by which telemetry and witnesses name it."""
        return f"{self.piece}_{self.weights}.spv"

    def read_spirv(self) -> bytes:
        """Return the committed SPIR-V. Raises Unavailable when the installation lacks it."""
        try:
            return (FOLDER / self.file_name).read_bytes()
        except OSError as error:
            raise Unavailable(
                f"shader missing: {self.file_name} ({error.strerror}); reinstall the package"
            ) from None


SHADERS = tuple(Shader(piece, weights) for piece in PIECES for weights in WEIGHT_KINDS)
