// passed 100:
// Right, but it writes where the project is: extras/exercise/grade_test.py looks.
#include "yours.h"

YOURS(writes_outside) {
    std::ofstream("build/written_by_a_submission") << "here";
    for (size_t i = 0; i < grads[0].size(); i++) allreduce(across_devices(grads, i));
}
