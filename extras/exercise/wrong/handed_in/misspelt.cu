// does not compile 0: misspelt.cu:6:42: error
// A word is wrong.
#include "yours.h"

YOURS(misspelt) {
    for (size_t i = 0; i < grads.front().sise(); i++) allreduce(across_devices(grads, i));
}
