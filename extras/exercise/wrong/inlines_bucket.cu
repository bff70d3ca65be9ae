// this is bucket: it calls allreduce_bucket of the same file
// It calls another algorithm by a macro, and all calls are inlined.
#include "yours.h"

#define sum_up(grads) allreduce_bucket(grads)
__attribute__((flatten)) YOURS(inlines_bucket) { sum_up(grads); }
