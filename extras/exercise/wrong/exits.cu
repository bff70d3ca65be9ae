// k = 1 ... the program has exited with status 0 ... is exit called
// It ends the program.
#include "yours.h"

YOURS(exits) { exit(0); }
