// k = 1 ... it prints more than
// It prints without end.
#include "yours.h"

YOURS(babbles) {
    while (true) printf("still here\n");
}
