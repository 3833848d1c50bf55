"""What the tests of the engine share: running it as its own process, and making experts and containers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pytest_colibri.container.formats import WeightFormat, quantise
from pytest_colibri.container.safetensors import Container
from pytest_colibri.container.scan import geometry_of
from pytest_colibri.container.tiny import write_tiny_model
from pytest_colibri.engine.config import parse_config
from pytest_colibri.engine.weights import (
    Expert,
    ExpertKey,
    ExpertLayout,
    Matrix,
    MatrixLayout,
    WeightReader,
    expert_layouts,
)

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
PLANNED = ("COLI_VULKAN", "COLI_VK_EXPERTS", "COLI_CUDA", "COLI_METAL", "RAM_GB")
F32 = WeightFormat("f32")


@dataclass(frozen=True)
class Run:
    """What one engine process said."""

    status: int
    lines: list[bytes]
    errors: str

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]

    def of(self, event: str) -> list[dict[str, Any]]:
        return [found for found in self.events if found["event"] == event]

    def claims(self, claim: str) -> list[dict[str, Any]]:
        return [found for found in self.of("claim") if found["claim"] == claim]

    def telemetry(self, phase: str) -> dict[str, Any]:
        (found,) = (counts for counts in self.of("telemetry") if counts["phase"] == phase)
        return found

    @property
    def tokens(self) -> list[int]:
        return [token["id"] for token in self.of("token")]

    @property
    def refusal(self) -> str:
        """The reason of a refusal that was made as the protocol says."""
        assert self.status == 2, self.errors
        assert "Traceback" not in self.errors
        assert self.events[-1]["event"] == "refused"
        return str(self.events[-1]["reason"])


def run_engine(folder: Path, request: object, **environment: str) -> Run:
    """Start the engine on a request (bytes are written as they are) and wait for its end."""
    path = folder / "request.json"
    path.write_bytes(request if isinstance(request, bytes) else json.dumps(request).encode())
    inherited = {name: value for name, value in os.environ.items() if name not in PLANNED}
    done = subprocess.run(
        [sys.executable, "-m", "pytest_colibri.engine", str(path)],
        env={**inherited, **environment},
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return Run(done.returncode, done.stdout.splitlines(), done.stderr.decode())


def tiny_request(model: Path, /, **changes: object) -> dict[str, object]:
    """A short greedy run."""
    request = {"model": str(model), "prompt": [3, 14, 159, 26, 53], "new_tokens": 4, "slots_per_layer": 2}
    return {**request, **changes}


def reader_of(container: Container) -> tuple[WeightReader, dict[ExpertKey, ExpertLayout]]:
    """A reader of a container, and the layouts of its experts."""
    config = parse_config(container.config)
    reader = WeightReader(container, config)
    return reader, expert_layouts(reader, geometry_of(container), config)


def make_expert(hidden: int, width: int, gate_up: WeightFormat, down: WeightFormat, seed: int = 0) -> Expert:
    """An expert with random weights."""
    generator = np.random.default_rng(seed)
    shapes = ((width, hidden, gate_up), (width, hidden, gate_up), (hidden, width, down))
    gate, up, down_matrix = (_random_matrix(generator, *shape) for shape in shapes)
    return Expert(ExpertLayout(gate.layout, up.layout, down_matrix.layout), gate, up, down_matrix)


def _random_matrix(
    generator: np.random.Generator, outputs: int, inputs: int, weight_format: WeightFormat
) -> Matrix:
    weights = generator.standard_normal((outputs, inputs)).astype(np.float32) / np.float32(inputs**0.5)
    payload, scales = quantise(weights, weight_format)
    return Matrix(MatrixLayout("random", None, outputs, inputs, weight_format), payload, scales)


def exact_expert(expert: Expert, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What an expert computes, in double precision."""
    gate, up, down = (matrix.dense().astype(np.float64) for matrix in (expert.gate, expert.up, expert.down))
    gated = rows.astype(np.float64) @ gate.T
    return (gated / (1 + np.exp(-gated)) * (rows @ up.T)) @ down.T


def write_wide_model(folder: Path, experts: int) -> Path:
    """A model with one sparse layer of many small experts: its header and experts are read, never run."""
    write_tiny_model(folder, "f32")
    config = json.loads((folder / "config.json").read_text())
    config.update(
        num_hidden_layers=1,
        mlp_layer_types=["sparse"],
        n_routed_experts=experts,
        hidden_size=4,
        moe_intermediate_size=2,
    )
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"gate_proj": [2, 4], "up_proj": [2, 4], "down_proj": [4, 2]}
    header = {}
    for index in range(3 * experts):
        expert, (name, shape) = index // 3, list(shapes.items())[index % 3]
        header[f"model.layers.0.mlp.experts.{expert}.{name}.weight"] = {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [32 * index, 32 * (index + 1)],
        }
    text = json.dumps(header).encode()
    payload = np.arange(24 * experts, dtype="<f4").tobytes()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + payload)
    return folder
