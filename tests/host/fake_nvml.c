/* The part of NVML that is asked for, on a machine with a chip that shares the RAM and three cards, the last in slices.
 * The processes on the third are the lines of the file that FAKE_NVML_PROCESSES names: what (share, held or account),
 * process, and two or three figures. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, GPU_IS_LOST = 15 };

static const char *const NAMES[] = {"NVIDIA GB10", "NVIDIA A100-SXM4-80GB", "NVIDIA H200",
                                   "NVIDIA H100"};

int nvmlInitWithFlags(unsigned flags) { (void)flags; return SUCCESS; }
int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    snprintf(text, size, "580.95.05");
    return SUCCESS;
}
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 4; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(uintptr_t)(index + 1);
    return SUCCESS;
}
static unsigned place(void *device) { return (unsigned)(uintptr_t)device - 1; }
int nvmlDeviceGetName(void *device, char *text, unsigned size) {
    snprintf(text, size, "%s", NAMES[place(device)]);
    return SUCCESS;
}
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
    snprintf(text, size, "GPU-0000000%u-1111-2222-3333-444455556666", place(device));
    return SUCCESS;
}
struct pci {
    char short_bus[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
};
int nvmlDeviceGetPciInfo_v3(void *device, struct pci *pci) {
    memset(pci, 0, sizeof *pci);
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:0%u:00.0", place(device) + 1);
    return SUCCESS;
}
struct memory {
    unsigned long long total, free, used;
};
int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory) {
    if (place(device) == 0) return NOT_SUPPORTED;
    if (place(device) == 1) return NO_PERMISSION;
    *memory = (struct memory){150754820096ULL, 150000000000ULL, 754820096ULL};
    return SUCCESS;
}
int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    *current = *pending = place(device) == 3;
    return place(device) == 0 ? NOT_SUPPORTED : SUCCESS;
}
struct line {
    unsigned pid;
    unsigned long long first, second, third;
};
static unsigned lines(const char *what, struct line *found, unsigned room) {
    const char *path = getenv("FAKE_NVML_PROCESSES");
    FILE *file = path ? fopen(path, "r") : NULL;
    char word[16];
    struct line line;
    unsigned count = 0;
    while (file && fscanf(file, "%15s %u %llu %llu %llu", word, &line.pid, &line.first, &line.second, &line.third) == 5)
        if (!strcmp(word, what) && count < room) found[count++] = line;
    if (file) fclose(file);
    return count;
}
static int tells_processes(void *device) {
    struct line lost[1];
    if (lines("lost", lost, 1)) return GPU_IS_LOST;
    return place(device) == 2 ? SUCCESS : place(device) == 1 ? NO_PERMISSION : NOT_SUPPORTED;
}
struct share {
    unsigned pid;
    unsigned long long time;
    unsigned sm, memory, encoder, decoder;
};
int nvmlDeviceGetProcessUtilization(void *device, struct share *shares, unsigned *count, unsigned long long since) {
    struct line found[64];
    unsigned total = lines("share", found, 64), newer = 0;
    int status = tells_processes(device);
    if (status != SUCCESS) return status;
    for (unsigned i = 0; i < total; i++) {
        if (found[i].first <= since) continue;
        if (shares && newer < *count)
            shares[newer] = (struct share){found[i].pid, found[i].first, (unsigned)found[i].second, 0, 0, 0};
        newer++;
    }
    *count = newer;
    if (shares) return SUCCESS;
    return newer ? INSUFFICIENT_SIZE : getenv("FAKE_NVML_SUCCEEDS") ? SUCCESS : NOT_FOUND;
}
struct process {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process *processes) {
    struct line found[64];
    unsigned total = place(device) == 2 ? lines("held", found, 64) : 0, room = *count;
    *count = total;
    if (total > room) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < total; i++)
        processes[i] = (struct process){found[i].pid, found[i].first, -1u, -1u};
    return SUCCESS;
}
int nvmlDeviceGetAccountingMode(void *device, unsigned *mode) {
    *mode = place(device) == 2;
    return place(device) == 0 ? NOT_SUPPORTED : SUCCESS;
}
struct account {
    unsigned gpu, memory;
    unsigned long long peak, time, start;
    unsigned is_running, reserved[5];
};
int nvmlDeviceGetAccountingStats(void *device, unsigned pid, struct account *account) {
    struct line found[64];
    unsigned total = place(device) == 2 ? lines("account", found, 64) : 0;
    memset(account, 0, sizeof *account);
    for (unsigned i = 0; i < total; i++) {
        if (found[i].pid != pid) continue;
        account->gpu = (unsigned)found[i].first;
        account->peak = found[i].second;
        account->time = found[i].third;
        return SUCCESS;
    }
    return NOT_FOUND;
}
const char *nvmlErrorString(int code) { (void)code; return "fault"; }
