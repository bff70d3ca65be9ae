// What the parts below extras/ can change in a training: hooks.cu calls these.
// defines: Experiment, given
#pragma once

// The network that is trained
extern std::function<Tensor(const Tensor &X, const std::vector<Tensor> &params)> net;

// What run_program() does
struct Experiment {
    std::string name;
    std::function<void()> init_params; // sets `params` and `param_names`
    std::function<void(int num_gpus)> demos;
    std::function<void(int num_gpus, int batch_size, float lr)> train;
};
extern Experiment experiment;
extern Experiment chapter; // has mgpu.cu's own functions

// After each operator of the backward pass this is called with the gradient of each parameter that
// the operator used. After the last call with a gradient, no more work will add to it.
extern void (*after_gradient)(const Tensor &grad);

extern void (*print_epoch)(int epoch, double loss, float acc, double seconds); // a row of the table
extern std::vector<void (*)()> after_options; // called when the options have been read
extern void (*run)();                         // what mgpu_main() calls

// Return whether the option is on the command line.
inline bool given(const std::string &name) {
    return (options.words + " ").find(" " + name + "=") != std::string::npos;
}
