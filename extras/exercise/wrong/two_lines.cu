// | a page?? ? ? Größe ... two_lines.cu:8: x status passed sums 60 sums lots ?[2J? ???x
// Its words and its exception have ends of lines, control characters, and bytes that are no UTF-8.
#include "yours.h"

YOURS(two_lines) {
    puts("a page\r\f \x1b \xff Gr\u00f6\u00dfe");
    const std::string all = "x\nstatus passed\nsums 60\nsums lots\t\x1b[2J\xc3 \u2028";
    throw std::runtime_error(all + std::string(70000, 'x')); // and more than a pipe holds
}
