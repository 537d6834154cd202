/* Starts a program of the runtime on the runtime's own interpreter.
 *
 * Linked statically, so that it runs in an image without any library. What the image says about
 * its own libraries (LD_PRELOAD, LD_LIBRARY_PATH) is meant for its own programs: it is put aside
 * here, and the agent gives it back to what it starts for the user (KT_POD_KEPT_*). `-I` does the
 * same for what it says about its own Python.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PYTHON "/kubetorch/bin/python"
#define KEPT "KT_POD_KEPT_"

static const char *const aside[] = {"LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", NULL};
static const char *const programs[][2] = {
    {"kt-agent", "kubetorch.pod"},
    {"kt-controller", "kubetorch.controller"},
    {"kt", "kubetorch.pod.server_start"},
    {NULL, NULL},
};

int main(int argc, char **argv) {
    const char *name = strrchr(argv[0], '/');
    name = name ? name + 1 : argv[0];
    const char *module = NULL;
    for (int i = 0; programs[i][0]; i++)
        if (strcmp(name, programs[i][0]) == 0)
            module = programs[i][1];
    if (!module) {
        fprintf(stderr, "%s is no program of this runtime\n", name);
        return 64;
    }
    for (int i = 0; aside[i]; i++) {
        const char *value = getenv(aside[i]);
        char kept[64];
        if (!value)
            continue;
        snprintf(kept, sizeof kept, KEPT "%s", aside[i]);
        setenv(kept, value, 1);
        unsetenv(aside[i]);
    }
    char **args = calloc(argc + 7, sizeof *args);
    if (!args)
        return 71;
    int count = 0;
    args[count++] = PYTHON;
    args[count++] = "-I";
    args[count++] = "-X";
    args[count++] = "utf8";
    args[count++] = "-m";
    args[count++] = (char *)module;
    for (int i = 1; i < argc; i++)
        args[count++] = argv[i];
    if (strcmp(module, "kubetorch.pod") == 0) {
        /* The first process of a container would ignore it until the agent has a handler: it waits
         * for that. */
        sigset_t signals;
        sigemptyset(&signals);
        sigaddset(&signals, SIGTERM);
        sigprocmask(SIG_BLOCK, &signals, NULL);
    }
    execv(PYTHON, args);
    fprintf(stderr, "%s: %s\n", PYTHON, strerror(errno));
    return 72;
}
