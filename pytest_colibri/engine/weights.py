"""Matrices and experts as the container stores them, and the names under which it does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pytest_colibri.container.formats import SUPPORTED_KINDS, WeightFormat, dequantise, infer_format
from pytest_colibri.container.geometry import Geometry
from pytest_colibri.container.safetensors import Container
from pytest_colibri.engine.config import ModelConfig
from pytest_colibri.errors import UsageError

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class ExpertKey(NamedTuple):
    """One routed expert of the model."""

    layer: int
    expert: int


@dataclass(frozen=True)
class MatrixLayout:
    """An [outputs, inputs] matrix in the container; ``scales`` names its scales tensor, if it has one."""

    name: str
    scales: str | None
    outputs: int
    inputs: int
    weight_format: WeightFormat

    @property
    def group_size(self) -> int:
        """Inputs that share a scale; the whole row where the format has one scale per row, or none."""
        return self.weight_format.group_size or self.inputs

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of weights in the container."""
        return self.weight_format.payload_bytes(1, self.inputs)

    @property
    def scales_count(self) -> int:
        """How many scales belong to the matrix."""
        return self.weight_format.scales_count(self.outputs, self.inputs) or 0

    @property
    def nbytes(self) -> int:
        """Bytes of weights and scales in the container."""
        return self.outputs * self.row_bytes + 4 * self.scales_count


@dataclass(frozen=True)
class Matrix:
    """The stored bytes of a matrix: ``payload`` [outputs * row_bytes], ``scales`` [scales_count] or None."""

    layout: MatrixLayout
    payload: Bytes
    scales: Floats | None

    def dense(self) -> Floats:
        """Return the weights as f32 [outputs, inputs]; f32 weights are not copied."""
        layout = self.layout
        return dequantise(self.payload, self.scales, layout.outputs, layout.inputs, layout.weight_format)

    def apply(self, rows: Floats) -> Floats:
        """Multiply: [n, inputs] to [n, outputs]."""
        return rows @ self.dense().T


@dataclass(frozen=True)
class ExpertLayout:
    """The three matrices of a routed expert; gate and up share format and shape."""

    gate: MatrixLayout
    up: MatrixLayout
    down: MatrixLayout

    def __iter__(self) -> Iterator[MatrixLayout]:
        return iter((self.gate, self.up, self.down))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the expert in the container: what a cache slot holds."""
        return sum(matrix.nbytes for matrix in self)


@dataclass(frozen=True)
class Expert:
    """A routed expert, as its stored bytes."""

    layout: ExpertLayout
    gate: Matrix
    up: Matrix
    down: Matrix

    def apply(self, rows: Floats) -> Floats:
        """Compute down(SiLU(gate x) * up x) for rows [n, hidden] on the CPU."""
        return gated_mlp(rows, self.gate, self.up, self.down)


def gated_mlp(rows: Floats, gate: Matrix, up: Matrix, down: Matrix) -> Floats:
    """Compute down(SiLU(gate x) * up x): [n, inputs of gate] to [n, outputs of down]."""
    gated = gate.apply(rows)
    # SiLU as x/2 (1 + tanh(x/2)): exp() of a large negative input would overflow.
    activated = gated * np.float32(0.5) * (1 + np.tanh(gated * np.float32(0.5)))
    return down.apply(activated * up.apply(rows))


class WeightReader:
    """Reads matrices, vectors and experts of a model by their place in it; each read goes to the disk."""

    def __init__(self, container: Container, config: ModelConfig) -> None:
        self._container = container
        self._config = config

    def vector(self, name: str, width: int) -> Floats:
        """Read an f32 vector of ``width`` values."""
        values = self._container.read_f32(name)
        if values.shape != (width,):
            raise UsageError(f"tensor {name} has the shape {values.shape}; config.json wants ({width},)")
        return values

    def layout(self, name: str, outputs: int, inputs: int) -> MatrixLayout:
        """Tell how the container stores a matrix. Raises UsageError for a format that is not computed."""
        info = self._container.info(name)
        scales = self._container.tensors.get(f"{name}.qs")
        count = None if scales is None else scales.nbytes // 4
        weight_format = infer_format(info.nbytes, count, outputs, inputs)
        if not weight_format.supported:
            raise UsageError(
                f"tensor {name} is {weight_format}; this engine computes {', '.join(SUPPORTED_KINDS)}"
            )
        return MatrixLayout(name, None if scales is None else scales.name, outputs, inputs, weight_format)

    def matrix(self, name: str, outputs: int, inputs: int) -> Matrix:
        """Read a matrix as stored."""
        return self._read(self.layout(name, outputs, inputs))

    def expert_layout(self, key: ExpertKey) -> ExpertLayout:
        """Tell how the container stores an expert."""
        hidden, width = self._config.hidden, self._config.expert_width
        prefix = f"model.layers.{key.layer}.mlp.experts.{key.expert}"
        layout = ExpertLayout(
            gate=self.layout(f"{prefix}.gate_proj.weight", width, hidden),
            up=self.layout(f"{prefix}.up_proj.weight", width, hidden),
            down=self.layout(f"{prefix}.down_proj.weight", hidden, width),
        )
        if layout.gate.weight_format != layout.up.weight_format:
            raise UsageError(f"{prefix}: gate_proj and up_proj differ in their weight format")
        return layout

    def expert(self, layout: ExpertLayout) -> Expert:
        """Read an expert as stored."""
        return Expert(layout, *(self._read(matrix) for matrix in layout))

    def _read(self, layout: MatrixLayout) -> Matrix:
        scales = None if layout.scales is None else self._container.read_f32(layout.scales).reshape(-1)
        return Matrix(layout, self._container.read(layout.name), scales)


def expert_layouts(
    reader: WeightReader, geometry: Geometry, config: ModelConfig
) -> dict[ExpertKey, ExpertLayout]:
    """Describe every routed expert. Raises UsageError where container and configuration disagree."""
    found = {layer.index for layer in geometry.layers}
    if found != config.sparse_layers:
        raise UsageError(
            f"the container has experts in the layers {sorted(found)}; "
            f"config.json says {sorted(config.sparse_layers)}"
        )
    layouts = {}
    for layer in geometry.layers:
        for expert, nbytes in layer.expert_bytes.items():
            key = ExpertKey(layer.index, expert)
            layouts[key] = reader.expert_layout(key)
            if layouts[key].nbytes != nbytes:
                raise UsageError(
                    f"expert {expert} of layer {layer.index} has {nbytes} bytes; gate, up and down take "
                    f"{layouts[key].nbytes}, and other tensors of an expert are not computed"
                )
    return layouts
