#!/usr/bin/env python3
"""Judges every submission of some folders: NAME.cu, or NAME/mgpu.cu.

    make grade SUBMISSIONS='folder ...' [ONLY=sums|bits|host] [ISOLATE=0]

A line each, and in build/grades: grades.csv; NAME.txt with the judge's words; results.json as
Gradescope reads it; grades.xml, JUnit's. Exit status 1 below full marks, or if nothing was judged.
Each is compiled as the worker's SUBMISSION in a folder of its own and judged by this checkout's
judge. Limits and points stand in extras/exercise/judged_cases.h.
"""

import argparse
import concurrent.futures
import csv
import ctypes
import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as xml

HERE = os.getcwd()
LIMITS = {}
for name, value in re.findall(r"constexpr int (\w+) = ([^;]+);", open("extras/exercise/judged_cases.h").read()):
    LIMITS[name] = eval(value, {"__builtins__": {}}, LIMITS)  # numbers, and names before them
PARTS = {p: LIMITS["points_" + p] for p in ("sums", "bits", "host")}
COLUMNS = "name,status,score,max,seconds,messages,bytes,busiest device,rounds,first error".split(",")


def cleaned(text):
    """What a submission says, or a file's name, fit for any file, table or terminal: only what
    prints, in lines. (A byte that is no UTF-8 is no character that prints.)"""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def submissions(folders):
    """Name -> file, and what is no submission. Files of one name are told apart by their folders
    and, if these have one name, too, by numbers."""
    found, others = [], []
    for folder in folders:
        if folder.endswith(".cu") and os.path.isfile(folder):
            found.append((os.path.basename(folder)[:-3], os.path.dirname(folder), folder))
            continue
        if not os.path.isdir(folder):
            sys.exit(f"grade: {folder}: no such folder")
        for entry in sorted(os.listdir(folder)):
            path = os.path.join(folder, entry)
            whole = os.path.join(path, "mgpu.cu")
            if entry.endswith(".cu") and os.path.isfile(path):
                found.append((entry[:-3], folder, path))
            elif os.path.isfile(whole):
                found.append((entry, folder, whole))
            else:
                others.append(path)
    names = [name for name, _, _ in found]
    named = {}
    for name, folder, path in found:
        if names.count(name) > 1:
            name = f"{os.path.basename(os.path.abspath(folder))}.{name}"
        # NAME.txt is a file, too: at most 255 bytes
        name = " ".join(cleaned(name).split()).encode()[:200].decode(errors="ignore") or "_"
        numbered = (f"{name}.{i}" for i in range(2, len(found) + 2))
        named[name if name not in named else next(n for n in numbered if n not in named)] = path
    return named, others


def hidden_from_each(folders, found):
    """Where the others' files are: their folders, and what is linked from there"""
    hidden = {os.path.realpath(os.path.dirname(f) if os.path.isfile(f) else f) for f in folders}
    hidden.discard(HERE)  # where what a compiler reads is
    files = {os.path.realpath(path) for path in found.values()}
    return sorted(hidden) + sorted(f for f in files if os.path.dirname(f) not in hidden)


class Sandbox:
    """Runs a command that may write only into one folder, as far as this machine can do that."""

    def __init__(self, hidden):
        self.hidden = hidden + [os.path.abspath("build/grades")]
        self.kind = next((k for k in ("bwrap", "unshare") if self.works(k)), "none")
        self.running, self.lock = set(), threading.Lock()
        # What a process leaves behind becomes a child of this one: PR_SET_CHILD_SUBREAPER
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
        # Nobody else opens this process' files, such as the end of a judge's pipe: PR_SET_DUMPABLE
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)

    def works(self, kind):
        self.kind = kind
        probe = self.words("/tmp") + ["true"]
        return shutil.which(kind) and subprocess.run(probe, capture_output=True).returncode == 0

    def words(self, folder, writes=True):
        if self.kind == "bwrap":  # first what this checkout may lie in, such as /tmp
            around, within = [], []
            for f in self.hidden:
                hide = ["--tmpfs", f] if os.path.isdir(f) else ["--ro-bind", "/dev/null", f]
                (around if HERE.startswith(os.path.join(f, "")) else within).extend(hide)
            return (
                ["bwrap", "--ro-bind", "/", "/", "--dev-bind", "/dev", "/dev", "--proc", "/proc"]
                + ["--tmpfs", "/tmp", "--tmpfs", "/dev/shm"]
                + around
                + ["--ro-bind", HERE, HERE]
                + within
                + ["--bind" if writes else "--ro-bind", folder, folder]
                + ["--unshare-all", "--cap-drop", "ALL"]
                + ["--die-with-parent", "--new-session"]
            )
        if self.kind == "unshare":  # no network; its processes end with it
            return ["unshare", "-Urnpf", "--mount-proc", "--kill-child"]
        return []

    def run(self, command, folder, seconds, megabytes=None, writes=True, pass_fds=(), said=""):
        """-> exit status (None: it took too long), what it printed, seconds"""

        def limit():
            most = LIMITS["megabytes_of_file"] << 20
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if megabytes:
                resource.setrlimit(resource.RLIMIT_DATA, (megabytes << 20, megabytes << 20))

        begin = time.monotonic()
        environment = {
            k: os.environ[k] for k in ("PATH", "HOME", "LANG", "USER") if k in os.environ
        }
        with self.lock:
            process = subprocess.Popen(
                self.words(folder, writes) + command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                preexec_fn=limit,
                pass_fds=pass_fds,
                start_new_session=True,
                env=environment,
            )
            self.running.add(process.pid)
        process.stdin.write(said.encode())
        process.stdin.close()
        text = bytearray()

        def read():
            for bytes in iter(lambda: process.stdout.read1(1 << 16), b""):
                text.extend(bytes[: LIMITS["bytes_of_report"] - len(text)])

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            status = None
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        with self.lock:
            self.running.discard(process.pid)
        self.reap()
        reader.join(1)  # another process may hold the pipe
        return status, cleaned(text.decode(errors="replace")), time.monotonic() - begin

    def reap(self):
        """Ends the processes that were left behind: children that nobody here has started."""
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                parent = int(open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
            with self.lock:
                if parent == os.getpid() and int(pid) not in self.running:
                    os.kill(int(pid), signal.SIGKILL)
                    os.waitpid(int(pid), 0)


def grade(number, name, path, options, sandbox):
    """-> the row of grades.csv, with the points of each part and the text"""
    folder = f"build/grades/tried/{number}"
    os.makedirs(folder)
    row = {
        "name": name,
        "status": "does not compile",
        "points": dict.fromkeys(PARTS, 0),
        "seconds": 0,
    }
    try:
        with open(path, "rb") as file:
            text = file.read(LIMITS["bytes_of_source"] + 1)
    except OSError as e:
        return finished(row, f"the file cannot be read: {e.strerror}")
    if len(text) > LIMITS["bytes_of_source"]:
        return finished(row, f"the file has more than {LIMITS['bytes_of_source']} bytes")
    # As an error names it
    called = "mgpu.cu" if path.endswith("/mgpu.cu") else re.sub(r'[\\"]', "?", name) + ".cu"
    submitted = f"{folder}/{called}"
    with open(submitted, "wb") as file:
        file.write(text)
    with open(f"{folder}/source", "w", encoding="utf-8") as file:
        file.write(f'#line 1 "{called}"\n')
    # All that reads it, within limits
    source, worker = f"{HERE}/{folder}/source", f"{HERE}/{folder}/worker"
    compiler = [
        w.replace("@SUBMISSION@", source).replace("@WORKER@", worker) for w in options.compiler
    ]
    steps = f"""{options.translate} {shlex.quote(submitted)} >{folder}/whole
        sh extras/exercise/judged.sh {folder}/whole >>{folder}/source
        {shlex.join(compiler)}"""
    status, text, seconds = sandbox.run(
        ["sh", "-ec", steps],
        os.path.abspath(folder),
        LIMITS["seconds_of_compile"],
        LIMITS["megabytes_of_compile"],
    )
    text = text.replace(folder + "/", "")
    row["seconds"] += seconds
    if status != 0:
        errors = [line for line in text.splitlines() if "error" in line]
        late = f"compiling it takes longer than {LIMITS['seconds_of_compile']} s\n"
        late = [late] if status is None else []
        lines = text.splitlines(True)[:20]  # what follows comes of the first ones
        first = (late + errors + lines + ["the compiler says nothing"])[0].rstrip("\n")
        return finished(row, first, "".join(late + lines))

    facts = os.memfd_create("facts")  # the judge closes it to the workers
    os.set_inheritable(facts, True)
    judge = ["build/cpu/judge", f"WORKER={folder}/worker", f"RESULT={facts}"] + options.judge
    judge += ["SEED=stdin"]  # what is on its command line the submission can read
    seconds = LIMITS["seconds_of_submission"]
    status, text, took = sandbox.run(
        judge, os.path.abspath(folder), seconds, None, False, (facts,), options.seed
    )
    row["seconds"] += took
    result = {}
    with open(facts, "rb") as file:
        file.seek(0)
        for line in cleaned(file.read().decode(errors="replace")).split("\n"):
            fact, _, value = line.partition(" ")
            result.setdefault(fact, value)  # only the first counts
    row["status"] = result.get("status", "timeout" if status is None else "crash")
    row["points"] = {p: int(result.get(p, 0)) for p in PARTS}
    for column in ("messages", "bytes", "rounds"):
        row[column] = result.get(column, "")
    row["busiest device"] = result.get("busiest", "")
    late = f"it takes longer than {seconds} s in all"
    none = "" if row["status"] == "passed" else late if status is None else "the judge was killed"
    error = result.get("error", none)
    return finished(row, error, text if "status" in result else f"{text}{error}\n")


def finished(row, error, text=""):
    row["first error"], row["text"] = error, text or error + "\n"
    row["score"], row["max"] = sum(row["points"].values()), sum(PARTS.values())
    row["seconds"] = round(row["seconds"], 1)
    return row


def written(file):
    return open(f"build/grades/{file}", "w", newline="", encoding="utf-8")


def write_csv(rows):
    """(A spreadsheet computes a cell that begins with one of these characters.)"""
    with written("grades.csv") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for row in rows:
            cells = [str(row.get(column, "")) for column in COLUMNS]
            table.writerow(["'" * (cell[:1] in tuple("=+-@\t")) + cell for cell in cells])


def write_gradescope(rows):
    """https://gradescope-autograders.readthedocs.io/en/latest/specs/"""
    tests = [
        {
            "name": part if len(rows) == 1 else f"{row['name']}: {part}",
            "score": row["points"][part],
            "max_score": PARTS[part],
            "status": "passed" if row["points"][part] == PARTS[part] else "failed",
            "output": row["text"],
            "output_format": "text",
            "visibility": "visible",
        }
        for row in rows
        for part in PARTS
    ]
    board = [
        {"name": column, "value": int(rows[0][column]), "order": "asc"}
        for column in ("busiest device", "rounds", "messages")
        if len(rows) == 1 and rows[0].get(column)
    ]
    result = {
        "score": sum(row["score"] for row in rows),
        "execution_time": sum(row["seconds"] for row in rows),
        "stdout_visibility": "hidden",
        "tests": tests,
        "leaderboard": board,
    }
    with written("results.json") as file:
        json.dump(result, file, indent=1)


def write_junit(rows):
    suites = xml.Element("testsuites")
    for row in rows:
        lost = [p for p in PARTS if row["points"][p] < PARTS[p]]
        suite = xml.SubElement(
            suites,
            "testsuite",
            name=row["name"],
            tests=str(len(PARTS)),
            failures=str(len(lost)),
            errors="0",
            time=str(row["seconds"]),
        )
        for part in PARTS:
            case = xml.SubElement(suite, "testcase", classname=row["name"], name=part, time="0")
            if part in lost:
                xml.SubElement(case, "failure", message=row["status"]).text = row["text"]
    xml.ElementTree(suites).write("build/grades/grades.xml", encoding="utf-8")


def cores():
    """At most so many at a time: the cores that there are, a compiler's memory for each"""
    count = len(os.sched_getaffinity(0))
    free = [int(re.search(r"MemAvailable: *(\d+)", open("/proc/meminfo").read())[1]) >> 10]
    try:
        free.append(int(open("/sys/fs/cgroup/memory.max").read()) >> 20)
    except (OSError, ValueError):
        pass
    return max(1, min(count, min(free) // 600))


def main():
    sys.stdout.reconfigure(errors="replace")  # a terminal may have fewer characters
    words = dict(word.split("=", 1) for word in sys.argv[1:])
    options = argparse.Namespace(
        submissions=words.pop("SUBMISSIONS", ""),  # folders, with spaces between
        only=words.pop("ONLY", ""),
        translate=words.pop("TRANSLATE", "cat"),  # a command: prints a file for the compiler
        alone=words.pop("ISOLATE", "1") != "0",
        seed=words.pop("SEED", str(random.SystemRandom().randrange(1 << 32))),
        compiler=shlex.split(words.pop("COMPILER")),  # a command: @SUBMISSION@ to @WORKER@
        judge=[f"{name}={value}" for name, value in words.items()],
    )
    folders = options.submissions
    folders = [folders] if os.path.exists(folders) else folders.split()
    if options.only and options.only not in PARTS:
        sys.exit(f"grade: ONLY={options.only} is unknown: choose one of {', '.join(PARTS)}")
    found, others = submissions(folders)
    if not folders:
        sys.exit("grade: SUBMISSIONS=folder must name the submissions to judge")
    if not found:
        sys.exit(f"grade: {options.submissions} contains neither NAME.cu nor NAME/mgpu.cu")
    for part in list(PARTS):
        if options.only and part != options.only:
            del PARTS[part]
    os.makedirs("build/grades", exist_ok=True)  # it must be there to be hidden
    sandbox = Sandbox(hidden_from_each(folders, found))
    if sandbox.kind == "none" and options.alone:
        sys.exit(
            "grade: nothing here keeps a submission from your files and from the other submissions: "
            "install bubblewrap, or use ISOLATE=0 if you trust them all"
        )
    shutil.rmtree("build/grades", ignore_errors=True)
    os.makedirs("build/grades/tried")
    for path in others:
        print(f"{cleaned(path)}: not judged, since it is neither NAME.cu nor NAME/mgpu.cu")
    print(
        {
            "bwrap": "bwrap keeps each submission in a folder of its own",
            "unshare": "each submission has no network and leaves no process, but may write "
            "anywhere: only bwrap prevents that",
            "none": "neither bwrap nor unshare works here: each submission runs as you, on your files",
        }[sandbox.kind],
        flush=True,
    )
    rows = []
    with concurrent.futures.ThreadPoolExecutor(cores()) as pool:
        jobs = [
            pool.submit(grade, number, name, path, options, sandbox)
            for number, (name, path) in enumerate(found.items())
        ]
        for job in jobs:
            row = job.result()
            rows.append(row)
            with written(f"{row['name']}.txt") as file:
                file.write(row["text"])
            error = row["first error"][:200]
            print(
                f"{row['name']:20} {row['status']:16} {row['score']:3}/{row['max']} "
                f"{row['seconds']:6.1f} s  {error}",
                flush=True,
            )
    shutil.rmtree("build/grades/tried", ignore_errors=True)
    write_csv(rows)
    write_gradescope(rows)
    write_junit(rows)
    full = sum(row["score"] == row["max"] for row in rows)
    print(f"{len(rows)} submissions, {full} with full marks: build/grades/grades.csv")
    return 0 if full == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
