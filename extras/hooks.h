// What the parts below extras/ can change in a training: hooks.cu calls these.
// defines: Experiment, has_option, given
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

// How train_batch() sums the gradients
extern std::function<void(const PerDevice &grads)> exchange;

// After each operator of the backward pass this is called with the gradient of each parameter that
// the operator used. After the last call with a gradient, no more work will add to it.
extern void (*after_gradient)(const Tensor &grad);

extern void (*print_epoch)(int epoch, double loss, float acc, double seconds); // a row of the table
extern std::vector<void (*)()> after_options; // called when the options have been read
extern void (*run)();                         // what mgpu_main() calls

// Return whether there is such an option: each part adds its own. (The preset of some, such as
// SAVE, is no value but words for `help`: ask given() first.)
inline bool has_option(const std::string &name) {
    return std::any_of(option_table.begin(), option_table.end(),
                       [&](const Option &o) { return o.name == name; });
}
// Return whether the option is on the command line.
inline bool given(const std::string &name) { return typed.count(find_option(name).name); }
