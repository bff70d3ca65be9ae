// k = 1 ... the program has ended, with status 0 ... who calls exit
// It ends the program.
#include "yours.h"

YOURS(exits) { exit(0); }
