// the program has exited with status 0 before it was done
// It leaves a process that holds what the judge reads, and ends.
#include "yours.h"

YOURS(leaves_child) {
    if (fork() == 0) setsid(), sleep(100);
    _exit(0);
}
