"""Routed experts that stay on a Vulkan device and are computed there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import vulkan as vk

from pytest_colibri.engine.device import DeviceCounts, ExpertRows, Residency
from pytest_colibri.engine.shaders import Piece, Shader, WeightKind
from pytest_colibri.engine.vulkan.device import VulkanDevice
from pytest_colibri.engine.vulkan.memory import (
    HOST_ACCESS,
    MAX_ARENA_BYTES,
    ON_DEVICE,
    WORD_BYTES,
    Arenas,
    Buffer,
    ExpertPlace,
    create_buffer,
    device_words,
    pack_experts,
)
from pytest_colibri.engine.vulkan.pipelines import COMPUTE, Pipelines
from pytest_colibri.engine.weights import Expert, ExpertKey, ExpertLayout, Floats, MatrixLayout
from pytest_colibri.errors import HostMismatch
from pytest_colibri.host.model import DeviceIdentity

# TILE of shaders/weights.glsl: the rows of a batch that one workgroup computes.
ROWS_PER_WORKGROUP = 4


WEIGHTS_OF_KIND: Mapping[str, WeightKind] = {
    "f32": "f32",
    "int8-row": "int8",
    "int4-row": "int4",
    "int4-grouped": "int4",
}


@dataclass(frozen=True)
class Share:
    """A resident expert and its rows in the activation buffers: ``count`` from ``first_row`` on."""

    place: ExpertPlace
    first_row: int
    count: int


@dataclass(frozen=True)
class Dispatch:
    """One dispatch; ``constants`` are what its shader declares, ``workgroups`` outputs by tiles of rows."""

    shader: Shader
    descriptor_set: Any
    constants: tuple[int, ...]
    workgroups: tuple[int, int]


class VulkanExperts:
    """An ExpertDevice. ``batch_rows`` is the widest batch, in rows times experts per row.

    ``staged`` forces copies through a staging buffer where the memory is shared and none would be needed.
    """

    def __init__(self, selector: str | None, batch_rows: int, staged: bool = False) -> None:
        self._device = VulkanDevice(selector)
        self._batch_rows = batch_rows
        self._staged = staged or not self._device.unified
        self._pipelines: Pipelines
        self._places: dict[ExpertKey, ExpertPlace] = {}
        self._dispatches: Counter[str] = Counter()

    @property
    def identity(self) -> DeviceIdentity:
        """Which device was opened."""
        return self._device.identity

    def fill(
        self,
        ranked: Sequence[tuple[ExpertKey, ExpertLayout]],
        budget_bytes: int,
        read: Callable[[ExpertKey], Expert],
    ) -> Residency:
        """Upload experts in rank order, up to the first that would exceed the budget.

        Raises HostMismatch where the device cannot take a batch as wide as announced.
        """
        range_bytes = self._device.limits.maxStorageBufferRange
        packing = pack_experts(ranked, budget_bytes, min(MAX_ARENA_BYTES, range_bytes))
        if packing.places:
            self._prepare(packing.arena_words, [place.layout for place in packing.places.values()])
        for key, place in packing.places.items():
            self._arenas.write(place.arena, place.gate.weights, device_words(read(key)))
        self._places = packing.places
        return Residency(tuple(packing.places), sum(packing.arena_words) * WORD_BYTES)

    def _prepare(self, arena_words: Sequence[int], layouts: Sequence[ExpertLayout]) -> None:
        """Make arenas, activations and what binds them."""
        self._check_limits(layouts)
        self._pipelines = Pipelines(self._device)
        self._arenas = Arenas(self._device, arena_words, self._staged)
        hidden, width = layouts[0].gate.inputs, layouts[0].gate.outputs
        self._inputs = self._activations(hidden, HOST_ACCESS)
        self._intermediate = self._activations(width, ON_DEVICE)
        self._outputs = self._activations(hidden, HOST_ACCESS)
        arenas = self._arenas.buffers
        self._gate_up_sets = self._pipelines.bind_buffers(
            [(arena, self._inputs, self._intermediate) for arena in arenas]
        )
        self._down_sets = self._pipelines.bind_buffers(
            [(arena, self._intermediate, self._outputs) for arena in arenas]
        )

    def _check_limits(self, layouts: Sequence[ExpertLayout]) -> None:
        limits = self._device.limits
        widest = max(max(matrix.outputs, matrix.inputs) for layout in layouts for matrix in layout)
        groups = limits.maxComputeWorkGroupCount
        if widest > groups[0] or -(-self._batch_rows // ROWS_PER_WORKGROUP) > groups[1]:
            raise HostMismatch(f"{self.identity.name} cannot dispatch {widest} outputs at once")
        if self._batch_rows * widest * WORD_BYTES > limits.maxStorageBufferRange:
            raise HostMismatch(
                f"{self.identity.name} binds at most {limits.maxStorageBufferRange} bytes; a batch of this "
                f"prompt needs {self._batch_rows * widest * WORD_BYTES}: shorten it"
            )

    def _activations(self, width: int, flags: int) -> Buffer:
        return create_buffer(self._device, self._batch_rows * width * WORD_BYTES, flags)

    def run_experts(self, batch: Sequence[ExpertRows], rows: Floats) -> list[Floats]:
        """Compute resident experts for their rows of ``rows`` [n, hidden] with one submission.

        Returns [len(share.rows), hidden] for each share of the batch; outputs are not weighted yet.
        """
        counts = [len(share.rows) for share in batch]
        starts = [0, *accumulate(counts)]
        self._write_inputs(rows[np.concatenate([share.rows for share in batch])])
        self._run_on_device(
            [
                Share(self._places[expert.key], first_row, count)
                for expert, first_row, count in zip(batch, starts[:-1], counts, strict=True)
            ]
        )
        return np.split(self._read_outputs(starts[-1], rows.shape[1]), starts[1:-1])

    def _write_inputs(self, gathered: Floats) -> None:
        assert self._inputs.words is not None
        self._inputs.words.view(np.float32)[: gathered.size] = gathered.reshape(-1)

    def _read_outputs(self, count: int, hidden: int) -> Floats:
        assert self._outputs.words is not None
        return self._outputs.words.view(np.float32)[: count * hidden].reshape(count, hidden).copy()

    def _run_on_device(self, shares: Sequence[Share]) -> None:
        """Record gate and up of all experts, then down of all; submit, wait, and count what was executed."""
        gate_up = [self._gate_up(share) for share in shares]
        down = [self._down(share) for share in shares]
        commands = self._device.begin_commands()
        for dispatch in gate_up:
            self._record(commands, dispatch)
        _barrier(commands, vk.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, vk.VK_ACCESS_SHADER_READ_BIT)
        for dispatch in down:
            self._record(commands, dispatch)
        _barrier(commands, vk.VK_PIPELINE_STAGE_HOST_BIT, vk.VK_ACCESS_HOST_READ_BIT)
        self._device.submit_commands()
        self._dispatches.update(dispatch.shader.file_name for dispatch in (*gate_up, *down))

    def _gate_up(self, share: Share) -> Dispatch:
        place = share.place
        matrices = (place.gate.weights, place.gate.scales, place.up.weights, place.up.scales)
        return _dispatch("gate_up", place.layout.gate, self._gate_up_sets[place.arena], matrices, share)

    def _down(self, share: Share) -> Dispatch:
        place = share.place
        matrices = (place.down.weights, place.down.scales)
        return _dispatch("down", place.layout.down, self._down_sets[place.arena], matrices, share)

    def _record(self, commands: Any, dispatch: Dispatch) -> None:
        layout, bind_point = self._pipelines.layout, vk.VK_PIPELINE_BIND_POINT_COMPUTE
        constants = vk.ffi.new("uint32_t[]", dispatch.constants)
        vk.vkCmdBindPipeline(commands, bind_point, self._pipelines.get(dispatch.shader))
        vk.vkCmdBindDescriptorSets(commands, bind_point, layout, 0, 1, [dispatch.descriptor_set], 0, None)
        vk.vkCmdPushConstants(commands, layout, COMPUTE, 0, vk.ffi.sizeof(constants), constants)
        vk.vkCmdDispatch(commands, *dispatch.workgroups, 1)

    def take_counts(self) -> DeviceCounts:
        """Return what was executed since the last call, and start anew."""
        counts = DeviceCounts(dict(self._dispatches), self._device.submits)
        self._dispatches.clear()
        self._device.submits = 0
        return counts

    def close(self) -> None:
        """Give everything back to the driver."""
        self._device.close()


def _dispatch(
    piece: Piece, layout: MatrixLayout, descriptor_set: Any, matrices: tuple[int, ...], share: Share
) -> Dispatch:
    return Dispatch(
        shader=Shader(piece, WEIGHTS_OF_KIND[layout.weight_format.kind]),
        descriptor_set=descriptor_set,
        constants=(*matrices, layout.inputs, layout.group_size, share.first_row, share.count),
        workgroups=(layout.outputs, -(-share.count // ROWS_PER_WORKGROUP)),
    )


def _barrier(commands: Any, stage: int, access: int) -> None:
    """Make what the shaders wrote so far visible to ``access`` in ``stage``."""
    barrier = vk.VkMemoryBarrier(srcAccessMask=vk.VK_ACCESS_SHADER_WRITE_BIT, dstAccessMask=access)
    source = vk.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT
    vk.vkCmdPipelineBarrier(commands, source, stage, 0, 1, [barrier], 0, None, 0, None)
