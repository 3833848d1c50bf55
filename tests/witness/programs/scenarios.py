"""Vulkan programs whose dispatches are known: ``scenarios.py NAME SHADER SHADER``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

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


def allocate(gpu: Gpu, size: int) -> object:
    info = vk.VkMemoryAllocateInfo(allocationSize=size, memoryTypeIndex=0)
    return vk.vkAllocateMemory(gpu.device, info, None)


def allocations(*shaders: str) -> None:
    gpu = Gpu(*shaders)
    first = allocate(gpu, 1 << 20)
    second = allocate(gpu, 2 << 20)
    vk.vkFreeMemory(gpu.device, first, None)
    vk.vkFreeMemory(gpu.device, second, None)
    allocate(gpu, 1 << 19)


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


def work(gpu: Gpu) -> None:
    buffer = gpu.buffer()
    gpu.record(buffer, gpu.pipelines[0], 2)
    gpu.submit(buffer)
    gpu.finish()


def markers_to_other_files(*shaders: str) -> None:
    gpu = Gpu(*shaders)
    reader, writer = os.pipe()
    with Path(os.devnull).open("w") as null, os.fdopen(writer, "w") as other_pipe:
        for stream in (null, other_pipe, sys.stderr):
            phase("decode", "begin", stream)
            work(gpu)
    os.close(reader)


def markers_through_another_descriptor(*shaders: str) -> None:
    gpu = Gpu(*shaders)
    with os.fdopen(os.dup(1), "w") as stream:
        phase("decode", "begin", stream)
        work(gpu)
        phase("decode", "end", stream)


def markers_of_a_child_with_another_output(*shaders: str) -> None:
    program = [sys.executable, __file__, "phases", *shaders]
    subprocess.run(program, check=True, stdout=subprocess.DEVNULL)


def markers_that_no_one_sees(*shaders: str) -> None:
    gpu = Gpu(*shaders)
    line = b'{"event":"phase","phase":"decode","state":"begin"}\n'
    os.write(1, line[:10])
    os.write(1, line[10:])
    work(gpu)
    os.write(1, line.replace(b":", b": "))
    work(gpu)


def markers_of_the_parent(*shaders: str) -> None:
    phase("decode", "begin")
    subprocess.run([sys.executable, __file__, "resubmitted", *shaders], check=True)
    phase("decode", "end")


def the_same_marker_often(*shaders: str) -> None:
    for _ in range(5000):
        phase("decode", "begin")
    resubmitted(*shaders)


def too_many_phases(*shaders: str) -> None:
    for number in range(5000):
        phase("decode", "begin", number=number)
    resubmitted(*shaders)


def two_api_versions(*shaders: str) -> None:
    gpus = [Gpu(*shaders, minor_version=minor) for minor in (0, 1)]
    for gpu in gpus:
        work(gpu)
        allocate(gpu, 1 << 20)


def two_processes_of_two_api_versions(*shaders: str) -> None:
    work(Gpu(*shaders, minor_version=0))
    subprocess.run([sys.executable, __file__, "resubmitted", *shaders], check=True)


def a_group_of_devices(*shaders: str) -> None:
    application = vk.VkApplicationInfo(apiVersion=vk.VK_MAKE_VERSION(1, 1, 0))
    instance = vk.vkCreateInstance(vk.VkInstanceCreateInfo(pApplicationInfo=application), None)
    (group,) = vk.vkEnumeratePhysicalDeviceGroups(instance)  # tells no place in the list of devices
    queue = vk.VkDeviceQueueCreateInfo(queueFamilyIndex=0, queueCount=1, pQueuePriorities=[1.0])
    vk.vkCreateDevice(group.physicalDevices[0], vk.VkDeviceCreateInfo(pQueueCreateInfos=[queue]), None)
    os.execv(sys.executable, [sys.executable, __file__, "resubmitted", *shaders])


def devices_one_after_the_other(*_shaders: str) -> None:
    for size in (3 << 20, 2 << 20):
        gpu = Gpu()
        allocate(gpu, size)
        vk.vkDestroyCommandPool(gpu.device, gpu.pool, None)
        vk.vkDestroyPipelineLayout(gpu.device, gpu.layout, None)
        vk.vkDestroyDevice(gpu.device, None)


def endless(*shaders: str) -> None:
    resubmitted(*shaders)
    print("ready", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
