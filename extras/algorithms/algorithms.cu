// The other allreduces, to read once you have written your own, and OVERLAP. This part of the
// program adds them to mgpu.cu's table `algorithms`. Section 7 of mgpu.cu has their contract, their
// tools and what messages, busiest and rounds mean.
// defines: ALGORITHMS, add_algorithm, on_peers, Peers, wait_for_each_other
#define ALGORITHMS

static bool add_algorithm(const char *name, void (*run)(const PerDevice &grads),
                          bool (*supports)(int k) = nullptr) {
    algorithms.push_back({name, run, supports});
    return true;
}

void (*on_peers)(const Tensors &read) = nullptr; // make trace and make scale count them

// What a kernel needs that reads the memory of several devices: the address of a tensor on each.
// It is passed by value, as a kernel's argument. (Since x is indexed by a variable, each thread
// would copy it to a stack of its own if the argument were not a __grid_constant__.)
struct Peers {
    const float *x[8];
    int k;
    explicit Peers(const Tensors &tensors) : k(tensors.size()) {
        for (int c = 0; c < k; c++) x[c] = tensors[c].ptr();
        if (on_peers) on_peers(tensors);
    }
};
// Return whether k devices fit in Peers, and can read each other's memory.
static bool are_peers(int k) { return k <= 8 && peers_can_read(k); }

// Make later work on each of k devices wait for all earlier work on the others.
static void wait_for_each_other(int k) {
    for (int c = 0; c < k; c++) {
        for (int other = 0; other < k; other++) {
            if (other != c) make_wait(gpu(c), gpu(other));
        }
    }
}

#include "host.h"
#include "by_tensor.h"
#include "sharded.h"
#include "ring.h"
#include "tree.h"
#include "one_shot.h"
#include "two_shot.h"
#include "overlap.h"
