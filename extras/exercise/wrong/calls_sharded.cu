// this is sharded: it calls allreduce_sharded of the same file
// It calls another algorithm by name.
#include "yours.h"

YOURS(calls_sharded) { allreduce_sharded(grads); }
