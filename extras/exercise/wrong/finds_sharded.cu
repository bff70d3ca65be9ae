// this is sharded
// It finds another algorithm in the table.
#include "yours.h"

YOURS(finds_sharded) {
    for (const Algorithm &a : algorithms)
        if (std::string(a.name) == "sharded") a.run(grads);
}
