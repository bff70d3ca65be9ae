// The functions here take the place of mgpu.cu's, and by default call these: extras/replaced.sh makes
// a copy of mgpu.cu in which they are called plain_lenet and so on. This is what parts of the program
// can change in a training. They come after this file, which comes after the copy.
// replaces: lenet init_params demos train add_to_tape parse_options run_program
// defines: net, experiment, chapter, after_gradient, after_options, run, given
#pragma once

// What run_program() does
struct Experiment {
    std::string name;
    std::function<void()> init_params; // sets `params` and `param_names`
    std::function<void(int num_gpus)> demos;
    std::function<void(int num_gpus, int batch_size, float lr)> train;
};

// After each operator of the backward pass this is called with the gradient of each parameter that
// the operator used. After the last call with a gradient, no more work will add to it.
void (*after_gradient)(const Tensor &grad) = nullptr;

std::vector<void (*)()> after_options; // called when the options have been read

// Return whether the option is on the command line.
bool given(const std::string &name) {
    return (options.words + " ").find(" " + name + "=") != std::string::npos;
}

#ifdef NO_TRAINING // mgpu.cu itself was included, and the compiler can drop what trains
Experiment chapter, experiment;
std::function<Tensor(const Tensor &X, const std::vector<Tensor> &params)> net;
#else
const Experiment chapter = {"lenet", plain_init_params, plain_demos, plain_train};
Experiment experiment = chapter;
void init_params() { experiment.init_params(); }
void demos(int num_gpus) { experiment.demos(num_gpus); }
void train(int num_gpus, int batch_size, float lr) { experiment.train(num_gpus, batch_size, lr); }

// The network that is trained
std::function<Tensor(const Tensor &X, const std::vector<Tensor> &params)> net = plain_lenet;
Tensor lenet(const Tensor &X, const std::vector<Tensor> &params) { return net(X, params); }

void (*run)() = plain_run_program; // what mgpu_main() calls
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
