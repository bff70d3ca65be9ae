// wrong 0: it prints more than ... bytes
// It prints without end.
#include "yours.h"

YOURS(prints_without_end) {
    for (;;) puts(to_string(full({5}, 1, cpu())).c_str());
}
