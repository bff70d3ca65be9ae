// What the parts below extras/ can change in a training. Each function here takes the place of
// mgpu.cu's, and by default calls it: extras/replaced.sh makes a copy of mgpu.cu in which that one
// is called plain_lenet, say.
// replaces: lenet init_params demos train add_to_tape parse_options run_program
// defines: net, experiment, after_gradient, after_options, run, given
#ifndef HOOKS // (not #pragma once: a copy of this file may be included, too)
#define HOOKS

#ifndef REPLACED // mgpu.cu itself was included: it trains as it always does
#define plain_lenet lenet
#define plain_init_params init_params
#define plain_demos demos
#define plain_train train
#define plain_run_program run_program
#endif

// The network that is trained
std::function<Tensor(const Tensor &X, const std::vector<Tensor> &params)> net
#ifndef NO_TRAINING // so that the compiler can drop what trains
    = plain_lenet
#endif
    ;

// What run_program() does
struct Experiment {
    std::string name;
    std::function<void()> init_params; // sets `params` and `param_names`
    std::function<void(int num_gpus)> demos;
    std::function<void(int num_gpus, int batch_size, float lr)> train;
};
Experiment experiment
#ifndef NO_TRAINING
    = {"lenet", plain_init_params, plain_demos, plain_train}
#endif
;

// After each operator of the backward pass this is called with the gradient of each parameter that
// the operator used. After the last call with a gradient, no more work will add to it.
void (*after_gradient)(const Tensor &grad) = nullptr;

std::vector<void (*)()> after_options; // called when the options have been read

#ifndef NO_TRAINING
void (*run)() = plain_run_program; // what mgpu_main() calls
#endif

// Return whether the option is on the command line.
inline bool given(const std::string &name) {
    return (options.words + " ").find(" " + name + "=") != std::string::npos;
}

#ifdef REPLACED
Tensor lenet(const Tensor &X, const std::vector<Tensor> &params) { return net(X, params); }
void init_params() { experiment.init_params(); }
void demos(int num_gpus) { experiment.demos(num_gpus); }
void train(int num_gpus, int batch_size, float lr) { experiment.train(num_gpus, batch_size, lr); }
void run_program() { run(); }

bool parse_options(int argc, char **argv) {
    if (!plain_parse_options(argc, argv)) return false;
    for (auto part : after_options) part();
    find_algorithm(options.allreduce); // which a part may have changed
    return true;
}

Tensor add_to_tape(const char *op, Tensor y, const std::vector<Tensor> &inputs,
                   const GradFn &grad_fn) {
    std::vector<Tensor> used; // the parameters: only their gradients have memory yet
    for (const Tensor &X : inputs) {
        if (X.grad && X.grad->data) used.push_back(X);
    }
    return plain_add_to_tape(op, y, inputs, [=](const Tensor &dy) {
        grad_fn(dy);
        for (const Tensor &p : used) {
            if (after_gradient) after_gradient(*p.grad);
        }
    });
}
#endif
#endif
