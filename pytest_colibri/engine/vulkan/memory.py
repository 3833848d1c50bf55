"""Buffers, the memory behind them, and the packing of experts into arenas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import vulkan as vk
from numpy.typing import NDArray

from pytest_colibri.engine.vulkan.device import VulkanDevice
from pytest_colibri.engine.weights import Expert, ExpertKey, ExpertLayout, Matrix, MatrixLayout
from pytest_colibri.errors import HostMismatch

Words = NDArray[np.uint32]

WORD_BYTES = 4
MAX_ARENA_BYTES = 256 * 2**20
MAX_STAGING_BYTES = 16 * 2**20
HOST_ACCESS = vk.VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | vk.VK_MEMORY_PROPERTY_HOST_COHERENT_BIT
ON_DEVICE = vk.VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT


@dataclass(frozen=True)
class Buffer:
    """A buffer with its own memory; ``words`` is the mapped memory, None where the host has no access."""

    handle: Any
    nbytes: int
    words: Words | None


def find_memory_type(device: VulkanDevice, allowed: int, flags: int) -> int | None:
    """Return the first memory type among the ``allowed`` bits that has all ``flags``."""
    for index in range(device.memory.memoryTypeCount):
        if allowed >> index & 1 and device.memory.memoryTypes[index].propertyFlags & flags == flags:
            return index
    return None


def create_buffer(device: VulkanDevice, nbytes: int, flags: int) -> Buffer:
    """Make a storage buffer in memory that has all ``flags``; it lives as long as the device.

    Raises HostMismatch where the device has no such memory, or not enough of it.
    """
    usage = (
        vk.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT
        | vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT
        | vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT
    )
    create = vk.VkBufferCreateInfo(size=nbytes, usage=usage, sharingMode=vk.VK_SHARING_MODE_EXCLUSIVE)
    handle = vk.vkCreateBuffer(device.handle, create, None)
    device.resources.callback(vk.vkDestroyBuffer, device.handle, handle, None)
    needed = vk.vkGetBufferMemoryRequirements(device.handle, handle)
    memory_type = find_memory_type(device, needed.memoryTypeBits, flags)
    if memory_type is None:
        raise HostMismatch(f"{device.identity.name} has no memory type with the flags {flags:#x}")
    memory = _allocate(device, needed.size, memory_type)
    vk.vkBindBufferMemory(device.handle, handle, memory, 0)
    words = None
    if flags & vk.VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT:
        words = np.frombuffer(vk.vkMapMemory(device.handle, memory, 0, nbytes, 0), dtype=np.uint32)
    return Buffer(handle, nbytes, words)


def _allocate(device: VulkanDevice, nbytes: int, memory_type: int) -> Any:
    allocate = vk.VkMemoryAllocateInfo(allocationSize=nbytes, memoryTypeIndex=memory_type)
    try:
        memory = vk.vkAllocateMemory(device.handle, allocate, None)
    except (vk.VkErrorOutOfDeviceMemory, vk.VkErrorOutOfHostMemory):
        raise HostMismatch(f"{device.identity.name} could not allocate {nbytes} bytes") from None
    device.resources.callback(vk.vkFreeMemory, device.handle, memory, None)
    return memory


@dataclass(frozen=True)
class MatrixPlace:
    """Where a matrix lies in its arena, in words: its weight rows, and its scales."""

    weights: int
    scales: int


@dataclass(frozen=True)
class ExpertPlace:
    """Where an expert lies: its arena, and its matrices in it."""

    arena: int
    layout: ExpertLayout
    gate: MatrixPlace
    up: MatrixPlace
    down: MatrixPlace


@dataclass(frozen=True)
class Packing:
    """Experts in rank order, each with its place, and the words of each arena."""

    places: dict[ExpertKey, ExpertPlace]
    arena_words: tuple[int, ...]


def row_words(layout: MatrixLayout) -> int:
    """Words of a weight row on the device, where every row starts on a whole word."""
    return -(-layout.row_bytes // WORD_BYTES)


def expert_words(layout: ExpertLayout) -> int:
    """Words that an expert takes on the device."""
    return sum(matrix.outputs * row_words(matrix) + matrix.scales_count for matrix in layout)


def pack_experts(
    ranked: Sequence[tuple[ExpertKey, ExpertLayout]], budget_bytes: int, arena_bytes: int
) -> Packing:
    """Place experts in rank order, up to the first that exceeds the budget or a whole arena."""
    places: dict[ExpertKey, ExpertPlace] = {}
    arenas = [0]
    for key, layout in ranked:
        words = expert_words(layout)
        if words * WORD_BYTES > arena_bytes or (sum(arenas) + words) * WORD_BYTES > budget_bytes:
            break
        if (arenas[-1] + words) * WORD_BYTES > arena_bytes:
            arenas.append(0)
        places[key] = _place(layout, len(arenas) - 1, arenas[-1])
        arenas[-1] += words
    return Packing(places, tuple(arenas) if places else ())


def _place(layout: ExpertLayout, arena: int, begin: int) -> ExpertPlace:
    matrices = []
    for matrix in layout:
        scales = begin + matrix.outputs * row_words(matrix)
        matrices.append(MatrixPlace(begin, scales))
        begin = scales + matrix.scales_count
    return ExpertPlace(arena, layout, *matrices)


def device_words(expert: Expert) -> Words:
    """Return an expert as it lies on the device: padded rows, then scales, of gate, up and down."""
    return np.concatenate(
        [part for matrix in (expert.gate, expert.up, expert.down) for part in _parts(matrix)]
    )


def _parts(matrix: Matrix) -> list[Words]:
    rows = matrix.payload.reshape(matrix.layout.outputs, -1)
    padding = row_words(matrix.layout) * WORD_BYTES - rows.shape[1]
    padded = np.ascontiguousarray(np.pad(rows, ((0, 0), (0, padding))) if padding else rows)
    weights = padded.view(np.uint32).reshape(-1)
    return [weights] if matrix.scales is None else [weights, matrix.scales.view(np.uint32)]


class Arenas:
    """The buffers that hold the resident experts; written directly where memory is shared, else staged.

    An arena is bound whole and its matrices are found by word offsets, so that neither alignment of offsets
    nor the number of buffers limits how densely experts lie.
    """

    def __init__(self, device: VulkanDevice, arena_words: Sequence[int], staged: bool) -> None:
        flags = ON_DEVICE if staged else ON_DEVICE | HOST_ACCESS
        self._device = device
        self.buffers = [create_buffer(device, words * WORD_BYTES, flags) for words in arena_words]
        self._staging = None
        if staged:
            staging_bytes = min(MAX_STAGING_BYTES, max(arena_words) * WORD_BYTES)
            self._staging = create_buffer(device, staging_bytes, HOST_ACCESS)

    def write(self, arena: int, begin: int, words: Words) -> None:
        """Put ``words`` into an arena from word ``begin`` on."""
        target = self.buffers[arena]
        if self._staging is None:
            assert target.words is not None
            target.words[begin : begin + len(words)] = words
        else:
            self._write_staged(self._staging, target, begin, words)

    def _write_staged(self, staging: Buffer, target: Buffer, begin: int, words: Words) -> None:
        assert staging.words is not None
        room = len(staging.words)
        for done in range(0, len(words), room):
            piece = words[done : done + room]
            staging.words[: len(piece)] = piece
            self._copy(staging, target, begin + done, len(piece))

    def _copy(self, staging: Buffer, target: Buffer, begin: int, count: int) -> None:
        region = vk.VkBufferCopy(srcOffset=0, dstOffset=begin * WORD_BYTES, size=count * WORD_BYTES)
        commands = self._device.begin_commands()
        vk.vkCmdCopyBuffer(commands, staging.handle, target.handle, 1, [region])
        barrier = vk.VkMemoryBarrier(
            srcAccessMask=vk.VK_ACCESS_TRANSFER_WRITE_BIT,
            dstAccessMask=vk.VK_ACCESS_SHADER_READ_BIT | vk.VK_ACCESS_TRANSFER_WRITE_BIT,
        )
        vk.vkCmdPipelineBarrier(
            commands,
            vk.VK_PIPELINE_STAGE_TRANSFER_BIT,
            vk.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT | vk.VK_PIPELINE_STAGE_TRANSFER_BIT,
            0, 1, [barrier], 0, None, 0, None,
        )  # fmt: skip
        self._device.submit_commands()
