// crash 0: yours, k = 1 ... File size limit exceeded
// It writes until the disk is full.
#include "yours.h"

YOURS(fills_disk) {
    const std::string megabyte(1 << 20, 'x');
    for (int i = 0;; i++) {
        std::ofstream file("/tmp/filled" + std::to_string(i));
        for (int n = 0; n < 200 && file << megabyte; n++) {}
    }
}
