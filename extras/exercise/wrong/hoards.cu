// k = 1 ... out of memory
// It takes memory until there is no more.
#include "yours.h"

YOURS(hoards) {
    static std::vector<std::unique_ptr<char[]>> all;
    while (true) all.emplace_back(new char[1 << 28]);
}
