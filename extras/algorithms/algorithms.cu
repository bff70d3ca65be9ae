// The other allreduces, to read once you have written your own, and OVERLAP. This part of the
// program adds them to mgpu.cu's table `algorithms`. Section 7 of mgpu.cu has their contract, their
// tools and what messages, busiest and rounds mean.
// defines: ALGORITHMS, add_algorithm
#define ALGORITHMS

static bool add_algorithm(const char *name, void (*run)(const PerDevice &grads)) {
    algorithms.push_back({name, run});
    return true;
}

#include "host.h"
#include "by_tensor.h"
#include "sharded.h"
#include "ring.h"
#include "tree.h"
#include "overlap.h"
