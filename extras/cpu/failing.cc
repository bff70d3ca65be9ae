// The end of a program for limits.sh, behind a copy of mgpu.cu whose check_cuda has another name.
// replaces: check_cuda
// COUNT=1 prints how many CUDA calls the program makes; FAIL_AT=n lets the n-th one fail.
static struct Calls {
    long count = 0;
    ~Calls() {
        if (getenv("COUNT")) fprintf(stderr, "calls: %ld\n", count);
    }
} calls;

void check_cuda(cudaError_t code, const char *call, const char *file, int line) {
    const char *at = getenv("FAIL_AT");
    calls.count++;
    if (at && calls.count == atol(at)) code = cudaErrorLaunchFailure;
    plain_check_cuda(code, call, file, line);
}
