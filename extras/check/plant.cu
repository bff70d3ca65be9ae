// One program that is `make run` and `make check` of a copy with planted mistakes: `run OPTIONS`
// or OPTIONS. PLANT=17 switches the mistake number 17 on. extras/check/plant.py writes the copy.
// defines: planted, main
#include <cstdlib>
#include <cstring>

static const int planted = std::getenv("PLANT") ? std::atoi(std::getenv("PLANT")) : 0;
// The operators that extras/fast/ is to leave to mgpu.cu
#define EDITED (std::getenv("EDITED") ? std::getenv("EDITED") : "")
#define main check_main
#include "check.cu"
#undef main

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "run") == 0) return mgpu_main(argc - 1, argv + 1);
    return check_main(argc, argv);
}
