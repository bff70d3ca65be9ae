// The functions here take the place of mgpu.cu's, and by default call these: extras/replaced.sh
// makes a copy of mgpu.cu in which they are called plain_lenet and so on. In the program this file
// stands between that copy and the parts.
// replaces: lenet init_params demos train sum_gradients add_to_tape print_row
// replaces: parse_options run_program
// defines: net, experiment, chapter, exchange, after_gradient, after_options, print_epoch, run
#include "hooks.h"

Experiment chapter = {"lenet", plain_init_params, plain_demos, plain_train};
Experiment experiment = chapter;
void init_params() { experiment.init_params(); }
void demos(int num_gpus) { experiment.demos(num_gpus); }
void train(int num_gpus, int batch_size, float lr) { experiment.train(num_gpus, batch_size, lr); }

std::function<Tensor(const Tensor &X, const std::vector<Tensor> &params)> net = plain_lenet;
Tensor lenet(const Tensor &X, const std::vector<Tensor> &params) { return net(X, params); }

std::function<void(const PerDevice &grads)> exchange = plain_sum_gradients;
void sum_gradients(const PerDevice &grads) { exchange(grads); }

void (*print_epoch)(int, double, float, double) = plain_print_row;
void print_row(int epoch, double loss, float acc, double seconds) {
    print_epoch(epoch, loss, acc, seconds);
}

void (*run)() = plain_run_program;
void run_program() { run(); }

std::vector<void (*)()> after_options;
bool parse_options(int argc, char **argv) {
    if (!plain_parse_options(argc, argv)) return false;
    for (auto part : after_options) part();
    find_algorithm(option_text("ALLREDUCE")); // which a part may have changed
    return true;
}

void (*after_gradient)(const Tensor &grad) = nullptr;
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
