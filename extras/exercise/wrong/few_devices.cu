// few_devices does not support these numbers of devices: 3, 4; it must work on 2 to 4
// It says that it works on one or two devices only.
#include "yours.h"

static bool one_or_two(int k) { return k <= 2; }
YOURS(few_devices, one_or_two) { allreduce(flatten(grads)); }
