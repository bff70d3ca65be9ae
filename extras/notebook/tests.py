"""Runs the whole notebook, then cells that a student may write: make notebook_test."""

import html
import json
import pathlib
import re
import shutil
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = pathlib.Path(__file__).resolve().parent
PROJECT = FOLDER.parents[1]
SHORT = "LIMIT=640 BATCH=32 EPOCHS=2"  # in place of the notebook's `short`


def read():
    return nbformat.read(FOLDER / "mgpu.ipynb", as_version=4)


class Client(NotebookClient):
    """Keeps the texts that an output has one after another."""

    def process_message(self, message, cell, index):
        if message["msg_type"] in ("display_data", "update_display_data"):
            self.drawn.append(message["content"]["data"].get("text/plain"))
        return super().process_message(message, cell, index)


class Kernel:
    """Runs cells in a folder."""

    def __init__(self, folder):
        folder = {"metadata": {"path": str(folder)}}
        self.client = Client(nbformat.v4.new_notebook(), timeout=900, resources=folder)

    def run(self, source):
        """Run a cell and return its outputs: what it printed, then what it shows, by type; and how
        many there are."""
        cells = self.client.nb.cells
        cells.append(nbformat.v4.new_code_cell(source))
        self.client.drawn = []
        outputs = self.client.execute_cell(cells[-1], len(cells) - 1).outputs
        shown = {"printed": "", "count": len(outputs)}
        for output in outputs:
            data = output.get("data", {})
            shown["printed"] += output.get("text", "")
            if list(data) == ["text/plain"]:
                shown["printed"] += data["text/plain"]
            shown.update(data)
        return shown


@pytest.fixture(scope="module")
def kernel():
    kernel = Kernel(FOLDER)
    with kernel.client.setup_kernel():
        yield kernel


@pytest.fixture(scope="module")
def outputs(kernel):
    """The outputs of each code cell of the notebook, by its source."""
    before = (PROJECT / "mgpu.cu").read_bytes()
    sources = [cell.source for cell in read().cells if cell.cell_type == "code"]
    outputs = {}
    for source in sources:
        is_setting = source.startswith("short = ")
        outputs[source] = kernel.run(f'short = "{SHORT}"' if is_setting else source)
    assert sum(source.startswith("short = ") for source in sources) == 1
    assert (PROJECT / "mgpu.cu").read_bytes() == before
    return outputs


def of(outputs, begin, type="printed"):
    """The output of the one cell that begins so."""
    (found,) = [output for source, output in outputs.items() if source.startswith(begin)]
    return found[type]


def test_git_has_no_outputs():
    for cell in json.loads((FOLDER / "mgpu.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None), cell["source"]


def test_as_a_script_it_keeps_its_text():
    command = [sys.executable, "-m", "nbconvert", "--to", "script", "--stdout", "--log-level=ERROR"]
    script = subprocess.run([*command, FOLDER / "mgpu.ipynb"], stdout=subprocess.PIPE, check=True)
    text = script.stdout.decode()
    assert "\n# # Training on Multiple GPUs, in CUDA C++\n" in text
    assert "\nget_ipython().run_line_magic('code', 'lenet')\n" in text


def test_papermill_finds_the_parameters():
    parameters = [cell for cell in read().cells if "parameters" in cell.metadata.get("tags", [])]
    assert [cell.source.split(" = ")[0] for cell in parameters] == ["short"]


def test_the_first_cell_says_where_it_runs(outputs):
    assert of(outputs, "address").startswith(("backend: cpu (", "backend: cuda ("))


def test_functions_are_shown(outputs):
    def code(name):
        return of(outputs, "%code " + name, "text/markdown")

    assert code("lenet").endswith("    return y_hat;\n}\n````")
    assert "\nvoid allreduce(Tensors data) {\n" in code("allreduce")
    split_batch = code("split_batch")
    assert split_batch.startswith("````c++\n// ") and "\nstd::pair<Tensors, Tensors> split_batch(" in split_batch


def test_the_demos(outputs):
    printed = of(outputs, "%train GPUS=2 EPOCHS=1")
    assert "after allreduce:\n [[3. 3.]] @gpu(0)\n [[3. 3.]] @gpu(1)\n" in printed
    assert " [15. 16. 17. 18. 19.]] @gpu(1)\n" in printed


@pytest.mark.parametrize("begin", ["%train GPUS=1", "%train GPUS=2 {", "%train ALLREDUCE=yours"])
def test_trainings_have_one_output_and_curves(outputs, begin):
    printed = of(outputs, begin)
    assert not re.search("[\033\r]|\\[=", printed)  # the progress bar has gone
    assert "test acc: 0." in printed
    assert of(outputs, begin, "image/png")
    assert of(outputs, begin, "count") == 2


def test_a_bar_is_drawn_in_one_output(kernel, outputs):
    shown = kernel.run(
        r"""from mgpu_notebook import Screen, run
screen = Screen()
for text in "begin\n", "\r[==  ] 1/2", "\r[====] 2/2", "\r\033[", "K 1 0.5\n":
    screen.time = 0
    screen.write(text)
run("sh", "-c", "printf 'end\r\033[KEnd\n'", screen=screen);"""
    )
    drawn = kernel.client.drawn
    assert drawn[:4] == ["begin", "begin\n[==  ] 1/2", "begin\n[====] 2/2", "begin"]
    assert shown["printed"] == "begin\n 1 0.5\nEnd"
    assert shown["count"] == 1


def test_the_mistake(outputs):
    printed = of(outputs, "with changed")
    assert "the gradient of W1[0] on gpu(1) is" in printed and "test acc:" not in printed


def test_the_exercise_begins_as_the_chapter(outputs):
    assert "right sums on 1 to 8 devices" in of(outputs, "%%allreduce")
    assert "is still the tutorial's algorithm" in of(outputs, "%%allreduce")


@pytest.mark.parametrize("name", ["yours", "ring"])
def test_show(outputs, name):
    page = html.unescape(of(outputs, f"%show {name}", "text/html"))
    assert "<iframe" in page and f"\nfirst {name} 4\n" in page


def test_compare(outputs):
    table = of(outputs, "%compare", "text/markdown")
    assert "\n| naive | 48 | 3097632 | 1548816 | 48 | " in table
    assert "\n| ring | 24 | 3097632 | 774408 | 6 | " in table
    assert len(set(line.count("|") for line in table.splitlines())) == 1


# ----- Cells that a student may write -------------------------------------------------------------


def test_a_right_cell_with_its_own_kernel(kernel, outputs):
    printed = kernel.run(
        """%%allreduce GPUS=3
__global__ void add_to_kernel(float *x, const float *y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += y[i];
}
static void allreduce_yours(const PerDevice &grads) {
    const std::vector<Tensor> flat = flatten(grads);
    const Tensor sum = flat[0];
    for (size_t c = 1; c < flat.size(); c++) {
        const Tensor received = copyto(flat[c], sum.device);
        const int n = size(sum);
        if (n > 0) add_to_kernel<<<(n + 255) / 256, 256, 0, stream_of(sum.device)>>>(
            sum.ptr(), received.ptr(), n);
    }
    for (size_t c = 1; c < flat.size(); c++) {
        copyto(sum, flat[c]);
    }
}"""
    )["printed"]
    assert "yours: right sums on 1 to 3 devices" in printed and "\nyours: passed" in printed


def test_a_wrong_cell(kernel, outputs):
    printed = kernel.run(
        """%%allreduce GPUS=2
const std::vector<Tensor> flat = flatten(grads);
if (flat.size() > 1) allreduce({flat[0], flat[1]});
add_(flat[0], flat[0]);"""
    )["printed"]
    assert "judge: yours is wrong: k = 1" in printed and "passed" not in printed


def test_a_cell_of_two_lines_and_the_line_of_a_crash(kernel, outputs):
    right = "%%allreduce GPUS=2\nconst std::vector<Tensor> flat = flatten(grads);\nallreduce(flat);"
    assert "yours: passed" in kernel.run(right)["printed"]
    crash = right.replace("allreduce(flat)", "add_(flat[0], flat[9])")
    assert "cell:3: the host aborts" in kernel.run(crash)["printed"]


def test_a_cell_that_does_not_compile(kernel, outputs):
    bad = "%%allreduce GPUS=2\nfor (size_t c = 0; c < grads.size(); c++) {\n    oops(grads[c]);\n}"
    lines = kernel.run(bad)["printed"].splitlines()
    assert len(lines) <= 10
    assert any(line.startswith("cell:3:") and "oops" in line for line in lines)
    assert any(line.endswith("    oops(grads[c]);") for line in lines)
    # A training says the same
    assert "cell:3:" in kernel.run("%train ALLREDUCE=yours EPOCHS=1 LIMIT=256")["printed"]
    lacks = kernel.run(bad.replace("oops(grads[c]);\n}", ""))["printed"]
    assert "does a brace of it lack its partner?" in lacks and lacks.count("\n") <= 10
    unmarked = "%%allreduce\nvoid f() {}\nvoid allreduce_yours(const PerDevice &) { f<<<1, 1>>>(); }"
    unmarked = kernel.run(unmarked)["printed"]
    assert unmarked.endswith("f is launched, but its definition lacks __global__")


def test_an_endless_loop(kernel, outputs):
    printed = kernel.run(
        """%%allreduce GPUS=2 SECONDS=3
size_t i = 0;
while (i < grads[0].size()) {
    for (size_t c = 1; c < grads.size(); c++) {
        add_(grads[0][i], copyto(grads[c][i], grads[0][i].device));
    }
}"""
    )["printed"]
    assert "no answer within 3 s: is there an endless loop" in printed
    assert "cell:" in printed


# ----- Where the notebook stands alone ------------------------------------------------------------


@pytest.mark.skipif(not shutil.which("git"), reason="no git")
def test_alone_it_clones_the_address(tmp_path):
    here, there = tmp_path / "alone", tmp_path / "project"
    here.mkdir()
    shutil.copytree(PROJECT / "extras", there / "extras")
    (there / "data").mkdir()
    for name in "Makefile", "mgpu.cu":
        shutil.copy(PROJECT / name, there)
    git = ["git", "-C", there, "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in ["init", "-q"], ["add", "."], ["commit", "-qm", "all"]:
        subprocess.run([*git, *words], check=True)
    first = next(cell.source for cell in read().cells if cell.cell_type == "code")
    kernel = Kernel(here)
    with kernel.client.setup_kernel():
        with pytest.raises(Exception, match="write the address"):
            kernel.run(first)
        printed = kernel.run(first.replace('address = ""', f'address = "{there}"'))["printed"]
        assert "backend: " in printed
        assert "text/markdown" in kernel.run("%code replicate")
    assert (here / "mgpu/build/notebook/mgpu.cu").exists()
