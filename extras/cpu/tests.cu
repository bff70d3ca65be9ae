// Tests of the stand-in, the CUDA runtime without a GPU: does it do what CUDA promises, and does it
// name the mistakes that it promises to name? mgpu.cu takes no part in them.
//
//     make build/cpu/runtime_tests    them alone; build/cpu/runtime_tests -tc='cuda*' runs some
//     make asan, make race            the same under AddressSanitizer and ThreadSanitizer
//
// Each file of tests/ has the tests of one header of cuda/, or what is like it. Here are the tests
// that run the programs of all of them, and main.
#include "tests/tests.h"

#include "tests/calls.cu"
#include "tests/memory.cu"
#include "tests/streams.cu"
#include "tests/graphs.cu"

#include "tests/blocks.cu"
#include "tests/warps.cu"

#include "tests/launches.cu"
#include "tests/translation.cu"

#include "tests/atomics.cu"
#include "tests/functions.cu"

#include "tests/devices.cu"

#include "tests/checks.cu"
#include "tests/races.cu"

#include "tests/lacking.cu"

TEST_CASE("right programs: are told nothing") {
    for (const Program &program : right_programs) check_silent(program.name);
}

TEST_CASE("wrong programs: are told what is wrong, and in which line") {
    for (const Program &program : wrong_programs) {
        int status = 0;
        const std::string output = output_of(program.name, status);
        CAPTURE(std::string(program.name));
        CAPTURE(output);
#ifdef CUDA_CPU_TSAN // whose reports have another status
        CHECK(status != 0);
#else
        CHECK(WEXITSTATUS(status) == 1);
#endif
        std::string line, place, message; // the first line that begins with the place
        for (std::istringstream lines(output); std::getline(lines, line);)
            if (place.empty() && line.rfind("expected: ", 0) == 0) place = line.substr(10);
            else if (!place.empty() && message.empty() && line.rfind(place, 0) == 0) message = line;
        CHECK(place != "");
        CHECK(message != "");
        CAPTURE(message);
        for (const std::string part : program.says) {
            CAPTURE(part);
            CHECK(message.find(part) != std::string::npos);
        }
    }
}

// What `runtime_tests --wrong NAME` does: 0 means that nothing was found wrong.
static int run_wrong(const std::string &name) {
    alarm(60); // one that hangs has failed
    std::function<void()> run;
    for (const Program &program : wrong_programs)
        if (name == program.name) run = program.run;
    for (const Program &program : right_programs)
        if (name == program.name) run = program.run;
    for (const RaceProgram &program : race_programs)
        for (bool right : {false, true})
            if (name == std::string(right ? "right: " : "race: ") + program.name)
                run = [=] { program.run(right); };
    try {
        if (!run) throw std::runtime_error("runtime_tests: no program is called " + name);
        run();
        for (int device : {1, 0}) { // what a kernel did wrong shows here at the latest
            OK(cudaGetLastError());
            OK(cudaSetDevice(device));
            OK(cudaGetLastError());
            OK(cudaDeviceSynchronize());
        }
    } catch (const std::exception &e) {
        fprintf(stderr, "%s\n", e.what());
        _exit(1);
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], "--wrong") == 0) return run_wrong(argv[2]);
    setenv("CUDA_CPU_DEVICES", "2", 1);
    setenv("CUDA_CPU_CORES", "3", 0); // a team of cores on any machine
    return run_tests(argc, argv);
}
