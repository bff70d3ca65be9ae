// k = 1 ... no answer within ... does a loop never end
// A loop without an end.
#include "yours.h"

YOURS(endless) {
    for (volatile int i = 0; i >= 0; usleep(1000)) i = 0;
}
