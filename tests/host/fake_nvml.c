/* The part of NVML that is asked for, on a machine with a chip that shares the RAM and three cards, the last in slices. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NO_PERMISSION = 4 };

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
const char *nvmlErrorString(int code) { (void)code; return "fault"; }
