#!/usr/bin/env python3
"""Grades extras/exercise/right and extras/exercise/wrong/handed_in, and some of extras/exercise/wrong, in one call.

The first line of a file says what comes of it: // STATUS SCORE: words ... of the first error
"""

import csv
import glob
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as xml

failed = 0


def check(right, what):
    global failed
    if not right:
        failed += 1
        print("FAILED:", what)


def says(text, words):  # one after another
    at = 0
    for word in words.split(" ... "):
        at = text.find(word.strip(), at)
        if at < 0:
            return False
    return True


files = glob.glob("extras/exercise/right/*.cu") + glob.glob("extras/exercise/wrong/handed_in/*.cu")
expected = {}
for path in files:
    status, words = open(path).readline()[3:].split(":", 1)
    expected[os.path.basename(path)[:-3]] = (*status.rsplit(" ", 1), words.strip())
# Their first lines are words of the judge
for name, status in (("exits", "crash"), ("calls_sharded", "wrong"), ("two_lines", "wrong")):
    files.append(f"extras/exercise/wrong/{name}.cu")
    expected[name] = (status, "0", open(files[-1]).readline()[3:].strip().split(" ... ")[-1])

folders = ["extras/exercise/right", "extras/exercise/wrong/handed_in"] + files[-3:]
folders += ["build/handed_in", "build/handed_in/more", "build/handed_in/again/more"]
for folder in ("build/handed_in", "build/grades"):  # as in a fresh checkout
    shutil.rmtree(folder, ignore_errors=True)
if os.path.exists("build/written_by_a_submission"):
    os.remove("build/written_by_a_submission")

# A whole mgpu.cu, with a kernel of its own above the slot
before, slot, after = open("mgpu.cu").read().partition("void allreduce_yours(")
kernel = """__global__ void my_kernel(float *a, const float *b, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) a[i] += b[i];
}
static void my_add(const Tensor &a, const Tensor &b) {
    const int n = size(a);
    LAUNCH(my_kernel<<<blocks(n), threads, 0, stream_of(a.device)>>>(a.ptr(), b.ptr(), n));
}
"""
files.append("build/handed_in/own_kernel/mgpu.cu")
expected["own_kernel"] = ("passed", "100", "")
os.makedirs(os.path.dirname(files[-1]), exist_ok=True)
with open(files[-1], "w") as file:
    file.write(before + kernel + slot + after.replace("add_(", "my_add(", 1))

# Another algorithm under its name
files.append("build/handed_in/renamed/mgpu.cu")
expected["renamed"] = ("wrong", "0", "this is bucket")
os.makedirs(os.path.dirname(files[-1]), exist_ok=True)
with open(files[-1], "w") as file:
    file.write(f"{before}#define allreduce_yours allreduce_bucket\n{kernel}")
    file.write(after[after.index("\n}\n") + 3 :])

with open("build/handed_in/notes.txt", "w") as file:
    file.write("no submission")

# Names of files, each with the name that is graded
nobody = '#include "nobody.h" // <<<'
odd = {
    ".cu": "_",
    "..cu": ".",
    252 * "a" + ".cu": 200 * "a",
    b"\xff\x1b.cu": "??",
    "O'Brien \"\\\n$(x).cu": "O'Brien \"\\ $(x)",
    "=1+1.cu": "'=1+1",
    "Größe\u2028.cu": "Größe?",
    "more/bob.cu": "more.bob",
    "again/more/bob.cu": "more.bob.2",
}
for entry, name in odd.items():
    files.append(os.path.join(b"build/handed_in", entry if isinstance(entry, bytes) else entry.encode()))
    os.makedirs(os.path.dirname(files[-1]), exist_ok=True)
    with open(files[-1], "w") as file:
        file.write(nobody)
    expected[name] = ("does not compile", "0", "nobody.h")
# Sources: many, to read until the time is over; too long; long to translate
for name, text, words in (
    ("large", "/" * (1 << 20) + nobody, "more than 1048576 bytes"),
    ("launches", "/*" + 40000 * "<<<" + "*/" + nobody, ""),
):
    files.append(f"build/handed_in/{name}.cu")
    expected[name] = ("does not compile", "0", words)
    with open(files[-1], "w") as file:
        file.write(text)
command = ["make", "-s", "BACKEND=cpu", "grade", "SUBMISSIONS=" + " ".join(folders)]
graded = subprocess.run(command, capture_output=True, text=True)
print(graded.stdout)
check(graded.returncode == 2, "make's status where some have no full marks")
rows = {row["name"]: row for row in csv.DictReader(open("build/grades/grades.csv"))}
written = [open(f).read() for f in glob.glob("build/grades/*") + glob.glob("build/grades/.*")]
control = {c for text in [graded.stdout] + written for c in text if not c.isprintable()}
check(control <= {"\n", "\t"}, f"characters that do not print: {control}")
check(rows.keys() == expected.keys(), f"{rows.keys()} are graded")
for name, (status, score, words) in expected.items():
    row = rows.get(name, {})
    got = f"{name}: {row.get('status')} {row.get('score')}: {row.get('first error')}"
    check((row.get("status"), row.get("score")) == (status, score), got)
    check(says(row.get("first error", ""), words), f"{got}, not {words}")
    name = name.lstrip("'")  # which keeps a spreadsheet from computing it
    check(os.path.getsize(f"build/grades/{name}.txt") > 0, f"{name}.txt")
    check(bool(row.get("messages")) == (status == "passed"), got)

told = "build/handed_in/notes.txt: not judged"
check(told in graded.stdout, told)
sandboxed = "bwrap keeps each submission in a folder of its own\n" in graded.stdout
bwrap = "bwrap --ro-bind / / --proc /proc --unshare-all true".split()
if shutil.which("bwrap") and subprocess.run(bwrap, capture_output=True).returncode == 0:
    check(sandboxed, "bwrap works here, but is not used")
else:
    print("what a submission writes: skipped, bwrap does not work here")
check(not (sandboxed and os.path.exists("build/written_by_a_submission")), "it writes outside")
left = [p for p in glob.glob("/proc/[0-9]*/cmdline") if b"31415" in open(p, "rb").read()]
check(not left, f"processes are left: {left}")

for test in json.load(open("build/grades/results.json"))["tests"]:  # as Gradescope reads them
    check(0 <= test["score"] <= test["max_score"] and test["name"], test)
    check(test["status"] in ("passed", "failed") and test["output_format"] == "text", test)
suites = xml.parse("build/grades/grades.xml").getroot()
check(len(suites) == len(files), "a suite for each in grades.xml")

# One alone, one part of it: as Gradescope and GitHub Classroom do
command[-1] = "SUBMISSIONS=extras/exercise/right/owners.cu"
check(subprocess.run(command + ["ONLY=sums"], capture_output=True).returncode == 0, "ONLY=sums")
result = json.load(open("build/grades/results.json"))
check([t["name"] for t in result["tests"]] == ["sums"], "ONLY=sums has one test")
check(result["score"] == 60 and result["leaderboard"][0]["name"] == "busiest device", result)
# One alone does not see the others
with open("build/handed_in/bob.cu", "w") as file:
    file.write(f'#include "{os.path.abspath("build/handed_in/large.cu")}"')
alone = subprocess.run(command[:-1] + ["SUBMISSIONS=build/handed_in/bob.cu"], capture_output=True)
check(b"No such file" in alone.stdout or not sandboxed, alone.stdout)
for words, told in (
    ("ONLY=sum", "choose one of sums, bits, host"),
    ("SUBMISSIONS=/not/there", "no such"),
):
    wrong = subprocess.run(command + [words], capture_output=True, text=True)
    check(wrong.returncode and told in wrong.stderr, words + ": " + wrong.stderr)
# Where nothing isolates the submissions (ccache's g++ would look for another one in PATH)
shutil.rmtree("build/bin", ignore_errors=True)
os.makedirs("build/bin")
for program in sum((glob.glob(folder + "/*") for folder in os.environ["PATH"].split(":")), []):
    name = os.path.basename(program)
    if name in ("bwrap", "unshare") or os.path.realpath(program).endswith("/ccache"):
        continue
    if not os.path.lexists("build/bin/" + name):
        os.symlink(program, "build/bin/" + name)
alone = dict(os.environ, PATH=os.path.abspath("build/bin"))
refused = subprocess.run(command, capture_output=True, text=True, env=alone)
check(refused.returncode == 2 and "install bubblewrap" in refused.stderr, refused.stderr)
trusted = subprocess.run(command + ["ISOLATE=0"], capture_output=True, text=True, env=alone)
check(trusted.returncode == 0 and "runs as you" in trusted.stdout, trusted.stdout)
print(f"grade: {len(files)} submissions, {failed} failed")
sys.exit(failed > 0)
