// | judge: fakes_verdict: passed ... nothing brings gpu(1)'s number 0 to gpu(0)
// Its words on stderr are its own, as those on stdout are.
#include "yours.h"

YOURS(fakes_verdict) {
    if (grads.size() == 2) fprintf(stderr, "judge: fakes_verdict: passed\n");
}
