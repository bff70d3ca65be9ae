// The run of a program's tests by doctest.
// defines: run_tests
#pragma once

#ifndef DOCTEST_LINKED
#define DOCTEST_CONFIG_IMPLEMENT
#endif
#include "doctest.h"

#include <sstream>
#include <vector>

// Return doctest's status, or 4 if no test matches the filters, for then nothing was tested.
inline int run_tests(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] == '-') continue;
        fprintf(stderr, "%s is no option of the tests: try -tc='%s*', or --help\n", argv[i],
                argv[i]);
        return 1;
    }
    doctest::Context tests;
    tests.setOption("abort-after", 20); // one mistake can fail hundreds of checks
    tests.applyCommandLine(argc, argv);
    const int status = tests.run();
    if (tests.shouldExit()) return status; // --help, --list-test-cases and the like
    std::vector<const char *> words(argv, argv + argc);
    words.insert(words.end(), {"--count", "--reporters=console"});
    std::ostringstream counted;
    doctest::Context query(words.size(), words.data());
    query.setCout(&counted);
    query.run();
    if (counted.str().find(" filters: 0\n") == std::string::npos) return status;
    fprintf(stderr, "no test case matches %s\n", argv[argc - 1]);
    return 4;
}
