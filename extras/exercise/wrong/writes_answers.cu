// its reply is malformed ... the judge's pipe
// It writes what the judge reads.
#include "yours.h"

YOURS(writes_answers) {
    const std::string answer(1 << 20, 0);
    if (write(4, answer.data(), answer.size()) < 0) return;
}
