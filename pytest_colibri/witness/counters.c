/*
 * Counts what a process gives to its Vulkan devices, inside that process.
 *
 * Everything that must outlive the process lies in `Counters`, a file that is mapped here and read by the
 * witness (counters.py describes the same layout). `State` is private: what the handles of the process stand
 * for. The compiler allows no writable globals, so both are memory that agent.js hands over.
 *
 * One call may pass two hooks, the loader's export and the driver's function behind it. Handlers are therefore
 * idempotent, or count only the outermost call on their command buffer or queue, which Vulkan lets one thread
 * use at a time.
 */
#include <gum/guminterceptor.h>
#include <string.h>

#define MAX_DEVICES 16
#define MAX_SHADERS 1024
#define MAX_WINDOWS 4096
#define MAX_MARKERS 65536
#define MAX_COUNTS 65536
#define MAX_MEMORY_TYPES 32
#define MAX_MARKER_BYTES 248
#define MAX_NAME_BYTES 256
#define UUID_BYTES 16
#define DIGEST_BYTES 32

#define UNKNOWN 0xffffffffu
#define SUBMITS 0xfffffffeu

enum { DEVICES_LOST = 1, SHADERS_LOST = 2, WINDOWS_LOST = 4, COUNTS_LOST = 8 };

typedef struct {
  gchar name[MAX_NAME_BYTES];
  guint8 uuid[UUID_BYTES];
  guint32 index, type;
  guint32 pci_domain, pci_bus, pci_device, pci_function;
} Identity;

typedef struct {
  Identity identity;
  guint64 allocated[MAX_MEMORY_TYPES], live[MAX_MEMORY_TYPES], peak[MAX_MEMORY_TYPES];
} Device;

/* All that was counted after a marker with this text; the first one is for what precedes every marker. */
typedef struct { gchar text[MAX_MARKER_BYTES]; } Window;

typedef struct {
  guint32 device, window, shader, padding;
  guint64 recorded, executed;
} Count;

typedef struct {
  guint32 size, lost, devices, shaders, windows, markers, counts, padding;
  Device device[MAX_DEVICES];
  guint8 shader[MAX_SHADERS][DIGEST_BYTES];
  Window window[MAX_WINDOWS];
  guint32 marker[MAX_MARKERS];
  Count count[MAX_COUNTS];
} Counters;

typedef gpointer Handle;

/* Any `struct stat` holds the device and the number of the file in its first bytes. */
typedef struct { guint64 device_and_number[2], rest[62]; } FileStatus;

typedef struct {
  GMutex lock;
  Counters *counters;
  int (*fstat) (int descriptor, FileStatus * status);
  FileStatus output;
  void (*get_properties2) (Handle physical_device, gpointer properties);
  guint32 window;
  GArray *prefixes;
  GHashTable *place_of_physical, *devices, *queues, *command_buffers;
  GHashTable *shader_of_module, *shader_of_pipeline, *allocations, *counts, *window_of_text;
} State;

extern State state;

typedef struct { guint32 length; gchar text[MAX_MARKER_BYTES]; } Prefix;
typedef struct { guint32 device, depth; } Queue;
typedef struct { guint32 shader; guint64 dispatches; } Tally;
typedef struct { guint32 device, depth, shader; Handle pool; GArray *tallies; } CommandBuffer;
typedef struct { Handle owner; guint32 device, type; guint64 bytes; } Allocation;

/* The Vulkan structures that are read here, as every 64-bit platform lays them out. */

enum { SUCCESS = 0, COMPUTE = 1 };
enum { MODULE_INFO = 16, PROPERTIES2 = 1000059001, ID_PROPERTIES = 1000071004, PCI_BUS_INFO = 1000212000 };

typedef struct Chained Chained;
struct Chained { guint32 type; Chained *next; };
typedef struct { Chained head; guint32 flags; gsize size; const guint8 *code; } ModuleInfo;
typedef struct { Chained head; guint32 flags, stage; Handle module; gchar *entry; gpointer constants; } StageInfo;
typedef struct { Chained head; guint32 flags; StageInfo stage; Handle layout, base; gint32 base_index; } PipelineInfo;
typedef struct { Chained head; Handle pool; guint32 level, count; } CommandBuffersInfo;
typedef struct { Chained head; guint64 bytes; guint32 type; } MemoryInfo;
typedef struct {
  Chained head;
  guint32 waits; gpointer wait, wait_stages;
  guint32 command_buffers; Handle *command_buffer;
  guint32 signals; gpointer signal;
} SubmitInfo;
typedef struct { Chained head; Handle command_buffer; guint32 device_mask; } CommandBufferInfo;
typedef struct {
  Chained head;
  guint32 flags, waits; gpointer wait;
  guint32 command_buffers; CommandBufferInfo *command_buffer;
  guint32 signals; gpointer signal;
} SubmitInfo2;
typedef struct { gchar *bytes; gsize length; } Slice;

typedef struct {
  Chained head;
  guint32 api_version, driver_version, vendor, device, type;
  gchar name[MAX_NAME_BYTES];
  guint8 rest[1024];
} Properties2;
typedef struct { Chained head; guint8 uuid[UUID_BYTES], driver_uuid[UUID_BYTES], luid[16]; } IdProperties;
typedef struct { Chained head; guint32 domain, bus, device, function; } PciBusInfo;

/* The arguments of the call that a handler needs again once the call has returned. */
typedef struct { gpointer argument[6]; } Call;

static gpointer
argument (GumInvocationContext * ic, guint n)
{
  return gum_invocation_context_get_nth_argument (ic, n);
}

static guint32
argument_u32 (GumInvocationContext * ic, guint n)
{
  return (guint32) GPOINTER_TO_SIZE (argument (ic, n));
}

static gboolean
succeeded (GumInvocationContext * ic)
{
  return (gint32) GPOINTER_TO_SIZE (gum_invocation_context_get_return_value (ic)) == SUCCESS;
}

static gboolean
same_bytes (const void * a, const void * b, gsize length)
{
  const guint8 * left = a, * right = b;
  gsize i;

  for (i = 0; i != length; i++)
    if (left[i] != right[i])
      return FALSE;
  return TRUE;
}

void
remember_arguments (GumInvocationContext * ic)
{
  Call * call = GUM_IC_GET_INVOCATION_DATA (ic, Call);
  guint i;

  for (i = 0; i != 6; i++)
    call->argument[i] = argument (ic, i);
}

static gpointer
remembered (GumInvocationContext * ic, guint n)
{
  return GUM_IC_GET_INVOCATION_DATA (ic, Call)->argument[n];
}

static guint32
remembered_u32 (GumInvocationContext * ic, guint n)
{
  return (guint32) GPOINTER_TO_SIZE (remembered (ic, n));
}

/* Handles of pipelines, modules and memory are unique within their device only. */
static gpointer
key_on (guint32 device, Handle handle)
{
  return GSIZE_TO_POINTER (GPOINTER_TO_SIZE (handle) ^ ((gsize) device << 59));
}

static void
set_number (GHashTable * table, gpointer key, guint32 number)
{
  g_hash_table_insert (table, key, GSIZE_TO_POINTER ((gsize) number + 1));
}

static guint32
get_number (GHashTable * table, gpointer key)
{
  gpointer found = g_hash_table_lookup (table, key);
  return (found == NULL) ? UNKNOWN : (guint32) (GPOINTER_TO_SIZE (found) - 1);
}

/* Counting */

static Count *
count_of (guint32 device, guint32 shader)
{
  Counters * counters = state.counters;
  gpointer key = GSIZE_TO_POINTER (((gsize) state.window << 40) | ((gsize) device << 32) | shader);
  guint32 slot = get_number (state.counts, key);
  Count * count;

  if (slot != UNKNOWN)
    return &counters->count[slot];
  if (counters->counts == MAX_COUNTS)
  {
    counters->lost |= COUNTS_LOST;
    return NULL;
  }
  slot = counters->counts;
  count = &counters->count[slot];
  count->device = device;
  count->window = state.window;
  count->shader = shader;
  counters->counts++;
  set_number (state.counts, key, slot);
  return count;
}

static void
add_executed (guint32 device, guint32 shader, guint64 times)
{
  Count * count = count_of (device, shader);
  if (count != NULL)
    count->executed += times;
}

static void
add_to_tally (CommandBuffer * buffer, guint32 shader, guint64 dispatches)
{
  Tally fresh;
  guint i;

  for (i = 0; i != buffer->tallies->len; i++)
  {
    Tally * tally = &g_array_index (buffer->tallies, Tally, i);
    if (tally->shader == shader)
    {
      tally->dispatches += dispatches;
      return;
    }
  }
  fresh.shader = shader;
  fresh.dispatches = dispatches;
  g_array_append_val (buffer->tallies, fresh);
}

static void
execute (Handle handle)
{
  CommandBuffer * buffer = g_hash_table_lookup (state.command_buffers, handle);
  guint i;

  if (buffer == NULL)
    return;
  for (i = 0; i != buffer->tallies->len; i++)
  {
    Tally * tally = &g_array_index (buffer->tallies, Tally, i);
    add_executed (buffer->device, tally->shader, tally->dispatches);
  }
}

/* Devices and queues */

void
on_enumerated (GumInvocationContext * ic)
{
  guint32 * count = remembered (ic, 1);
  Handle * physical = remembered (ic, 2);
  guint32 i;

  if (physical == NULL || (gint32) GPOINTER_TO_SIZE (gum_invocation_context_get_return_value (ic)) < SUCCESS)
    return;
  g_mutex_lock (&state.lock);
  for (i = 0; i != *count; i++)
    set_number (state.place_of_physical, physical[i], i);
  g_mutex_unlock (&state.lock);
}

static void
identify (Handle physical, Identity * identity)
{
  Properties2 properties;
  IdProperties id;
  PciBusInfo pci;

  memset (&properties, 0, sizeof (properties));
  memset (&id, 0, sizeof (id));
  memset (&pci, 0xff, sizeof (pci));
  properties.head.type = PROPERTIES2;
  properties.head.next = &id.head;
  id.head.type = ID_PROPERTIES;
  id.head.next = &pci.head;
  pci.head.type = PCI_BUS_INFO;
  pci.head.next = NULL;
  state.get_properties2 (physical, &properties);

  memset (identity, 0, sizeof (Identity));
  memcpy (identity->name, properties.name, MAX_NAME_BYTES);
  memcpy (identity->uuid, id.uuid, UUID_BYTES);
  identity->type = properties.type;
  identity->pci_domain = pci.domain;
  identity->pci_bus = pci.bus;
  identity->pci_device = pci.device;
  identity->pci_function = pci.function;
}

static gboolean
has_uuid (const Identity * identity)
{
  guint8 none[UUID_BYTES];

  memset (none, 0, UUID_BYTES);
  return !same_bytes (identity->uuid, none, UUID_BYTES);
}

/* An instance of Vulkan 1.0 need not tell the UUID of a device that another one tells. */
static gboolean
same_device (const Identity * a, const Identity * b)
{
  if (has_uuid (a) && has_uuid (b))
    return same_bytes (a->uuid, b->uuid, UUID_BYTES);
  return a->index == b->index && same_bytes (a->name, b->name, MAX_NAME_BYTES);
}

static guint32
slot_of_device (const Identity * identity)
{
  Counters * counters = state.counters;
  guint32 i;

  for (i = 0; i != counters->devices; i++)
  {
    Identity * known = &counters->device[i].identity;
    if (same_device (known, identity))
    {
      if (!has_uuid (known))
        *known = *identity;
      return i;
    }
  }
  if (counters->devices == MAX_DEVICES)
  {
    counters->lost |= DEVICES_LOST;
    return UNKNOWN;
  }
  counters->device[i].identity = *identity;
  counters->devices++;
  return i;
}

void
on_device_created (GumInvocationContext * ic)
{
  Handle physical = remembered (ic, 0);
  Handle * device = remembered (ic, 3);
  Identity identity;
  guint32 slot;

  if (!succeeded (ic))
    return;
  identify (physical, &identity);
  g_mutex_lock (&state.lock);
  identity.index = get_number (state.place_of_physical, physical);
  slot = slot_of_device (&identity);
  if (slot != UNKNOWN)
    set_number (state.devices, *device, slot);
  g_mutex_unlock (&state.lock);
}

static void
release (Allocation * allocation)
{
  state.counters->device[allocation->device].live[allocation->type] -= allocation->bytes;
}

void
on_device_destroyed (GumInvocationContext * ic)
{
  Handle device = argument (ic, 0);
  GHashTableIter iter;
  gpointer key, allocation;

  g_mutex_lock (&state.lock);
  g_hash_table_iter_init (&iter, state.allocations);
  while (g_hash_table_iter_next (&iter, &key, &allocation))
  {
    if (((Allocation *) allocation)->owner == device)
    {
      release (allocation);
      g_hash_table_iter_remove (&iter);
    }
  }
  g_mutex_unlock (&state.lock);
}

static void
add_queue (Handle device, Handle handle)
{
  guint32 slot;

  g_mutex_lock (&state.lock);
  slot = get_number (state.devices, device);
  if (slot != UNKNOWN && handle != NULL && !g_hash_table_contains (state.queues, handle))
  {
    Queue * queue = g_new0 (Queue, 1);
    queue->device = slot;
    g_hash_table_insert (state.queues, handle, queue);
  }
  g_mutex_unlock (&state.lock);
}

void
on_queue (GumInvocationContext * ic)
{
  add_queue (remembered (ic, 0), *(Handle *) remembered (ic, 3));
}

void
on_queue2 (GumInvocationContext * ic)
{
  add_queue (remembered (ic, 0), *(Handle *) remembered (ic, 2));
}

/* Shaders and pipelines */

static guint32
slot_of_shader (const guint8 * digest)
{
  Counters * counters = state.counters;
  guint32 i;

  for (i = 0; i != counters->shaders; i++)
    if (same_bytes (counters->shader[i], digest, DIGEST_BYTES))
      return i;
  if (counters->shaders == MAX_SHADERS)
  {
    counters->lost |= SHADERS_LOST;
    return UNKNOWN;
  }
  memcpy (counters->shader[i], digest, DIGEST_BYTES);
  counters->shaders++;
  return i;
}

static guint32
shader_of_code (const ModuleInfo * info)
{
  guint8 digest[DIGEST_BYTES];
  gsize length = DIGEST_BYTES;
  GChecksum * checksum = g_checksum_new (G_CHECKSUM_SHA256);

  g_checksum_update (checksum, info->code, info->size);
  g_checksum_get_digest (checksum, digest, &length);
  g_checksum_free (checksum);
  return slot_of_shader (digest);
}

void
on_module_created (GumInvocationContext * ic)
{
  guint32 device;

  if (!succeeded (ic))
    return;
  g_mutex_lock (&state.lock);
  device = get_number (state.devices, remembered (ic, 0));
  set_number (state.shader_of_module, key_on (device, *(Handle *) remembered (ic, 3)),
      shader_of_code (remembered (ic, 1)));
  g_mutex_unlock (&state.lock);
}

static guint32
shader_of_stage (guint32 device, const StageInfo * stage)
{
  const Chained * chained;

  if (stage->module != NULL)
    return get_number (state.shader_of_module, key_on (device, stage->module));
  for (chained = stage->head.next; chained != NULL; chained = chained->next)
    if (chained->type == MODULE_INFO)
      return shader_of_code ((const ModuleInfo *) chained);
  return UNKNOWN;
}

void
on_pipelines_created (GumInvocationContext * ic)
{
  const PipelineInfo * info = remembered (ic, 3);
  Handle * pipeline = remembered (ic, 5);
  guint32 count = remembered_u32 (ic, 2), device, i;

  g_mutex_lock (&state.lock);
  device = get_number (state.devices, remembered (ic, 0));
  for (i = 0; i != count; i++)
    if (pipeline[i] != NULL)
      set_number (state.shader_of_pipeline, key_on (device, pipeline[i]), shader_of_stage (device, &info[i].stage));
  g_mutex_unlock (&state.lock);
}

/* Command buffers */

static void
clear (CommandBuffer * buffer)
{
  buffer->shader = UNKNOWN;
  g_array_set_size (buffer->tallies, 0);
}

void
on_command_buffers_allocated (GumInvocationContext * ic)
{
  const CommandBuffersInfo * info = remembered (ic, 1);
  Handle * handle = remembered (ic, 2);
  guint32 device, i;

  if (!succeeded (ic))
    return;
  g_mutex_lock (&state.lock);
  device = get_number (state.devices, remembered (ic, 0));
  for (i = 0; i != info->count && device != UNKNOWN; i++)
  {
    CommandBuffer * buffer = g_hash_table_lookup (state.command_buffers, handle[i]);
    if (buffer == NULL)
    {
      buffer = g_new0 (CommandBuffer, 1);
      buffer->tallies = g_array_new (FALSE, FALSE, sizeof (Tally));
      g_hash_table_insert (state.command_buffers, handle[i], buffer);
    }
    buffer->device = device;
    buffer->depth = 0;
    buffer->pool = info->pool;
    clear (buffer);
  }
  g_mutex_unlock (&state.lock);
}

void
on_command_buffer_cleared (GumInvocationContext * ic)
{
  CommandBuffer * buffer;

  g_mutex_lock (&state.lock);
  buffer = g_hash_table_lookup (state.command_buffers, argument (ic, 0));
  if (buffer != NULL)
    clear (buffer);
  g_mutex_unlock (&state.lock);
}

void
on_command_pool_reset (GumInvocationContext * ic)
{
  Handle pool = argument (ic, 1);
  GHashTableIter iter;
  gpointer handle, buffer;

  g_mutex_lock (&state.lock);
  g_hash_table_iter_init (&iter, state.command_buffers);
  while (g_hash_table_iter_next (&iter, &handle, &buffer))
    if (((CommandBuffer *) buffer)->pool == pool)
      clear (buffer);
  g_mutex_unlock (&state.lock);
}

void
on_bind_pipeline (GumInvocationContext * ic)
{
  CommandBuffer * buffer;

  if (argument_u32 (ic, 1) != COMPUTE)
    return;
  g_mutex_lock (&state.lock);
  buffer = g_hash_table_lookup (state.command_buffers, argument (ic, 0));
  if (buffer != NULL)
    buffer->shader = get_number (state.shader_of_pipeline, key_on (buffer->device, argument (ic, 2)));
  g_mutex_unlock (&state.lock);
}

static void
record_dispatch (GumInvocationContext * ic, gboolean has_workgroups)
{
  CommandBuffer * buffer;

  g_mutex_lock (&state.lock);
  buffer = g_hash_table_lookup (state.command_buffers, argument (ic, 0));
  if (buffer != NULL && buffer->depth++ == 0)
  {
    Count * count = count_of (buffer->device, buffer->shader);
    if (count != NULL)
      count->recorded++;
    if (has_workgroups)
      add_to_tally (buffer, buffer->shader, 1);
  }
  g_mutex_unlock (&state.lock);
}

static gboolean
any_workgroup (GumInvocationContext * ic, guint first)
{
  return argument_u32 (ic, first) != 0 && argument_u32 (ic, first + 1) != 0 && argument_u32 (ic, first + 2) != 0;
}

void
on_dispatch (GumInvocationContext * ic)
{
  remember_arguments (ic);
  record_dispatch (ic, any_workgroup (ic, 1));
}

void
on_dispatch_base (GumInvocationContext * ic)
{
  remember_arguments (ic);
  record_dispatch (ic, any_workgroup (ic, 4));
}

void
on_dispatch_indirect (GumInvocationContext * ic)
{
  remember_arguments (ic);
  record_dispatch (ic, TRUE);
}

void
on_execute_commands (GumInvocationContext * ic)
{
  CommandBuffer * buffer;
  Handle * secondary = argument (ic, 2);
  guint32 count = argument_u32 (ic, 1), i, j;

  remember_arguments (ic);
  g_mutex_lock (&state.lock);
  buffer = g_hash_table_lookup (state.command_buffers, argument (ic, 0));
  if (buffer != NULL && buffer->depth++ == 0)
  {
    for (i = 0; i != count; i++)
    {
      CommandBuffer * executed = g_hash_table_lookup (state.command_buffers, secondary[i]);
      for (j = 0; executed != NULL && j != executed->tallies->len; j++)
      {
        Tally * tally = &g_array_index (executed->tallies, Tally, j);
        add_to_tally (buffer, tally->shader, tally->dispatches);
      }
    }
  }
  g_mutex_unlock (&state.lock);
}

void
on_command_recorded (GumInvocationContext * ic)
{
  CommandBuffer * buffer;

  g_mutex_lock (&state.lock);
  buffer = g_hash_table_lookup (state.command_buffers, remembered (ic, 0));
  if (buffer != NULL && buffer->depth != 0)
    buffer->depth--;
  g_mutex_unlock (&state.lock);
}

/* Submits: counted when the call has succeeded, for a refused one executes nothing */

void
on_submit (GumInvocationContext * ic)
{
  Queue * queue;

  remember_arguments (ic);
  g_mutex_lock (&state.lock);
  queue = g_hash_table_lookup (state.queues, argument (ic, 0));
  if (queue != NULL)
    queue->depth++;
  g_mutex_unlock (&state.lock);
}

static gboolean
outermost_success (GumInvocationContext * ic, Queue * queue)
{
  return queue != NULL && --queue->depth == 0 && succeeded (ic) && remembered_u32 (ic, 1) != 0;
}

void
on_submitted (GumInvocationContext * ic)
{
  const SubmitInfo * batch = remembered (ic, 2);
  guint32 batches = remembered_u32 (ic, 1), i, j;
  Queue * queue;

  g_mutex_lock (&state.lock);
  queue = g_hash_table_lookup (state.queues, remembered (ic, 0));
  if (outermost_success (ic, queue))
  {
    add_executed (queue->device, SUBMITS, 1);
    for (i = 0; i != batches; i++)
      for (j = 0; j != batch[i].command_buffers; j++)
        execute (batch[i].command_buffer[j]);
  }
  g_mutex_unlock (&state.lock);
}

void
on_submitted2 (GumInvocationContext * ic)
{
  const SubmitInfo2 * batch = remembered (ic, 2);
  guint32 batches = remembered_u32 (ic, 1), i, j;
  Queue * queue;

  g_mutex_lock (&state.lock);
  queue = g_hash_table_lookup (state.queues, remembered (ic, 0));
  if (outermost_success (ic, queue))
  {
    add_executed (queue->device, SUBMITS, 1);
    for (i = 0; i != batches; i++)
      for (j = 0; j != batch[i].command_buffers; j++)
        execute (batch[i].command_buffer[j].command_buffer);
  }
  g_mutex_unlock (&state.lock);
}

/* Memory */

void
on_memory_allocated (GumInvocationContext * ic)
{
  Handle owner = remembered (ic, 0);
  const MemoryInfo * info = remembered (ic, 1);
  guint32 slot;
  gpointer key;

  if (!succeeded (ic) || info->type >= MAX_MEMORY_TYPES)
    return;
  g_mutex_lock (&state.lock);
  slot = get_number (state.devices, owner);
  key = key_on (slot, *(Handle *) remembered (ic, 3));
  if (slot != UNKNOWN && !g_hash_table_contains (state.allocations, key))
  {
    Device * device = &state.counters->device[slot];
    Allocation * allocation = g_new0 (Allocation, 1);
    allocation->owner = owner;
    allocation->device = slot;
    allocation->type = info->type;
    allocation->bytes = info->bytes;
    g_hash_table_insert (state.allocations, key, allocation);
    device->allocated[info->type] += info->bytes;
    device->live[info->type] += info->bytes;
    device->peak[info->type] = MAX (device->peak[info->type], device->live[info->type]);
  }
  g_mutex_unlock (&state.lock);
}

void
on_memory_freed (GumInvocationContext * ic)
{
  Allocation * allocation;
  gpointer key;

  g_mutex_lock (&state.lock);
  key = key_on (get_number (state.devices, argument (ic, 0)), argument (ic, 1));
  allocation = g_hash_table_lookup (state.allocations, key);
  if (allocation != NULL)
  {
    release (allocation);
    g_hash_table_remove (state.allocations, key);
  }
  g_mutex_unlock (&state.lock);
}

/* Markers: what the process writes when a phase begins or ends */

static gboolean
is_marker (const gchar * text, gsize length)
{
  guint i;

  for (i = 0; i != state.prefixes->len; i++)
  {
    Prefix * prefix = &g_array_index (state.prefixes, Prefix, i);
    if (length >= prefix->length && same_bytes (text, prefix->text, prefix->length))
      return TRUE;
  }
  return FALSE;
}

static gboolean
reaches_output (int descriptor)
{
  FileStatus status;

  return state.fstat (descriptor, &status) == 0 &&
      same_bytes (&status, &state.output, sizeof (status.device_and_number));
}

static guint32
slot_of_window (const gchar * text)
{
  Counters * counters = state.counters;
  guint32 slot = get_number (state.window_of_text, (gpointer) text);
  gchar * kept;

  if (slot != UNKNOWN)
    return slot;
  if (counters->windows == MAX_WINDOWS)
    return UNKNOWN;
  slot = counters->windows;
  kept = counters->window[slot].text;
  memcpy (kept, text, MAX_MARKER_BYTES);
  counters->windows++;
  set_number (state.window_of_text, kept, slot);
  return slot;
}

static void
open_window (const gchar * text)
{
  Counters * counters = state.counters;
  guint32 slot;

  g_mutex_lock (&state.lock);
  slot = slot_of_window (text);
  if (slot == UNKNOWN || counters->markers == MAX_MARKERS)
  {
    counters->lost |= WINDOWS_LOST;
    state.window = 0;
  }
  else
  {
    counters->marker[counters->markers] = slot;
    counters->markers++;
    state.window = slot;
  }
  g_mutex_unlock (&state.lock);
}

static void
see_written (int descriptor, const Slice * slice, guint32 slices)
{
  gchar text[MAX_MARKER_BYTES];
  gsize length = 0;
  guint32 i;

  memset (text, 0, sizeof (text));
  for (i = 0; i != slices && length != MAX_MARKER_BYTES - 1; i++)
  {
    gsize part = MIN (slice[i].length, MAX_MARKER_BYTES - 1 - length);
    memcpy (text + length, slice[i].bytes, part);
    length += part;
  }
  if (is_marker (text, length) && reaches_output (descriptor))
    open_window (text);
}

void
on_write (GumInvocationContext * ic)
{
  Slice whole;

  whole.bytes = argument (ic, 1);
  whole.length = GPOINTER_TO_SIZE (argument (ic, 2));
  if (whole.bytes != NULL)
    see_written ((int) argument_u32 (ic, 0), &whole, 1);
}

void
on_writev (GumInvocationContext * ic)
{
  const Slice * slice = argument (ic, 1);

  if (slice != NULL)
    see_written ((int) argument_u32 (ic, 0), slice, argument_u32 (ic, 2));
}

/* Called by agent.js before any hook is in place */

static GHashTable *
new_table (GDestroyNotify destroy)
{
  return g_hash_table_new_full (g_direct_hash, g_direct_equal, NULL, destroy);
}

gsize
counters_size (void)
{
  return sizeof (Counters);
}

gsize
state_size (void)
{
  return sizeof (State);
}

void
start_counting (Counters * counters, gpointer fstat, const FileStatus * output)
{
  g_mutex_init (&state.lock);
  counters->size = sizeof (Counters);
  counters->windows = 1;
  state.counters = counters;
  state.fstat = fstat;
  state.output = *output;
  state.window = 0;
  state.prefixes = g_array_new (FALSE, TRUE, sizeof (Prefix));
  state.place_of_physical = new_table (NULL);
  state.devices = new_table (NULL);
  state.queues = new_table (g_free);
  state.command_buffers = new_table (NULL);
  state.shader_of_module = new_table (NULL);
  state.shader_of_pipeline = new_table (NULL);
  state.allocations = new_table (g_free);
  state.counts = new_table (NULL);
  state.window_of_text = g_hash_table_new_full (g_str_hash, g_str_equal, NULL, NULL);
}

void
add_marker (const gchar * text, gsize length)
{
  Prefix prefix;

  prefix.length = MIN (length, MAX_MARKER_BYTES);
  memcpy (prefix.text, text, prefix.length);
  g_array_append_val (state.prefixes, prefix);
}

void
set_properties_function (gpointer function)
{
  state.get_properties2 = function;
}
