"""The least that a Vulkan compute program needs; the test programs beside it are written with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TextIO

import vulkan as vk


def phase(name: str, state: str, stream: TextIO = sys.stdout, **more: int) -> None:
    event = {"event": "phase", "phase": name, "state": state, **more}
    stream.write(json.dumps(event, separators=(",", ":")) + "\n")
    stream.flush()


class Gpu:
    """The first device with one queue; ``shaders`` are paths of SPIR-V files, a pipeline for each."""

    def __init__(self, *shaders: str, extensions: tuple[str, ...] = (), minor_version: int = 1) -> None:
        application = vk.VkApplicationInfo(apiVersion=vk.VK_MAKE_VERSION(1, minor_version, 0))
        self.instance = vk.vkCreateInstance(vk.VkInstanceCreateInfo(pApplicationInfo=application), None)
        self.physical = vk.vkEnumeratePhysicalDevices(self.instance)[0]
        queue = vk.VkDeviceQueueCreateInfo(queueFamilyIndex=0, queueCount=1, pQueuePriorities=[1.0])
        info = vk.VkDeviceCreateInfo(pQueueCreateInfos=[queue], ppEnabledExtensionNames=extensions)
        self.device = vk.vkCreateDevice(self.physical, info, None)
        self.queue = vk.vkGetDeviceQueue(self.device, 0, 0)
        self.layout = vk.vkCreatePipelineLayout(self.device, vk.VkPipelineLayoutCreateInfo(), None)
        self.pool = self.new_pool()
        self.pipelines = [self.pipeline(Path(shader).read_bytes()) for shader in shaders]

    def pipeline(self, code: bytes) -> object:
        module = vk.vkCreateShaderModule(
            self.device, vk.VkShaderModuleCreateInfo(codeSize=len(code), pCode=code), None
        )
        stage = vk.VkPipelineShaderStageCreateInfo(
            stage=vk.VK_SHADER_STAGE_COMPUTE_BIT, module=module, pName="main"
        )
        info = vk.VkComputePipelineCreateInfo(stage=stage, layout=self.layout)
        pipeline = vk.vkCreateComputePipelines(self.device, vk.VK_NULL_HANDLE, 1, [info], None)[0]
        vk.vkDestroyShaderModule(self.device, module, None)
        return pipeline

    def new_pool(self) -> object:
        info = vk.VkCommandPoolCreateInfo(
            queueFamilyIndex=0, flags=vk.VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT
        )
        return vk.vkCreateCommandPool(self.device, info, None)

    def buffer(self, pool: object = None, *, secondary: bool = False) -> object:
        level = vk.VK_COMMAND_BUFFER_LEVEL_SECONDARY if secondary else vk.VK_COMMAND_BUFFER_LEVEL_PRIMARY
        info = vk.VkCommandBufferAllocateInfo(
            commandPool=pool or self.pool, level=level, commandBufferCount=1
        )
        return vk.vkAllocateCommandBuffers(self.device, info)[0]

    def begin(self, buffer: object, *, secondary: bool = False) -> None:
        inheritance = vk.VkCommandBufferInheritanceInfo() if secondary else None
        flags = vk.VK_COMMAND_BUFFER_USAGE_SIMULTANEOUS_USE_BIT
        vk.vkBeginCommandBuffer(
            buffer, vk.VkCommandBufferBeginInfo(flags=flags, pInheritanceInfo=inheritance)
        )

    def bind(self, buffer: object, pipeline: object) -> None:
        vk.vkCmdBindPipeline(buffer, vk.VK_PIPELINE_BIND_POINT_COMPUTE, pipeline)

    def record(
        self, buffer: object, pipeline: object, times: int, groups: tuple[int, int, int] = (1, 1, 1)
    ) -> None:
        self.begin(buffer)
        self.bind(buffer, pipeline)
        for _ in range(times):
            vk.vkCmdDispatch(buffer, *groups)
        vk.vkEndCommandBuffer(buffer)

    def submit(self, *buffers: object, queue: object = None) -> None:
        vk.vkQueueSubmit(queue or self.queue, 1, [vk.VkSubmitInfo(pCommandBuffers=list(buffers))], None)

    def finish(self) -> None:
        vk.vkQueueWaitIdle(self.queue)
