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


def submissions(folders):
    """Name -> file, and what is no submission. Two of one name are told apart by their folder."""
    found, others = [], []
    for folder in folders:
        if folder.endswith(".cu") and os.path.isfile(folder):
            found.append((os.path.basename(folder)[:-3], folder))
            continue
        if not os.path.isdir(folder):
            sys.exit(f"grade: {folder}: no such folder")
        for entry in sorted(os.listdir(folder)):
            path = os.path.join(folder, entry)
            whole = os.path.join(path, "mgpu.cu")
            if entry.endswith(".cu") and os.path.isfile(path):
                found.append((entry[:-3], path))
            elif os.path.isfile(whole):
                found.append((entry, whole))
            else:
                others.append(path)
    names = [name for name, _ in found]
    named = {
        (
            name if names.count(name) == 1 else f"{os.path.basename(os.path.dirname(path))}.{name}"
        ): path
        for name, path in found
    }
    return named, others


class Sandbox:
    """Runs a command that may write only into one folder, as far as this machine can do that."""

    def __init__(self, hidden):
        self.hidden = [os.path.abspath(f) for f in hidden]
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
        if self.kind == "bwrap":  # /tmp first: this checkout may lie there
            hide = []
            for f in self.hidden:
                hide += ["--tmpfs", f] if os.path.isdir(f) else ["--ro-bind", "/dev/null", f]
            return (
                ["bwrap", "--ro-bind", "/", "/", "--dev-bind", "/dev", "/dev", "--proc", "/proc"]
                + ["--tmpfs", "/tmp", "--tmpfs", "/dev/shm", "--ro-bind", HERE, HERE]
                + hide
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
        return status, text.decode(errors="replace"), time.monotonic() - begin

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


def grade(name, path, options, sandbox):
    """-> the row of grades.csv, with the points of each part and the text"""
    folder = os.path.join(HERE, "build/grades/work", name)
    os.makedirs(folder)
    row = {
        "name": name,
        "status": "does not compile",
        "points": dict.fromkeys(PARTS, 0),
        "seconds": 0,
    }
    source, worker = os.path.join(folder, "mgpu.cu"), os.path.join(folder, "worker")
    with open(path, "rb") as file:
        text = file.read()
    if options.translate:  # <<<>>> and __shared__ in C++
        command = ["sh", options.translate, path]
        output = dict(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        text = subprocess.run(command, **output).stdout
    with open(source, "wb") as file:
        file.write(text)
    copy = ["sh", "extras/exercise/judged.sh", source]
    text = subprocess.run(copy, stdout=subprocess.PIPE, check=True).stdout
    with open(source, "wb") as file:
        file.write(b'#line 1 "%s"\n' % os.path.basename(path).encode() + text)
    compiler = [
        w.replace("@SUBMISSION@", source).replace("@WORKER@", worker) for w in options.compiler
    ]
    status, text, seconds = sandbox.run(
        compiler, folder, LIMITS["seconds_of_compile"], LIMITS["megabytes_of_compile"]
    )
    row["seconds"] += seconds
    if status != 0:
        errors = [line for line in text.splitlines() if "error" in line]
        row["first error"] = (
            f"compiling it takes longer than {LIMITS['seconds_of_compile']} s"
            if status is None
            else (errors or text.splitlines() or ["the compiler says nothing"])[0]
        )
        text = "".join(text.splitlines(True)[:20])  # what follows comes of the first ones
        return finished(row, f"{row['first error']}\n{text}" if status is None else text)

    read_end, write_end = os.pipe()  # the judge closes it to the workers
    os.set_inheritable(write_end, True)
    judge = ["build/cpu/judge", f"WORKER={worker}", f"RESULT={write_end}"] + options.judge
    judge += ["SEED=stdin"]  # what is on its command line the submission can read
    status, text, seconds = sandbox.run(
        judge, folder, LIMITS["seconds_of_submission"], None, False, (write_end,), options.seed
    )
    os.close(write_end)
    row["seconds"] += seconds
    os.set_blocking(read_end, False)
    try:
        result = os.read(read_end, 1 << 16).decode(errors="replace")
    except BlockingIOError:
        result = ""
    os.close(read_end)
    result = dict(line.split(" ", 1) for line in result.splitlines() if " " in line)
    late = f"it takes longer than {LIMITS['seconds_of_submission']} s in all"
    row["status"] = result.get("status", "timeout" if status is None else "crash")
    row["points"] = {p: int(result.get(p, 0)) for p in PARTS}
    for column in ("messages", "bytes", "rounds"):
        row[column] = result.get(column, "")
    row["busiest device"] = result.get("busiest", "")
    row["first error"] = result.get(
        "error",
        "" if row["status"] == "passed" else late if status is None else "the judge was killed",
    )
    return finished(row, text if result else text + row["first error"] + "\n")


def finished(row, text):
    row["text"] = text
    row["score"], row["max"] = sum(row["points"].values()), sum(PARTS.values())
    row["seconds"] = round(row["seconds"], 1)
    return row


def write_csv(rows):
    with open("build/grades/grades.csv", "w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


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
    with open("build/grades/results.json", "w") as file:
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
                # The characters that XML 1.0 has
                text = re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd]", "?", row["text"])
                xml.SubElement(case, "failure", message=row["status"]).text = text
    xml.ElementTree(suites).write("build/grades/grades.xml", encoding="unicode")


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
    words = dict(word.split("=", 1) for word in sys.argv[1:])
    options = argparse.Namespace(
        submissions=words.pop("SUBMISSIONS", ""),  # folders, with spaces between
        only=words.pop("ONLY", ""),
        translate=words.pop("TRANSLATE", ""),  # a shell script for the sources
        alone=words.pop("ISOLATE", "1") != "0",
        seed=words.pop("SEED", str(random.SystemRandom().randrange(1 << 32))),
        compiler=shlex.split(words.pop("COMPILER")),  # a command: @SUBMISSION@ to @WORKER@
        judge=[f"{name}={value}" for name, value in words.items()],
    )
    folders = options.submissions
    folders = [folders] if os.path.isdir(folders) else folders.split()
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
    sandbox = Sandbox(folders + ["build/grades"])
    if sandbox.kind == "none" and options.alone:
        sys.exit(
            "grade: nothing here keeps a submission from your files and from the other submissions: "
            "install bubblewrap, or use ISOLATE=0 if you trust them all"
        )
    shutil.rmtree("build/grades", ignore_errors=True)
    os.makedirs("build/grades/work")
    for path in others:
        print(f"{path}: not judged, since it is neither NAME.cu nor NAME/mgpu.cu")
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
        jobs = [pool.submit(grade, name, path, options, sandbox) for name, path in found.items()]
        for job in jobs:
            row = job.result()
            rows.append(row)
            with open(f"build/grades/{row['name']}.txt", "w") as file:
                file.write(row["text"])
            error = row["first error"][:200]
            print(
                f"{row['name']:20} {row['status']:16} {row['score']:3}/{row['max']} "
                f"{row['seconds']:6.1f} s  {error}",
                flush=True,
            )
    shutil.rmtree("build/grades/work", ignore_errors=True)
    write_csv(rows)
    write_gradescope(rows)
    write_junit(rows)
    full = sum(row["score"] == row["max"] for row in rows)
    print(f"{len(rows)} submissions, {full} with full marks: build/grades/grades.csv")
    return 0 if full == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
