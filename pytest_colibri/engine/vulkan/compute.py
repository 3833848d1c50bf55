"""The buffers and pipelines that compute resident experts, and the commands that make the device do it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import vulkan as vk

from pytest_colibri.engine.shaders import PIECES, Piece, Shader, WeightKind
from pytest_colibri.engine.vulkan.device import VulkanDevice
from pytest_colibri.engine.vulkan.memory import (
    HOST_ACCESS,
    ON_DEVICE,
    WORD_BYTES,
    Arenas,
    Buffer,
    ExpertPlace,
    Packing,
    create_buffer,
    device_words,
)
from pytest_colibri.engine.vulkan.pipelines import COMPUTE, Pipelines
from pytest_colibri.engine.weights import Expert, ExpertKey, ExpertLayout, Floats, MatrixLayout
from pytest_colibri.errors import HostMismatch

# TILE and OUTPUTS of shaders/weights.glsl.
ROWS_PER_WORKGROUP = 4
OUTPUTS_PER_WORKGROUP = 8

WEIGHTS_OF_KIND: Mapping[str, WeightKind] = {
    "f32": "f32",
    "int8-row": "int8",
    "int4-row": "int4",
    "int4-grouped": "int4",
}


@dataclass(frozen=True)
class Share:
    """A resident expert and its rows in the activation buffers: ``count`` from ``first_row`` on."""

    key: ExpertKey
    first_row: int
    count: int


@dataclass(frozen=True)
class Dispatch:
    """One dispatch; ``constants`` are what its shader declares, ``workgroups`` outputs by tiles of rows."""

    shader: Shader
    descriptor_set: Any
    constants: tuple[int, ...]
    workgroups: tuple[int, int]


class ExpertCompute:
    """Resident experts on one device. Rows go in, are computed with one submission, and come out.

    ``batch_rows`` is the widest batch, in rows times experts per row. ``staged`` says that weights reach the
    device through a staging buffer. Raises HostMismatch where the device cannot take such a batch.
    """

    def __init__(self, device: VulkanDevice, packing: Packing, batch_rows: int, staged: bool) -> None:
        self._device = device
        self._places = packing.places
        layouts = [place.layout for place in packing.places.values()]
        _check_limits(device, layouts, batch_rows)
        self._pipelines = Pipelines(device, {shader for layout in layouts for shader in shaders_of(layout)})
        self._arenas = Arenas(device, packing.arena_words, staged)
        hidden, width = layouts[0].gate.inputs, layouts[0].gate.outputs
        self._inputs = create_buffer(device, batch_rows * hidden * WORD_BYTES, HOST_ACCESS)
        intermediate = create_buffer(device, batch_rows * width * WORD_BYTES, ON_DEVICE)
        self._outputs = create_buffer(device, batch_rows * hidden * WORD_BYTES, HOST_ACCESS)
        self._sets: dict[Piece, list[Any]] = {
            "gate_up": self._bind(self._inputs, intermediate),
            "down": self._bind(intermediate, self._outputs),
        }

    def _bind(self, inputs: Buffer, outputs: Buffer) -> list[Any]:
        """Make a descriptor set for each arena."""
        return self._pipelines.bind_buffers([(arena, inputs, outputs) for arena in self._arenas.buffers])

    def upload(self, key: ExpertKey, expert: Expert) -> None:
        """Put an expert in its place."""
        place = self._places[key]
        self._arenas.write(place.arena, place.gate.weights, device_words(expert))

    def write_inputs(self, rows: Floats) -> None:
        """Put rows [n, hidden] where the shaders read them."""
        assert self._inputs.words is not None
        self._inputs.words.view(np.float32)[: rows.size] = rows.reshape(-1)

    def read_outputs(self, count: int, hidden: int) -> Floats:
        """Return the first ``count`` output rows [count, hidden]."""
        assert self._outputs.words is not None
        return self._outputs.words.view(np.float32)[: count * hidden].reshape(count, hidden).copy()

    def run(self, shares: Sequence[Share]) -> Counter[str]:
        """Compute with one submission, and wait; return the executed dispatches by shader file.

        Gate and up of all experts come first, then down of all, with one barrier between.
        """
        gate_up = [self._gate_up(share) for share in shares]
        down = [self._down(share) for share in shares]
        commands = self._device.begin_commands()
        self._record(commands, gate_up)
        _barrier(commands, vk.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, vk.VK_ACCESS_SHADER_READ_BIT)
        self._record(commands, down)
        _barrier(commands, vk.VK_PIPELINE_STAGE_HOST_BIT, vk.VK_ACCESS_HOST_READ_BIT)
        self._device.submit_commands()
        return Counter(dispatch.shader.file_name for dispatch in (*gate_up, *down))

    def _gate_up(self, share: Share) -> Dispatch:
        place = self._places[share.key]
        matrices = (place.gate.weights, place.gate.scales, place.up.weights, place.up.scales)
        return self._dispatch("gate_up", place, place.layout.gate, matrices, share)

    def _down(self, share: Share) -> Dispatch:
        place = self._places[share.key]
        matrices = (place.down.weights, place.down.scales)
        return self._dispatch("down", place, place.layout.down, matrices, share)

    def _dispatch(
        self, piece: Piece, place: ExpertPlace, layout: MatrixLayout, matrices: tuple[int, ...], share: Share
    ) -> Dispatch:
        sizes = (layout.inputs, layout.outputs, layout.group_size)
        return Dispatch(
            shader=shader_of(piece, layout),
            descriptor_set=self._sets[piece][place.arena],
            constants=(*matrices, *sizes, share.first_row, share.count),
            workgroups=(_ceil(layout.outputs, OUTPUTS_PER_WORKGROUP), _ceil(share.count, ROWS_PER_WORKGROUP)),
        )

    def _record(self, commands: Any, dispatches: Iterable[Dispatch]) -> None:
        layout, bind_point = self._pipelines.layout, vk.VK_PIPELINE_BIND_POINT_COMPUTE
        for dispatch in dispatches:
            constants = vk.ffi.new("uint32_t[]", dispatch.constants)
            vk.vkCmdBindPipeline(commands, bind_point, self._pipelines.of(dispatch.shader))
            vk.vkCmdBindDescriptorSets(commands, bind_point, layout, 0, 1, [dispatch.descriptor_set], 0, None)
            vk.vkCmdPushConstants(commands, layout, COMPUTE, 0, vk.ffi.sizeof(constants), constants)
            vk.vkCmdDispatch(commands, *dispatch.workgroups, 1)


def shader_of(piece: Piece, layout: MatrixLayout) -> Shader:
    """Return the shader that computes a piece with weights of this layout."""
    return Shader(piece, WEIGHTS_OF_KIND[layout.weight_format.kind])


def shaders_of(layout: ExpertLayout) -> tuple[Shader, ...]:
    """Return the shaders that compute an expert, piece by piece."""
    return tuple(map(shader_of, PIECES, (layout.gate, layout.down)))


def _check_limits(device: VulkanDevice, layouts: Sequence[ExpertLayout], batch_rows: int) -> None:
    limits = device.limits
    widest = max(max(matrix.outputs, matrix.inputs) for layout in layouts for matrix in layout)
    workgroups = (_ceil(widest, OUTPUTS_PER_WORKGROUP), _ceil(batch_rows, ROWS_PER_WORKGROUP))
    allowed = limits.maxComputeWorkGroupCount
    if workgroups[0] > allowed[0] or workgroups[1] > allowed[1]:
        raise HostMismatch(
            f"{device.identity.name} dispatches at most {allowed[0]} x {allowed[1]} workgroups at once; "
            f"{workgroups[0]} x {workgroups[1]} are needed: shorten the prompt"
        )
    needed_bytes = batch_rows * widest * WORD_BYTES
    if needed_bytes > limits.maxStorageBufferRange:
        raise HostMismatch(
            f"{device.identity.name} binds at most {limits.maxStorageBufferRange} bytes; the widest batch "
            f"needs {needed_bytes}: shorten the prompt"
        )


def _barrier(commands: Any, stage: int, access: int) -> None:
    """Make what the shaders wrote so far visible to ``access`` in ``stage``."""
    barrier = vk.VkMemoryBarrier(srcAccessMask=vk.VK_ACCESS_SHADER_WRITE_BIT, dstAccessMask=access)
    source = vk.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT
    vk.vkCmdPipelineBarrier(commands, source, stage, 0, 1, [barrier], 0, None, 0, None)


def _ceil(count: int, size: int) -> int:
    return -(-count // size)
