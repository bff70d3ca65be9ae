// does not compile 0:
// Twice as many templates at each depth: the compiler does not end.
#include "yours.h"

template <int depth, long path> struct Endless {
    static constexpr long value =
        Endless<depth - 1, 2 * path>::value + Endless<depth - 1, 2 * path + 1>::value;
};
template <long path> struct Endless<0, path> { static constexpr long value = path; };

YOURS(never_compiles) { fill(grads[0][0], Endless<40, 0>::value); }
