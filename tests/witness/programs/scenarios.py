"""Vulkan programs whose dispatches are known: ``scenarios.py NAME SHADER SHADER``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import vulkan as vk
from gpu import Gpu, phase


def phases(*shaders: str) -> None:
    gpu = Gpu(*shaders)
    for name, first, second in (("prefill", 2, 1), ("decode", 5, 3)):
        phase(name, "begin")
        for pipeline, times in zip(gpu.pipelines, (first, second), strict=True):
            buffer = gpu.buffer()
            gpu.record(buffer, pipeline, times)
            gpu.submit(buffer)
        gpu.finish()
        phase(name, "end")
    buffer = gpu.buffer()
    gpu.record(buffer, gpu.pipelines[0], 1)
    gpu.submit(buffer)
    gpu.finish()


def two_shaders_in_one_buffer(*shaders: str) -> None:
    gpu = Gpu(*shaders)
    buffer = gpu.buffer()
    gpu.begin(buffer)
    for pipeline, times in zip(gpu.pipelines, (2, 3), strict=True):
        gpu.bind(buffer, pipeline)
        for _ in range(times):
            vk.vkCmdDispatch(buffer, 1, 1, 1)
    vk.vkEndCommandBuffer(buffer)
    gpu.submit(buffer)
    gpu.finish()


def recorded_only(*shaders: str) -> None:
    gpu = Gpu(*shaders)
    gpu.record(gpu.buffer(), gpu.pipelines[0], 4)


def zero_workgroups(*shaders: str) -> None:
    gpu = Gpu(*shaders)
    buffer = gpu.buffer()
    gpu.record(buffer, gpu.pipelines[0], 4, (1, 0, 1))
    gpu.submit(buffer)
    gpu.finish()


def resubmitted(*shaders: str) -> None:
    gpu = Gpu(*shaders)
    buffer = gpu.buffer()
    gpu.record(buffer, gpu.pipelines[0], 2)
    for _ in range(3):
        gpu.submit(buffer)
        gpu.finish()


def recorded_anew(*shaders: str) -> None:
    gpu = Gpu(*shaders)
    buffer = gpu.buffer()
    for times in (7, 2):
        vk.vkResetCommandBuffer(buffer, 0)
        gpu.record(buffer, gpu.pipelines[0], times)
    gpu.submit(buffer)
    gpu.finish()
    vk.vkResetCommandPool(gpu.device, gpu.pool, 0)
    gpu.record(buffer, gpu.pipelines[1], 1)
    gpu.submit(buffer)
    gpu.finish()


def secondary_buffers(*shaders: str) -> None:
    gpu = Gpu(*shaders)
    secondary, primary = gpu.buffer(secondary=True), gpu.buffer()
    gpu.begin(secondary, secondary=True)
    gpu.bind(secondary, gpu.pipelines[0])
    for _ in range(3):
        vk.vkCmdDispatch(secondary, 1, 1, 1)
    vk.vkEndCommandBuffer(secondary)
    gpu.begin(primary)
    vk.vkCmdExecuteCommands(primary, 1, [secondary])
    vk.vkCmdExecuteCommands(primary, 1, [secondary])
    vk.vkEndCommandBuffer(primary)
    gpu.submit(primary)
    gpu.finish()


def function_pointers(*shaders: str) -> None:
    gpu = Gpu(*shaders)
    pointer = vk._vulkan.lib.vkGetDeviceProcAddr
    cast = vk.ffi.cast
    bind = cast("PFN_vkCmdBindPipeline", pointer(gpu.device, b"vkCmdBindPipeline"))
    dispatch = cast("PFN_vkCmdDispatch", pointer(gpu.device, b"vkCmdDispatch"))
    submit = cast("PFN_vkQueueSubmit", pointer(gpu.device, b"vkQueueSubmit"))
    buffer = gpu.buffer()
    gpu.begin(buffer)
    bind(buffer, vk.VK_PIPELINE_BIND_POINT_COMPUTE, gpu.pipelines[0])
    for _ in range(3):
        dispatch(buffer, 1, 1, 1)
    vk.vkCmdDispatch(buffer, 1, 1, 1)  # passes the loader's export and the hooked driver function
    vk.vkEndCommandBuffer(buffer)
    handles = vk.ffi.new("VkCommandBuffer[]", [buffer])
    info = vk.ffi.new("VkSubmitInfo*", {"sType": 4, "commandBufferCount": 1, "pCommandBuffers": handles})
    submit(gpu.queue, 1, info, vk.ffi.NULL)
    gpu.finish()
    gpu.submit(buffer)
    gpu.finish()


def submit2(*shaders: str) -> None:
    gpu = Gpu(*shaders, extensions=("VK_KHR_synchronization2",))
    submit = vk.vkGetDeviceProcAddr(gpu.device, "vkQueueSubmit2KHR")
    buffer = gpu.buffer()
    gpu.record(buffer, gpu.pipelines[0], 2)
    info = vk.VkCommandBufferSubmitInfo(commandBuffer=buffer)
    for _ in range(2):
        submit(gpu.queue, 1, [vk.VkSubmitInfo2(pCommandBufferInfos=[info])], None)
    gpu.finish()


def indirect(*shaders: str) -> None:
    gpu = Gpu(*shaders)
    info = vk.VkBufferCreateInfo(size=64, usage=vk.VK_BUFFER_USAGE_INDIRECT_BUFFER_BIT)
    arguments = vk.vkCreateBuffer(gpu.device, info, None)
    memory = vk.vkAllocateMemory(
        gpu.device, vk.VkMemoryAllocateInfo(allocationSize=4096, memoryTypeIndex=0), None
    )
    vk.vkBindBufferMemory(gpu.device, arguments, memory, 0)
    mapped = vk.vkMapMemory(gpu.device, memory, 0, 12, 0)
    mapped[:] = (1).to_bytes(4, "little") * 3
    vk.vkUnmapMemory(gpu.device, memory)
    buffer = gpu.buffer()
    gpu.begin(buffer)
    gpu.bind(buffer, gpu.pipelines[0])
    vk.vkCmdDispatchIndirect(buffer, arguments, 0)
    vk.vkCmdDispatchIndirect(buffer, arguments, 0)
    vk.vkEndCommandBuffer(buffer)
    gpu.submit(buffer)
    gpu.finish()


def dispatch_base(*shaders: str) -> None:
    gpu = Gpu(*shaders)
    buffer = gpu.buffer()
    gpu.begin(buffer)
    gpu.bind(buffer, gpu.pipelines[0])
    vk.vkCmdDispatchBase(buffer, 0, 0, 0, 1, 1, 1)
    vk.vkCmdDispatchBase(buffer, 0, 0, 0, 1, 1, 0)
    vk.vkEndCommandBuffer(buffer)
    gpu.submit(buffer)
    gpu.finish()


def two_threads(*shaders: str) -> None:
    gpu = Gpu(*shaders)
    lock = threading.Lock()

    def work(pipeline: object) -> None:
        pool = gpu.new_pool()
        for _ in range(50):
            buffer = gpu.buffer(pool)
            gpu.record(buffer, pipeline, 10)
            with lock:
                gpu.submit(buffer)

    threads = [threading.Thread(target=work, args=(pipeline,)) for pipeline in gpu.pipelines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gpu.finish()


def allocations(*shaders: str) -> None:
    gpu = Gpu(*shaders)

    def allocate(size: int) -> object:
        return vk.vkAllocateMemory(
            gpu.device, vk.VkMemoryAllocateInfo(allocationSize=size, memoryTypeIndex=0), None
        )

    first = allocate(1 << 20)
    second = allocate(2 << 20)
    vk.vkFreeMemory(gpu.device, first, None)
    vk.vkFreeMemory(gpu.device, second, None)
    allocate(1 << 19)


def killed(*shaders: str) -> None:
    resubmitted(*shaders)
    os.kill(os.getpid(), signal.SIGKILL)


def left_by_exit(*shaders: str) -> None:
    resubmitted(*shaders)
    os._exit(7)


def executes_itself(*shaders: str) -> None:
    resubmitted(*shaders)
    os.execv(sys.executable, [sys.executable, __file__, "resubmitted", *shaders])


def child_process(*shaders: str) -> None:
    resubmitted(*shaders)
    subprocess.run([sys.executable, __file__, "resubmitted", *shaders], check=True)


def forked(*shaders: str) -> None:
    child = os.fork()
    if child == 0:
        resubmitted(*shaders)
        os._exit(0)
    os.waitpid(child, 0)
    resubmitted(*shaders)


def second_instance(*shaders: str) -> None:
    resubmitted(*shaders)
    resubmitted(*shaders)


def too_many_phases(*shaders: str) -> None:
    for _ in range(5000):
        phase("decode", "begin")
    resubmitted(*shaders)


def endless(*shaders: str) -> None:
    resubmitted(*shaders)
    print("ready", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
