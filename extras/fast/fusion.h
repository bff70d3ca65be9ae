// Fusion: an addition or a ReLU becomes the epilogue of the kernel before it.
// By itself it spends its time on reading and writing memory, and on its launch. So the last launch
// on a device waits: an addition or a ReLU that comes next may join it, and anything else that is
// enqueued on the device sends it off first. The devices' work keeps the program's order. A tensor
// that a joined launch leaves out, such as lenet's h1_conv, has no memory. It is computed only if
// ptr() asks for it, from what its inputs hold then; it is an error to ask after the parameters
// have changed. A batch norm's result that a convolution or an addition has read is left out, too,
// and computed again for the backward pass, unless ptr() has told somebody else its address.
// Backward, the kernels that write the gradient of a ReLU's result mask it, and the ReLU itself has
// nothing left to do.
// Gain: without it a step takes longer. LeNet: 1.05 times on an H100, 1.20 on a CPU (user time);
// lab_cnn: 1.06 and 1.18; ResNet-18: 1.04 and 1.02. What it leaves out: README.md, "Memory".
// defines: Note, before_use, launch, join, output, dy_of, target_of, share_grad, relu, add, flush

namespace fast {
// Remembers the launch that writes an operator's result.
struct Note {
    std::function<void(Store)> kernel;          // null once it is enqueued
    Store to = {};                              // where it writes, and its epilogue
    int n = 0;                                  // how many numbers it writes
    std::shared_ptr<float> memory = nullptr;    // for these; null: left out
    std::function<void(Store)> again = nullptr; // the kernel, if that may run once more
    Tensor plus = {};                           // what it adds
    float *address = nullptr;                   // what the handles of its tensor have
    int left_out = -1; // how many updates of the parameters there were when it was left out
    std::weak_ptr<Tensor> masks = {}; // of a ReLU's result: what goes into this gradient is masked
};
// The note goes with the tensor: it is kept by the function that frees it.
struct FreeNoted {
    std::shared_ptr<Note> note;
    void operator()(float *) const {}
};
static std::shared_ptr<Note> note_of(const Tensor &t) {
    const FreeNoted *noted = std::get_deleter<FreeNoted>(t.data);
    return noted ? noted->note : nullptr;
}
static void set_note(Tensor &y, const std::shared_ptr<Note> &note) { // y: just made
    note->address = note->memory.get();
    if (note->memory) y.data = std::shared_ptr<float>(note->address, FreeNoted{note});
}
// Return where the tensor lies.
static float *address(const Tensor &t) {
    const auto note = note_of(t);
    return note ? note->memory.get() + (t.data.get() - note->address) : t.data.get();
}

// A note on a gradient: other gradients may share its memory.
struct GradNote {
    std::weak_ptr<Tensor> grad; // itself
    bool masked;                // all its parts have been
};
static auto &grad_notes = *new std::map<const Tensor *, GradNote>;
static const GradNote *note_of_grad(const Tensor *grad) {
    const auto found = grad_notes.find(grad);
    if (found == grad_notes.end()) return nullptr;
    return found->second.grad.lock().get() == grad ? &found->second : nullptr;
}

// Each device's last launch, if that waits. (Never destroyed: tensors may outlive main.)
static auto &waiting = *new std::map<int, std::shared_ptr<Note>>;
static int updates = 0; // of the parameters
static int running = 0; // launches that are being sent off, one for another
struct Running {
    Running() { running++; }
    ~Running() { running--; }
};

// Leave X out, if its kernel can run again when somebody asks for X.
static void leave_out(const Tensor &X) {
    const auto note = note_of(X);
    if (!note || !note->again || note->kernel) return;
    note->kernel = note->again;
    note->memory = nullptr;
    note->left_out = updates;
}

static void send_off(Device device, const std::shared_ptr<Note> &launch) {
    if (!launch || !launch->kernel) return;
    if (launch->left_out >= 0 && launch->left_out != updates)
        error("a tensor that was fused with the next operator is read after the parameters have "
              "changed: read it earlier, or use KERNELS=plain");
    if (on_use) on_use({device, {launch->n}}); // it is used
    if (!launch->memory) launch->memory = empty({launch->n}, device).data;
    launch->to.data = launch->memory.get();
    const auto kernel = std::exchange(launch->kernel, nullptr);
    const Running now;
    if (launch->plus.data) launch->to.plus = launch->plus.ptr();
    kernel(launch->to);
    leave_out(std::exchange(launch->plus, Tensor()));
}
// What waits on the device goes, then what is still to write the tensor that has this note.
static void flush(Device device, const std::shared_ptr<Note> &note) {
    if (note && !note->kernel) return;
    send_off(device, std::exchange(waiting[device.id], nullptr));
    send_off(device, note);
}
static void flush_all() {
    for (const auto &[device, launch] : waiting) flush({device}, nullptr);
}
// Called before a tensor is used and, with null, before a stream is. A gradient that mgpu.cu is
// about to add to gets memory of its own.
static void before_use(Device device, const Tensor *tensor) {
    if (!tensor) return flush(device, nullptr);
    if (note_of_grad(tensor)) {
        const auto grad = grad_notes[tensor].grad.lock();
        grad_notes.erase(tensor);
        const Tensor shared = *grad;
        if (grad->data.use_count() <= 2) return; // `shared` is the other one
        grad->data = empty(grad->shape, device).data;
        copyto(shared, *grad);
    } else if (const auto note = note_of(*tensor)) {
        flush(device, note);
        if (!running) note->again = nullptr; // who knows how long the address is used
    }
}
// Enqueue the kernel that writes y, perhaps later, when it is known what follows. It may run
// `again` if that takes less than it costs to keep y.
static void launch(Tensor &y, std::function<void(Store y)> kernel, bool again = false) {
    stream_of(y.device); // sends off the launch that waits
    Note note = {kernel, {}, size(y), empty(y.shape, y.device).data};
    if (again) note.again = std::move(kernel);
    set_note(y, waiting[y.device.id] = std::make_shared<Note>(std::move(note)));
}
// Make the launch of X, if it still waits, write y = max(0, X), or y = X + *plus, instead, and to
// the memory that X had. (Only our own sgd counts updates.)
static bool join(const Tensor &X, Tensor &y, const Tensor *plus = nullptr) {
    auto &last = waiting[X.device.id];
    if (!operators.sgd) return false;
    // Not if X's launch does not wait, already ends with a ReLU or an addition, or writes more
    if (!last || note_of(X) != last || last->to.relu || last->n != size(X)) return false;
    if (plus && (last->plus.data || note_of(*plus) == last)) return false;
    auto next = std::make_shared<Note>(*last);
    last->memory = nullptr;
    if (plus) next->plus = *plus, next->again = nullptr;
    else next->to.relu = 1;
    last->left_out = updates;
    last = next;
    set_note(y, next);
    return true;
}

static bool is_masked(const Tensor &X) {
    const auto note = note_of(X);
    return note && note->masks.lock() == X.grad;
}
static void note_grad(const Tensor &X, bool masked) {
    for (auto it = grad_notes.begin(); grad_notes.size() > 1000 && it != grad_notes.end();)
        it = it->second.grad.expired() ? grad_notes.erase(it) : std::next(it);
    grad_notes[X.grad.get()] = {X.grad, masked};
}
// The gradient of y, to be read only: a copy of the handle has no note, so it may go on sharing.
static Tensor dy_of(const Tensor &y) { return *y.grad; }
// Where a backward kernel puts dX, masked by X if that is a ReLU's result. The first to write the
// gradient of a result overwrites it (=), without grad_ptr's zeros; later ones add to it (+=).
static Store target_of(const Tensor &X) {
    if (!X.grad) return {nullptr};
    Tensor &g = *X.grad;
    const GradNote *const note = note_of_grad(&g);
    const bool first = !g.data, masks = is_masked(X), noted = note;
    grad_notes.erase(&g);
    const float *const sum = first ? nullptr : g.ptr(); // of the parts so far
    if (!g.data || (noted && g.data.use_count() > 1)) g.data = empty(g.shape, g.device).data;
    const Store to = {g.ptr(), sum, masks ? X.ptr() : nullptr};
    if (masks) note_grad(X, true);
    return to;
}
// dX = dy: share its memory, if nothing is there yet. If X is a ReLU's result, it is masked with
// the next part, or by the ReLU.
static bool share_grad(const Tensor &X, const Tensor &y) {
    if (X.grad->data) return false; // a parameter's, or of another part
    X.grad->data = y.grad->data;
    for (const Tensor &t : {X, y}) note_grad(t, false); // not to be written in place
    return true;
}
// dX = or += dy, or 0 where y, if it is not null, is not positive
__global__ void pass_kernel(Store dX, const float *dy, const float *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) dX.store(i, !y || y[i] > 0 ? dy[i] : 0);
}

// The result of an operator; its gradient if an input wants one, and it is recorded.
static Tensor output(const std::vector<Tensor> &inputs, const std::vector<int> &shape) {
    Tensor y = {inputs[0].device, shape}; // without memory
    for (const Tensor &X : inputs)
        if (recording && X.grad) y.grad = std::make_shared<Tensor>(Tensor{y.device, y.shape});
    return y;
}
// Put it on the tape, with that gradient, which grad_fn knows.
static Tensor record(const char *op, Tensor y, const std::vector<Tensor> &inputs,
                     const GradFn &grad_fn) {
    const auto grad = y.grad;
    y = add_to_tape(op, y, inputs, grad_fn);
    std::vector<TapeEntry> &tape = tapes[y.device.id];
    if (grad && !tape.empty()) tape.back().dy = y.grad = grad;
    return y;
}

// --- relu
// dX is dy, the same memory, if all that was written there has been masked.
static Tensor relu(const Tensor &X) {
    check_inputs("relu", true, "a tensor", {X});
    Tensor y = output({X}, X.shape);
    const int n = size(X);
    if (!join(X, y)) {
        const NoGrad not_recorded;
        set_note(y, std::make_shared<Note>(Note{nullptr, {}, n, plain_relu(X).data}));
    }
    if (const auto note = note_of(y)) note->masks = y.grad;
    return record("relu", y, {X}, [=](const Tensor &) {
        const GradNote *const note = note_of_grad(y.grad.get());
        if (note && note->masked && share_grad(X, y)) return;
        const float *dy = dy_of(y).ptr();
        LAUNCH(pass_kernel<<<blocks(n), threads, 0, stream_of(X.device)>>>(target_of(X), dy,
                                                                           y.ptr(), n));
    });
}

#ifdef NETWORKS
// --- addition
static Tensor add(const Tensor &A, const Tensor &B) {
    check_inputs("add", A.shape == B.shape, "two of the same shape", {A, B});
    Tensor y = output({A, B}, A.shape);
    const int n = size(A);
    if (!join(A, y, &B) && !join(B, y, &A)) {
        y.data = empty(y.shape, y.device).data;
        LAUNCH(addition_kernel<<<blocks(n), threads, 0, stream_of(A.device)>>>(y.ptr(), A.ptr(),
                                                                               B.ptr(), n));
    }
    return record("add", y, {A, B}, [=](const Tensor &) {
        for (const Tensor &X : {A, B}) {
            if (!X.grad || share_grad(X, y)) continue;
            const float *dy = dy_of(y).ptr();
            LAUNCH(pass_kernel<<<blocks(n), threads, 0, stream_of(X.device)>>>(target_of(X), dy,
                                                                               nullptr, n));
        }
    });
}
#endif
} // namespace fast
