#!/usr/bin/env python3
"""Grades extras/exercise/right and extras/exercise/wrong/handed_in, and some of extras/exercise/wrong, in one call.

The first line of a file says what comes of it: // STATUS SCORE: words ... of the first error
"""

import csv
import glob
import json
import os
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
for name, status in (("exits", "crash"), ("says_passed", "crash"), ("calls_sharded", "wrong")):
    files.append(f"extras/exercise/wrong/{name}.cu")
    expected[name] = (status, "0", open(files[-1]).readline()[3:].strip())

folders = ["extras/exercise/right", "extras/exercise/wrong/handed_in"] + files[-3:] + ["build/handed_in"]

# A whole mgpu.cu, with a kernel of its own above the slot
before, slot, after = open("mgpu.cu").read().partition("static void allreduce_yours(")
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

with open("build/handed_in/notes.txt", "w") as file:
    file.write("no submission")
command = ["make", "-s", "BACKEND=cpu", "grade", "SUBMISSIONS=" + " ".join(folders)]
graded = subprocess.run(command, capture_output=True, text=True)
print(graded.stdout)
check(graded.returncode == 2, "make's status where some have no full marks")
rows = {row["name"]: row for row in csv.DictReader(open("build/grades/grades.csv"))}
check(rows.keys() == expected.keys(), f"{rows.keys()} are graded")
for name, (status, score, words) in expected.items():
    row = rows.get(name, {})
    got = f"{name}: {row.get('status')} {row.get('score')}: {row.get('first error')}"
    check((row.get("status"), row.get("score")) == (status, score), got)
    check(says(row.get("first error", ""), words), f"{got}, not {words}")
    check(os.path.getsize(f"build/grades/{name}.txt") > 0, f"{name}.txt")
    check(bool(row.get("messages")) == (status == "passed"), got)

told = "build/handed_in/notes.txt: not judged"
check(told in graded.stdout, told)
sandboxed = "bwrap keeps each submission in a folder of its own\n" in graded.stdout
if not sandboxed:
    print("what a submission writes: skipped, bwrap does not work here")
check(not (sandboxed and os.path.exists("build/written_by_a_submission")), "it writes outside")
left = [p for p in glob.glob("/proc/[0-9]*/cmdline") if b"31415" in open(p, "rb").read()]
check(not left, f"processes are left: {left}")

try:
    import jsonschema
except ImportError:
    print("results.json: its schema skipped, no python3-jsonschema")
else:
    schema = json.load(open("extras/exercise/gradescope.schema.json"))
    jsonschema.validate(json.load(open("build/grades/results.json")), schema)
suites = xml.parse("build/grades/grades.xml").getroot()
check(len(suites) == len(files), "a suite for each in grades.xml")

# One alone, one part of it: as Gradescope and GitHub Classroom do
command[-1] = "SUBMISSIONS=extras/exercise/right/owners.cu"
check(subprocess.run(command + ["ONLY=sums"], capture_output=True).returncode == 0, "ONLY=sums")
result = json.load(open("build/grades/results.json"))
check([t["name"] for t in result["tests"]] == ["sums"], "ONLY=sums has one test")
check(result["score"] == 60 and result["leaderboard"][0]["name"] == "busiest device", result)
for words, told in (
    ("ONLY=sum", "choose one of sums, bits, host"),
    ("SUBMISSIONS=/not/there", "no such"),
):
    wrong = subprocess.run(command + [words], capture_output=True, text=True)
    check(wrong.returncode and told in wrong.stderr, words + ": " + wrong.stderr)
# Where nothing isolates the submissions
os.makedirs("build/bin", exist_ok=True)
for program in sum((glob.glob(folder + "/*") for folder in os.environ["PATH"].split(":")), []):
    name = os.path.basename(program)
    if name not in ("bwrap", "unshare") and not os.path.lexists("build/bin/" + name):
        os.symlink(program, "build/bin/" + name)
alone = dict(os.environ, PATH=os.path.abspath("build/bin"))
refused = subprocess.run(command, capture_output=True, text=True, env=alone)
check(refused.returncode == 2 and "install bubblewrap" in refused.stderr, refused.stderr)
trusted = subprocess.run(command + ["ISOLATE=0"], capture_output=True, text=True, env=alone)
check(trusted.returncode == 0 and "runs as you" in trusted.stdout, trusted.stdout)
print(f"grade: {len(files)} submissions, {failed} failed")
sys.exit(failed > 0)
