"""Compute pipelines for the shaders, and the descriptor sets that bind buffers to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import vulkan as vk

from pytest_colibri.engine.shaders import Shader
from pytest_colibri.engine.vulkan.device import VulkanDevice
from pytest_colibri.engine.vulkan.memory import Buffer

BINDINGS = 3
MAX_CONSTANTS = 9
STORAGE = vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER
COMPUTE = vk.VK_SHADER_STAGE_COMPUTE_BIT


class Pipelines:
    """A pipeline for each of ``shaders``; all share a layout: weights, inputs, outputs.

    Raises Unavailable for a shader that is missing.
    """

    def __init__(self, device: VulkanDevice, shaders: Iterable[Shader]) -> None:
        self._device = device
        self._set_layout = self._create_set_layout()
        self.layout = self._create_layout()
        self._pipelines = {shader: self._create(shader) for shader in shaders}

    def _create_set_layout(self) -> Any:
        bindings = [
            vk.VkDescriptorSetLayoutBinding(
                binding=index, descriptorType=STORAGE, descriptorCount=1, stageFlags=COMPUTE
            )
            for index in range(BINDINGS)
        ]
        create = vk.VkDescriptorSetLayoutCreateInfo(bindingCount=BINDINGS, pBindings=bindings)
        layout = vk.vkCreateDescriptorSetLayout(self._device.handle, create, None)
        self._device.resources.callback(vk.vkDestroyDescriptorSetLayout, self._device.handle, layout, None)
        return layout

    def _create_layout(self) -> Any:
        constants = vk.VkPushConstantRange(stageFlags=COMPUTE, offset=0, size=4 * MAX_CONSTANTS)
        create = vk.VkPipelineLayoutCreateInfo(
            setLayoutCount=1,
            pSetLayouts=[self._set_layout],
            pushConstantRangeCount=1,
            pPushConstantRanges=[constants],
        )
        layout = vk.vkCreatePipelineLayout(self._device.handle, create, None)
        self._device.resources.callback(vk.vkDestroyPipelineLayout, self._device.handle, layout, None)
        return layout

    def of(self, shader: Shader) -> Any:
        """Return the pipeline of a shader."""
        return self._pipelines[shader]

    def _create(self, shader: Shader) -> Any:
        device = self._device
        spirv = shader.read_spirv()
        create = vk.VkShaderModuleCreateInfo(codeSize=len(spirv), pCode=spirv)
        module = vk.vkCreateShaderModule(device.handle, create, None)
        try:
            stage = vk.VkPipelineShaderStageCreateInfo(stage=COMPUTE, module=module, pName="main")
            info = vk.VkComputePipelineCreateInfo(stage=stage, layout=self.layout)
            pipeline = vk.vkCreateComputePipelines(device.handle, None, 1, [info], None)[0]
        finally:
            vk.vkDestroyShaderModule(device.handle, module, None)
        device.resources.callback(vk.vkDestroyPipeline, device.handle, pipeline, None)
        return pipeline

    def bind_buffers(self, groups: Sequence[Sequence[Buffer]]) -> list[Any]:
        """Make a descriptor set for each group of weights, inputs and outputs."""
        device = self._device.handle
        size = vk.VkDescriptorPoolSize(type=STORAGE, descriptorCount=BINDINGS * len(groups))
        create = vk.VkDescriptorPoolCreateInfo(maxSets=len(groups), poolSizeCount=1, pPoolSizes=[size])
        pool = vk.vkCreateDescriptorPool(device, create, None)
        self._device.resources.callback(vk.vkDestroyDescriptorPool, device, pool, None)
        allocate = vk.VkDescriptorSetAllocateInfo(
            descriptorPool=pool,
            descriptorSetCount=len(groups),
            pSetLayouts=[self._set_layout] * len(groups),
        )
        sets = list(vk.vkAllocateDescriptorSets(device, allocate))
        for descriptor_set, buffers in zip(sets, groups, strict=True):
            self._write_set(descriptor_set, buffers)
        return sets

    def _write_set(self, descriptor_set: Any, buffers: Sequence[Buffer]) -> None:
        writes = [
            vk.VkWriteDescriptorSet(
                dstSet=descriptor_set,
                dstBinding=index,
                descriptorCount=1,
                descriptorType=STORAGE,
                pBufferInfo=[vk.VkDescriptorBufferInfo(buffer=buffer.handle, offset=0, range=buffer.nbytes)],
            )
            for index, buffer in enumerate(buffers)
        ]
        vk.vkUpdateDescriptorSets(self._device.handle, len(writes), writes, 0, None)
