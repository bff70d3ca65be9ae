// does not compile 0: size_of_list.cu:6 ... deleted
// size() is of a tensor; a list has list.size().
#include "yours.h"

YOURS(size_of_list) {
    for (int i = 0; i < (int)size(grads[0]); i++) allreduce(across_devices(grads, i));
}
