// endless.cu:6: the host ... in endless, k = 1 ... k = 1 ... no answer within ... an endless
// A loop without an end.
#include "yours.h"

YOURS(endless) {
    for (volatile int i = 0; i >= 0; usleep(1000)) i = 0;
}
