// sums on 1, 2, 4 devices ... (not supported: 3)
// Right: it works on powers of two.
#include "yours.h"

YOURS(powers_of_two, is_power_of_two) { allreduce(flatten(grads)); }
