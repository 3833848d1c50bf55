/* A Vulkan driver that misbehaves as the variable DRIVER_FAULT asks, when the loader greets it. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void hang_with_a_child(void) {
    FILE *pids = fopen(getenv("DRIVER_PIDS"), "w");
    pid_t child = fork();
    if (child == 0)
        for (;;) pause();
    fprintf(pids, "%d %d\n", (int)getpid(), (int)child);
    fclose(pids);
    for (;;) pause();
}

int32_t vk_icdNegotiateLoaderICDInterfaceVersion(uint32_t *version) {
    const char *fault = getenv("DRIVER_FAULT");
    (void)version;
    if (!strcmp(fault, "crash")) abort();
    if (!strcmp(fault, "exit")) _exit(3);
    if (!strcmp(fault, "hang")) hang_with_a_child();
    printf("{\"a driver\": \"talks on standard output\"}\n");
    fflush(stdout);
    return -9; /* VK_ERROR_INCOMPATIBLE_DRIVER */
}

void *vk_icdGetInstanceProcAddr(void *instance, const char *name) {
    (void)instance, (void)name;
    return NULL;
}
