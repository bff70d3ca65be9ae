"""Draws pictures from the files that `measure` and `make run` write.

    pictures.py accuracy RUNS='LOG ...'   loss and accuracy of trainings: build/plot.svg and .png
    pictures.py scale              efficiency by devices, of build/scale.csv: build/scale.svg
    pictures.py trace ROWS [MS]    what ran when, of `make trace`: build/trace.json, and
                                   build/trace.svg, MS milliseconds wide

Each .svg suits light and dark pages. Without matplotlib, `accuracy` prints its numbers instead, and
the others say in one line what is missing; their numbers have been printed before.
"""
import csv
import io
import json
import math
import os
import sys
import xml.etree.ElementTree as ET

VENV = "build/pictures_venv/bin/python"
MISSING = "matplotlib is missing: apt-get install python3-matplotlib, or make pictures_venv"
try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle
    from matplotlib.ticker import MaxNLocator, NullLocator
except ImportError:
    if os.path.exists(VENV) and os.path.abspath(VENV) != sys.executable:
        os.execv(VENV, [VENV, *sys.argv])
    matplotlib = None

# Colours of a light page, and what they become on a dark one
PAPER, INK, GRID, EDGE = "#ffffff", "#222222", "#dddddd", "#888888"
FORWARD, BACKWARD = "#7fb3e6", "#2a5caa"
DARK = {PAPER: "#0d1117", INK: "#e6e6e6", GRID: "#333b45", EDGE: "#8b949e",
        FORWARD: "#9cc9f2", BACKWARD: "#4a80d6"}
COLORS = ["#d9363e", "#3a9d5d", "#e59a1e", "#8a6fc0", "#c2549b", "#3b78d8", "#17a2a2", "#7a5c3e"]
KINDS = {"input": "#8c8c8c", "forward": FORWARD, "backward": BACKWARD, "sum": "#e59a1e",
         "message": "#d0303a", "update": "#3a9d5d"}
LINE = {"linewidth": 1.6, "marker": "o", "markersize": 3}


def fail(picture, why):
    sys.exit(f"no picture of {picture}: {why}")


def rows_of(path):
    """The rows of a .csv as dicts."""
    try:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError):
        fail(path, "it cannot be read (make run)")
    if not rows:
        fail(path, "it has no rows (make run)")
    return rows


def number(row, column):
    """A number of a row, or nan where there is none."""
    try:
        return float(row[column])
    except (KeyError, TypeError, ValueError):
        return math.nan


def axes_of(width, height, columns=1):
    """A figure of width x height points, its axes from left to right, and the legend's place."""
    matplotlib.rcParams.update({
        "svg.fonttype": "none", "svg.hashsalt": "mgpu", "font.size": 9,
        "font.sans-serif": ["Arial", "Helvetica", "DejaVu Sans"], "axes.titlesize": 10,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
        "axes.axisbelow": True, "axes.edgecolor": EDGE, "axes.facecolor": PAPER,
        "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
        "grid.color": GRID, "figure.facecolor": PAPER, "legend.frameon": False})
    figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
    grid = figure.add_gridspec(2, columns, height_ratios=[height - 30, 30])
    below = figure.add_subplot(grid[1, :])
    below.axis("off")
    return figure, [figure.add_subplot(grid[0, i]) for i in range(columns)], below


def put_legend(below, handles, columns=5):
    below.legend(handles=handles, loc="center", ncol=min(len(handles), columns))


def for_both_pages(svg, titles):
    """Add colours for dark pages, and titles that show under the mouse, by an element's id."""
    space = "http://www.w3.org/2000/svg"
    ET.register_namespace("", space)
    ET.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ET.fromstring(svg)
    rules = [f'[style*="{what}: {light}"] {{ {what}: {dark} !important }}'
             for light, dark in DARK.items() for what in ("fill", "stroke")]
    style = ET.Element(f"{{{space}}}style")
    style.text = "@media (prefers-color-scheme: dark) {\n" + "\n".join(rules) + "\n}"
    root.insert(0, style)
    for element in root.iter(f"{{{space}}}g"):
        if element.get("id") in titles:
            title = ET.Element(f"{{{space}}}title")
            title.text = titles[element.get("id")]
            element.insert(0, title)
    return ET.tostring(root)


def write(path, data):
    """Write a whole file and print its path, or say why there is none."""
    try:
        with open(path + ".new", "wb") as file:
            file.write(data)
        os.replace(path + ".new", path)
    except OSError as error:
        if os.path.exists(path + ".new"):
            os.remove(path + ".new")
        fail(path, f"it could not be written: {error.strerror}")
    print(path)


def save(figure, path, titles=None):
    """Write a figure as .svg or .png. `titles` are for elements with these ids."""
    buffer = io.BytesIO()
    if path.endswith(".png"):
        figure.savefig(buffer, format="png", dpi=144)
        data = buffer.getvalue()
    else:
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        data = for_both_pages(buffer.getvalue(), titles or {})
    write(path, data)


def about(log, row):
    """The name of a log, with what its columns say."""
    if "lr" not in row:
        return log
    return f"{log}: {row['model']}, GPUS={row['gpus']}, {row['allreduce']}, lr {row['lr']}"


def accuracy_as_text(logs):
    for log, rows in logs.items():
        print(about(log, rows[-1]))
        print(" epoch      loss  test_acc")
        for row in rows:
            print(f"{row['epoch']:>6}  {row['loss']:>8}  {row['test_acc']:>8}")


def draw_accuracy(logs):
    figure, (left, right), below = axes_of(840, 320, 2)
    for axes, column, title in ((left, "test_acc", "test accuracy"), (right, "loss", "train loss")):
        for i, (log, rows) in enumerate(logs.items()):
            axes.plot([number(row, "epoch") for row in rows], [number(row, column) for row in rows],
                      color=COLORS[i % 8], label=about(log, rows[-1]), **LINE)
        axes.set(title=title, xlabel="epoch")
        axes.set_xlim(1, max(2, *(len(rows) for rows in logs.values())))
        axes.set_ylim(0, 1 if axes is left else None)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    put_legend(below, left.get_lines(), columns=2)
    save(figure, "build/plot.svg")
    save(figure, "build/plot.png")


def draw_scale():
    rows = rows_of("build/scale.csv")
    figure, (axes,), below = axes_of(640, 360)
    counts = [int(row["k"]) for row in rows]
    for which, color in zip(("strong", "weak"), COLORS):
        axes.plot(counts, [100 * number(row, which) for row in rows], color=color, label=which,
                  **LINE)
    axes.set(title="a step on k devices, predicted", xlabel="devices", ylabel="efficiency",
             xscale="log")
    axes.set_ylim(0, 105)
    axes.set_xticks(counts, counts)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:.0f}%")
    put_legend(below, axes.get_lines())
    save(figure, "build/scale.svg")


def gpu(device):
    return "host" if device < 0 else f"gpu({device})"


class Op:
    """An operation of a trace. Times are nanoseconds; src and dst are -1 for the host."""

    def __init__(self, row):
        self.stream, self.kind, self.name = row["stream"], row["kind"], row["name"]
        (self.device, self.lane, self.begin, self.end, self.src, self.dst, self.bytes,
         self.cause) = (int(row[name]) for name in ("device", "lane", "begin", "end", "src", "dst",
                                                    "bytes", "cause"))
        self.critical = row["critical"] == "1"

    def __str__(self):
        if self.kind == "message":
            return f"{self.name} from {gpu(self.src)} to {gpu(self.dst)}"
        return f"{self.name} on {gpu(self.device)}"


class Trace:
    def __init__(self, path):
        try:
            with open(path, newline="") as file:
                self.title, self.note = (next(file)[2:].strip() for _ in range(2))
                self.all = [Op(row) for row in csv.DictReader(file)]
        except (OSError, ValueError, KeyError, StopIteration):
            fail(path, "it cannot be read (make trace)")
        self.ops = [op for op in self.all if op.kind != "wait"]
        self.devices = 1 + max(op.device for op in self.ops)

    def waited_for(self, op):
        """What an operation has waited for, in words."""
        if op.cause < 0:
            return ""
        cause = self.all[op.cause]
        turn = ", then for its turn" if op.begin > cause.end + 100 else ""
        return f"; has waited for {cause}{turn}"


def write_json(trace, path):
    """Chrome's trace format: a process for each device, a thread for each stream. A message is a
    slice of its sender and one of its receiver, with an arrow from one to the other.
    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    host, outgoing = trace.devices, 1000  # the host's process; threads of what leaves
    events, threads = [], {}
    for number, op in enumerate(trace.ops):
        threads[op.device, op.lane] = op.stream
        if op.name == "gradient":
            continue
        times = {"ts": op.begin / 1000, "dur": (op.end - op.begin) / 1000}  # microseconds
        args = {"bytes": op.bytes, "critical": op.critical}

        def slice_in(pid, tid, name):
            events.append({"ph": "X", "pid": pid, "tid": tid, **times, "cat": op.kind,
                           "name": name, "args": args})
        if op.kind != "message":
            slice_in(op.device, op.lane, op.name)
            continue
        tensor = "" if op.name == "message" else op.name + " "
        sender, out = host if op.src < 0 else op.src, outgoing + op.lane
        threads[sender, out] = f"to {gpu(op.dst)}"
        slice_in(op.device, op.lane, f"{tensor}from {gpu(op.src)}")
        slice_in(sender, out, f"{tensor}to {gpu(op.dst)}")
        arrow = {"id": number, "cat": "message", "name": "message"}
        events.append({"ph": "s", "pid": sender, "tid": out, "ts": op.begin / 1000, **arrow})
        events.append({"ph": "f", "bp": "e", "pid": op.device, "tid": op.lane,
                       "ts": op.end / 1000, **arrow})
    for pid in range(trace.devices + 1):
        name = gpu(pid if pid < host else -1)
        events.append({"ph": "M", "pid": pid, "tid": 0, "name": "process_name",
                       "args": {"name": name}})
    for (pid, tid), name in sorted(threads.items()):
        events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name",
                       "args": {"name": name}})
    write(path, json.dumps({"otherData": {"title": trace.title}, "traceEvents": events}).encode())


class Lane:
    """What a row of the picture shows: a device's computations, its sums, or what it receives."""

    def __init__(self, label, height):
        self.label, self.height, self.ops = label, height, []


def lanes_of(trace, device):
    """The lanes of a device, from top to bottom."""
    lanes = {(0, 0): Lane("computes", 22)}
    for op in trace.ops:
        if op.device != device:
            continue
        if op.kind != "message":
            at, lane = (0, 0), None
            if op.stream == "communication":
                at, lane = (1, 0), Lane("adds", 12)
        elif op.src == device:
            at, lane = (3, 0), Lane("sends to host", 12)
        else:
            at, lane = (2, op.src), Lane(f"receives from {gpu(op.src)}", 12)
        lanes.setdefault(at, lane).ops.append(op)
    messages = [lanes[at] for at in sorted(lanes) if at[0] >= 2]
    if len(messages) > 4:  # too many for a label each
        for lane in messages:
            lane.label, lane.height = "", 5
        messages[0].label = "receives, by sender"
    return [lanes[at] for at in sorted(lanes)]


def title_of(trace, op, more):
    """What an operation says under the mouse."""
    text = (f"{op}, {op.kind}: begins at {op.begin / 1e6:.4f} ms, takes "
            f"{(op.end - op.begin) / 1e3:.1f} us, {op.bytes} bytes{trace.waited_for(op)}")
    return text + (f"; and {more} more like it" if more else "")


class Box:
    """Operations of a kind that are drawn as one, because each alone would be too narrow."""

    def __init__(self, op):
        self.ops, self.begin, self.end, self.critical = [op], op.begin, op.end, op.critical

    def takes(self, op, narrow):
        return (op.kind == self.ops[0].kind and op.begin <= self.end + narrow
                and op.end <= self.begin + 4 * narrow)

    def add(self, op):
        self.ops.append(op)
        self.end, self.critical = max(self.end, op.end), self.critical or op.critical


def boxes_of(ops, narrow):
    boxes = []
    for op in ops:
        if boxes and boxes[-1].takes(op, narrow):
            boxes[-1].add(op)
        else:
            boxes.append(Box(op))
    return boxes


def draw_box(axes, box, y, height, pixel, mark):
    """Draw operations from y to y + height; a pixel's width is in nanoseconds."""
    op, width = box.ops[0], max(box.end - box.begin, 0.6 * pixel)
    axes.add_patch(Rectangle((box.begin, y), width, height, gid=mark, clip_on=False,
                             color=KINDS[op.kind], linewidth=0))
    if box.critical:
        axes.add_patch(Rectangle((box.begin, y + height - 2), width, 2, clip_on=False, color=INK,
                                 linewidth=0))
    named = op.kind == "message" and op.name != "message"
    if named and height > 9 and width > 6 * len(op.name) * pixel:
        axes.text(box.begin + 2 * pixel, y + height / 2 - 1, op.name, color="#fefefe", fontsize=7,
                  va="center")


def draw_trace(trace, ms):
    devices = [lanes_of(trace, device) for device in range(trace.devices)]
    gap, pixels = 8, 680  # between devices; the width of the axes
    height = sum(lane.height + 2 for lanes in devices for lane in lanes) + gap * len(devices)
    last = max([1e6 * ms] + [op.end for op in trace.ops])
    pixel = last / pixels
    figure, (axes,), below = axes_of(860, height + 110)
    titles, labels, y = {}, [], 0
    for device, lanes in enumerate(devices):
        for lane in lanes:
            if lane.label:
                labels.append((y + min(lane.height, 15) / 2, f"{gpu(device)} {lane.label}"))
            for box in boxes_of(lane.ops, pixel / 3):
                mark = f"op{len(titles)}"
                titles[mark] = title_of(trace, box.ops[0], len(box.ops) - 1)
                draw_box(axes, box, y, lane.height, pixel, mark)
            y += lane.height + 2
        y += gap
    axes.set_xlim(0, last)
    axes.set_ylim(y, 0)
    axes.set_yticks(*zip(*labels))
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    unit, name = (1e3, "microseconds") if last < 1e6 else (1e6, "ms")
    axes.xaxis.set_major_formatter(lambda at, _: f"{at / unit:g}")
    axes.set_xlabel(name + ("\n" + trace.note if trace.note else ""))
    axes.set_title(trace.title.replace(": ", "\n", 1), loc="left", fontsize=8.5)
    kinds = {op.kind for op in trace.ops}
    shown = [Patch(color=color, label=kind) for kind, color in KINDS.items() if kind in kinds]
    shown.append(Patch(color=INK, label="critical path: shorten it, and the whole is shorter"))
    put_legend(below, shown, columns=len(shown))
    save(figure, "build/trace.svg", titles)


def runs_of(words):
    """The logs that RUNS=, or else LOG=, names."""
    given = dict(word.split("=", 1) for word in words)
    for name in given:
        if name not in ("RUNS", "LOG"):
            sys.exit(f"make plot takes only RUNS and LOG, not {name}")
    return (given.get("RUNS") or given.get("LOG") or "build/log.csv").split()


def main():
    command, *words = sys.argv[1:] or [""]
    os.makedirs("build", exist_ok=True)
    logs = {log: rows_of(log) for log in runs_of(words)} if command == "accuracy" else {}
    if command == "trace":
        trace = Trace(words[0])
        write_json(trace, "build/trace.json")
    if not matplotlib:
        if command == "accuracy":
            return accuracy_as_text(logs)
        print(f"no picture: {MISSING}", file=sys.stderr)
        return None
    if command == "accuracy":
        draw_accuracy(logs)
    elif command == "scale":
        draw_scale()
    elif command == "trace":
        draw_trace(trace, float(words[1]) if len(words) > 1 and words[1] else 0)
    else:
        sys.exit(__doc__.strip())


if __name__ == "__main__":
    main()
