// passed 100:
// It is right, but starts a process that goes on after the verdict: grade_test.py looks for it.
#include "yours.h"

YOURS(leaves_processes) {
    static bool left = false;
    if (!left && fork() == 0) {
        setsid();
        for (int file = 0; file < 100; file++) close(file);
        if (fork() == 0) execlp("sleep", "sleep", "31415", nullptr);
        _exit(0);
    }
    left = true;
    for (size_t i = 0; i < grads[0].size(); i++) allreduce(across_devices(grads, i));
}
