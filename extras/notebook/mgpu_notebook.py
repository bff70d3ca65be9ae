"""The commands of mgpu.ipynb. They work in a copy of the project, so your mgpu.cu stays as it is.

    %code NAME              show a function of mgpu.cu
    %train GPUS=2 ...       train, with the options of make run
    %curves [LOG ...]       draw the loss and the accuracy of build/log.csv, or of other logs
    %%allreduce [GPUS=4]    judge the cell, which is the body of allreduce_yours
    %show ring 4            play an allreduce on so many devices
    %compare 4              count what each allreduce costs on so many devices
    changed(old, new)       change the copy of mgpu.cu for a while
"""

import contextlib
import csv
import html
import os
import pathlib
import pty
import re
import select
import shlex
import signal
import subprocess
import time
import tty

from IPython.core.magic import register_cell_magic, register_line_magic
from IPython.display import HTML, Markdown, display
from matplotlib import pyplot, ticker

PROJECT = pathlib.Path(__file__).resolve().parents[2]
COPY = PROJECT / "build/notebook"
exercise = ""  # the last cell of %%allreduce, without its first line
changes = []  # pairs of an old and a new text


class Screen:
    """What a program prints, below the cell. It is one output that changes, not one for each drawing
    of a progress bar, so that it is short where nobody watches, too (nbconvert, papermill)."""

    def __init__(self):
        self.text = ""
        self.shown = None
        self.handle = None
        self.time = 0

    def write(self, text):
        """Add a text. It is shown at once, unless another one was a moment ago."""
        self.text += text
        if time.time() - self.time > 0.2:
            self.show()

    def show(self):
        """Show the text as a terminal would, where a line begins anew after a carriage return."""
        text = for_cell(re.sub(r"[^\n]*\r(?!\n)|\033(\[K?)?", "", self.text)).rstrip("\n")
        if text == self.shown:
            return
        self.shown = text
        self.time = time.time()
        data = {"text/plain": text[-100000:]}
        if self.handle:
            self.handle.update(data, raw=True)
        else:
            self.handle = display(data, raw=True, display_id=True)


def run(*command, screen=None):
    """Run a command in the copy. Return its exit status and what it printed, which the screen shows.

    It runs on a terminal, where a training draws its progress.
    """
    ours, its_own = pty.openpty()
    tty.setraw(its_own)  # lines end in \n alone
    process = subprocess.Popen(
        command,
        cwd=COPY,
        env=dict(os.environ, TERM="dumb", LC_ALL="C"),  # messages without colours
        stdin=subprocess.DEVNULL,
        stdout=its_own,
        stderr=its_own,
        start_new_session=True,
    )
    os.close(its_own)
    text = ""
    try:
        while part := read(ours, screen):
            text += part
            if screen:
                screen.write(part)
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGTERM)
        raise
    finally:
        os.close(ours)
        status = process.wait()
        if screen:
            screen.show()
    return status, text


def read(terminal, screen):
    """Return what a program prints next, "" at the end. If that takes a moment, show what there is."""
    if screen and not select.select([terminal], [], [], 0.1)[0]:
        screen.show()
    try:
        return os.read(terminal, 1 << 16).decode(errors="replace")
    except OSError:  # the program has ended
        return ""


def for_cell(text):
    """Leave out what make says itself, and name the commands of this file."""
    text = re.sub(r"(?m)^(backend:|make: ).*\n", "", text)
    text = re.sub(r"make show GPUS=(\d+)", r"%show yours \1", text)
    return text.replace("make exercise SEED", "%%allreduce SEED")


# ----- The copy -----------------------------------------------------------------------------------


def make_copy():
    """Copy the project to build/notebook, with what is built already. Link to the data set."""
    if not COPY.exists():
        COPY.mkdir(parents=True)
        names = "Makefile mgpu.cu extras build/cpu build/gpu build/cpp".split()
        names = [name for name in names if (PROJECT / name).exists()]
        subprocess.run(["cp", "-a", "--parents", *names, COPY], cwd=PROJECT, check=True)
    for folder in "data", "build/data":
        (PROJECT / folder).mkdir(parents=True, exist_ok=True)
        (COPY / folder).parent.mkdir(exist_ok=True)
        if not (COPY / folder).is_symlink():
            (COPY / folder).symlink_to("../../data")
    for file in PROJECT / "Makefile", *files(PROJECT / "extras"):
        update(COPY / file.relative_to(PROJECT), file.read_bytes())
    for file in files(COPY / "extras"):
        if not (PROJECT / file.relative_to(COPY)).exists():
            file.unlink()
    update_mgpu()


def files(folder):
    """Return the files below a folder."""
    return [path for path in folder.rglob("*") if path.is_file()]


def update(file, content):
    """Write a file. One that has this content keeps its date, so that nothing is compiled again."""
    if not file.exists() or file.read_bytes() != content:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def update_mgpu():
    """Write the copy of mgpu.cu, with the changes and the cell in it."""
    text = (PROJECT / "mgpu.cu").read_text()
    for old, new in changes:
        if text.count(old) != 1:
            raise ValueError(f"mgpu.cu has {old!r} {text.count(old)} times, not once")
        text = text.replace(old, new)
    if exercise:
        text = with_exercise(text)
    update(COPY / "mgpu.cu", text.encode())


def definitions(text, name):
    """Return where a text defines a name: the first line of the comment, the first and the last one
    of the definition, from 1. Functions may be overloaded."""
    command = "awk", "-f", PROJECT / "extras/definitions.awk"
    listed = subprocess.run(command, input=text.encode(), stdout=subprocess.PIPE, check=True)
    rows = [row.split() for row in listed.stdout.decode().splitlines()]
    return [[int(line) for line in row[1:]] for row in rows if row[0] == name]


def with_exercise(text):
    """Put the cell into allreduce_yours, in place of the body or, if it has the whole function, of
    all. #line gives its lines their numbers in the cell, whose first line is %%allreduce."""
    lines = text.splitlines(keepends=True)
    [[_, first, last]] = definitions(text, "allreduce_yours")
    begin, end = first - 1, last
    if not re.search(r"(?m)^(static )?void allreduce_yours\(", exercise):
        begin = next(n for n in range(first, last) if lines[n - 1].endswith("{\n"))
        end = last - 1
    cell = f'#line 2 "cell"\n{exercise.rstrip()}\n#line {end + 1} "mgpu.cu"\n'
    return "".join(lines[:begin]) + cell + "".join(lines[end:])


@contextlib.contextmanager
def changed(old, new):
    """Replace a text of mgpu.cu in the copy, until the block of `with` ends."""
    changes.append((old, new))
    try:
        yield
    finally:
        changes.pop()


def build(target):
    """Compile. Return a screen to go on with, or None after an error, in at most ten lines."""
    update_mgpu()
    start = time.time()
    screen = Screen()
    screen.write("compiling ...")
    status, text = run("make", "-s", "-j2", target)
    seconds = time.time() - start
    screen.write(f"\rcompiled in {seconds:.0f} s\n" if seconds > 2 and not status else "\r")
    if status:
        screen.write("\n".join(errors(text)))
    screen.show()
    return None if status else screen


def errors(text):
    """Return the first of the compiler's errors, with the line of the cell and its text, or the end
    of another failure."""
    lines = text.splitlines()
    wrong = [line for line in lines if "error:" in line]
    if not wrong:
        return lines[-10:]
    if not exercise:
        return lines[lines.index(wrong[0]) :][:10]
    for i, line in enumerate(lines):
        if re.match(r"cell\b.*error:", line):
            return [shown for shown in lines[i:] if re.match("cell| ", shown)][:10]
    number = re.search(r"(?m)^cell:(\d+)|at line (\d+) of cell", text)
    if number:  # the line calls a template with the wrong arguments
        number = int(number[1] or number[2])
        line = (COPY / "cell").read_text().splitlines()[number - 1]
        return [f"cell:{number}: {line}", wrong[0]]
    if "error: #error " in wrong[0]:  # judged.sh has found it in the cell
        return [wrong[0].partition("#error ")[2]]
    return wrong[:3] + ["The error is outside of the cell: does a brace of it lack its partner?"]


def start():
    """Make the copy and say where its program will run."""
    make_copy()
    print(run("make", "-s", "backend")[1], end="")


# ----- The commands -------------------------------------------------------------------------------


@register_line_magic
def code(name):
    """Show what mgpu.cu defines with this name, mostly a function, with the comment above it."""
    text = (PROJECT / "mgpu.cu").read_text()
    lines = text.splitlines()
    found = [lines[comment - 1 : last] for comment, _, last in definitions(text, name)]
    if found:
        text = "\n\n".join("\n".join(part) for part in found)
        # The theme colours it. (JupyterLab 4.6 knows c++, but not cpp)
        display(Markdown(f"````c++\n{text}\n````"))
    else:
        print(f"mgpu.cu does not define {name}")


@register_line_magic
def train(line):
    """Train: %train GPUS=2 BATCH=256 LR=0.2 EPOCHS=10, and other options of `make help`."""
    if screen := build("notebook_program"):
        run("make", "-s", "run", *shlex.split(line), screen=screen)


@register_line_magic
def curves(line):
    """Draw the loss and the test accuracy of logs, by default of the last training."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3), layout="constrained")
    style = ".-"
    for name in shlex.split(line) or ["build/log.csv"]:
        with open(COPY / name) as file:
            rows = list(csv.DictReader(file))
        epochs = [int(row["epoch"]) for row in rows]
        label = "GPUS={gpus} ALLREDUCE={allreduce}".format(**rows[0]) if rows else name
        left.plot(epochs, [float(row["loss"]) for row in rows], style, label=label)
        right.plot(epochs, [float(row["test_acc"]) for row in rows], style, label=label)
        style = ".--"  # the next one may lie upon the first
    left.set(xlabel="epoch", ylabel="train loss")
    right.set(xlabel="epoch", ylabel="test acc")
    for axes in left, right:
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    right.legend()
    pyplot.show()


@register_cell_magic
def allreduce(line, cell):
    """Judge the cell as the body of allreduce_yours. Options are the judge's, such as GPUS=4."""
    global exercise
    exercise = cell
    (COPY / "cell").write_text("%%allreduce\n" + cell)  # the compiler shows lines of this file
    if screen := build("notebook_judge"):
        run("make", "-s", "exercise", *shlex.split(line), screen=screen)


@register_line_magic
def show(line):
    """Show what `make show` makes: %show ring 4, or %show yours 3."""
    words = line.split()
    name, k = words + ["yours", "4"][len(words) :]
    if build("notebook_judge"):
        status, text = run("make", "-s", "show", "ALLREDUCE=" + name, "GPUS=" + k)
        if status:
            print(text)
            return
        page = html.escape((COPY / "build/show.html").read_text())
        style = "width: 100%; height: 1000px; border: 0"
        display(HTML(f'<div><iframe style="{style}" srcdoc="{page}"></iframe></div>'))


def algorithms():
    """Return the names of the allreduces, as the judge lists them when it gets an unknown one."""
    _, text = run("make", "-s", "exercise", "ALLREDUCE=none")
    return re.search(r"choose one of (.*)", text)[1].split(", ")


@register_line_magic
def compare(k):
    """Judge each algorithm on k devices and list its cost. The times are simulated, for LeNet's
    gradients on several networks; on a GPU one is also measured."""
    if not build("notebook_judge"):
        return
    table, here, networks = [], [], []
    for name in algorithms():
        words = "ALLREDUCE=" + name, "GPUS=" + (k or "4")
        status, text = run("make", "-s", "exercise", *words)
        if status:
            table.append([name, "is wrong"])
            continue
        networks = re.search(r"(?m)^us on +(.*)$", text)[1].split()
        counted, simulated = (row.split() for row in re.findall(rf"(?m)^{name} +(\d.*)$", text))
        messages, total, busiest, _, rounds, *measured = counted
        here = measured[:1]  # on a GPU
        table.append([name, messages, total, busiest, rounds, *here, *simulated[: len(networks)]])
    titles = ["", "messages", "bytes", "bytes of the busiest device", "rounds"]
    titles += ["&mu;s here"] * len(here) + [f"&mu;s, {network}" for network in networks]
    table[:0] = [titles, [":---"] + ["---:"] * (len(titles) - 1)]
    display(Markdown("\n".join(f"| {' | '.join(row)} |" for row in table)))
