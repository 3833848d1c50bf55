// Attaches the handlers of counters.c to the Vulkan functions of this process, by whatever way it reaches them.

const VULKAN_LIBRARY = /^(libvulkan\.so(\.1)?.*|libvulkan(\.1.*)?\.dylib|libMoltenVK\.dylib)$/;

// function: [handler on entry, handler on return]
const HANDLERS = {
  vkEnumeratePhysicalDevices: ['remember_arguments', 'on_enumerated'],
  vkCreateDevice: ['remember_arguments', 'on_device_created'],
  vkDestroyDevice: ['on_device_destroyed'],
  vkGetDeviceQueue: ['remember_arguments', 'on_queue'],
  vkGetDeviceQueue2: ['remember_arguments', 'on_queue2'],
  vkCreateShaderModule: ['remember_arguments', 'on_module_created'],
  vkCreateComputePipelines: ['remember_arguments', 'on_pipelines_created'],
  vkAllocateCommandBuffers: ['remember_arguments', 'on_command_buffers_allocated'],
  vkBeginCommandBuffer: ['on_command_buffer_cleared'],
  vkResetCommandBuffer: ['on_command_buffer_cleared'],
  vkResetCommandPool: ['on_command_pool_reset'],
  vkCmdBindPipeline: ['on_bind_pipeline'],
  vkCmdDispatch: ['on_dispatch', 'on_command_recorded'],
  vkCmdDispatchBase: ['on_dispatch_base', 'on_command_recorded'],
  vkCmdDispatchBaseKHR: ['on_dispatch_base', 'on_command_recorded'],
  vkCmdDispatchIndirect: ['on_dispatch_indirect', 'on_command_recorded'],
  vkCmdExecuteCommands: ['on_execute_commands', 'on_command_recorded'],
  vkQueueSubmit: ['on_submit', 'on_submitted'],
  vkQueueSubmit2: ['on_submit', 'on_submitted2'],
  vkQueueSubmit2KHR: ['on_submit', 'on_submitted2'],
  vkAllocateMemory: ['remember_arguments', 'on_memory_allocated'],
  vkFreeMemory: ['on_memory_freed'],
};
const RESOLVERS = ['vkGetInstanceProcAddr', 'vkGetDeviceProcAddr'];

const hooked = new Set();
let native = null;
let state = null;

function hook(address, handlers) {
  if (address.isNull() || hooked.has(address.toString()))
    return;
  hooked.add(address.toString());
  Interceptor.attach(address, handlers);
}

function nativeHandlers([onEnter, onLeave]) {
  return onLeave === undefined ? { onEnter: native[onEnter] } : { onEnter: native[onEnter], onLeave: native[onLeave] };
}

const resolverHandlers = {
  onEnter(args) {
    this.name = args[1].readUtf8String();
  },
  onLeave(address) {
    hookFunction(this.name, address);
    Interceptor.flush();
  },
};

function hookFunction(name, address) {
  if (name in HANDLERS)
    hook(address, nativeHandlers(HANDLERS[name]));
  else if (RESOLVERS.includes(name))
    hook(address, resolverHandlers);
}

function hookVulkan(module) {
  const properties = module.findExportByName('vkGetPhysicalDeviceProperties2');
  if (!VULKAN_LIBRARY.test(module.name) || properties === null)
    return;
  new NativeFunction(native.set_properties_function, 'void', ['pointer'])(properties);
  for (const name of [...Object.keys(HANDLERS), ...RESOLVERS]) {
    const address = module.findExportByName(name);
    if (address !== null)
      hookFunction(name, address);
  }
  Interceptor.flush();
}

function compile(source) {
  state = Memory.alloc(4096);
  native = new CModule(source, { state });
  if (new NativeFunction(native.state_size, 'size_t', [])() > 4096)
    throw new Error('the state of the counters has outgrown its memory');
}

function libc(name, result, args) {
  return new NativeFunction(Module.getGlobalExportByName(name), result, args);
}

function mapShared(path, size) {
  const O_RDWR = 2, PROT_READ_WRITE = 3, MAP_SHARED = 1;
  const file = libc('open', 'int', ['pointer', 'int'])(Memory.allocUtf8String(path), O_RDWR);
  if (file < 0)
    throw new Error('the process cannot open ' + path);
  const mapped = libc('mmap', 'pointer', ['pointer', 'size_t', 'int', 'int', 'int', 'int64'])(
    NULL, size, PROT_READ_WRITE, MAP_SHARED, file, 0);
  libc('close', 'int', ['int'])(file);
  if (mapped.equals(ptr(-1)))
    throw new Error('the process cannot map ' + path);
  return mapped;
}

// A child that closes every descriptor before it executes a program (Python's subprocess does) would cut off the
// tracer and hang in it: its descriptors, which are cloaked, stay open until the program is executed.
function keepTracerConnected() {
  const address = Module.findGlobalExportByName('close_range');
  if (address === null)
    return;
  const LAST_CLOAKED = 4096;
  const closeRange = new NativeFunction(address, 'int', ['uint', 'uint', 'int']);
  Interceptor.replace(address, new NativeCallback((first, last, flags) => {
    for (let descriptor = first; descriptor <= Math.min(last, LAST_CLOAKED); descriptor++) {
      if (Cloak.hasFileDescriptor(descriptor)) {
        if (descriptor > first)
          closeRange(first, descriptor - 1, flags);
        first = descriptor + 1;
      }
    }
    return first > last ? 0 : closeRange(first, last, flags);
  }, 'int', ['uint', 'uint', 'int']));
}

function addMarker(text) {
  const bytes = Memory.allocUtf8String(text);
  new NativeFunction(native.add_marker, 'void', ['pointer', 'size_t'])(bytes, text.length);
}

// What fstat tells of the file to which markers go: the standard output of the program. Its children are given it,
// for they may have another one.
function statusOfOutput(known) {
  const STANDARD_OUTPUT = 1;
  const status = Memory.alloc(512);
  if (known !== null)
    status.writeByteArray(known);
  else if (libc('fstat', 'int', ['int', 'pointer'])(STANDARD_OUTPUT, status) !== 0)
    throw new Error('the process has no standard output');
  return status;
}

rpc.exports = {
  observe(source, path, size, markers, knownOutput) {
    compile(source);
    if (new NativeFunction(native.counters_size, 'size_t', [])() != size)
      throw new Error('counters.c and counters.py describe different layouts');
    const output = statusOfOutput(knownOutput);
    new NativeFunction(native.start_counting, 'void', ['pointer', 'pointer', 'pointer'])(
      mapShared(path, size), Module.getGlobalExportByName('fstat'), output);
    markers.forEach(addMarker);
    keepTracerConnected();
    Interceptor.attach(Module.getGlobalExportByName('write'), { onEnter: native.on_write });
    Interceptor.attach(Module.getGlobalExportByName('writev'), { onEnter: native.on_writev });
    Interceptor.flush();
    Process.attachModuleObserver({ onAdded: hookVulkan });
    return Array.from(new Uint8Array(output.readByteArray(16)));
  },
};
