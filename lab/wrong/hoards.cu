// k = 1 ... out of memory
// It takes memory until there is no more.
#include "yours.h"

YOURS(hoards) {
    static std::vector<std::vector<char>> all;
    while (true) all.push_back(std::vector<char>(1 << 28, 1));
}
