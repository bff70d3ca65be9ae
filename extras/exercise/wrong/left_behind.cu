// k = 2, 1 tensor, 1000 numbers ... right on these numbers of devices: 1, 3, 4; wrong on: 2
// A wrong call spoils all later ones of its process.
#include "yours.h"

YOURS(left_behind) {
    static bool spoiled = false;
    spoiled = spoiled || grads.size() == 2;
    if (!spoiled) allreduce(flatten(grads));
}
