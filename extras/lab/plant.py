#!/usr/bin/env python3
"""Plants the mistakes of extras/lab/mistakes.txt into copies of mgpu.cu and networks.cu, one switch a
mistake, and looks whether `make run` and `make check` explain them.

    python3 extras/lab/plant.py build           write and compile the copies
    python3 extras/lab/plant.py try [NAME...]   run each mistake, or those whose names contain a NAME
    python3 extras/lab/plant.py sample          some of them; status 1 if one is not explained

A copy is a folder with mgpu.cu and, where it is there, extras/networks/networks.cu, which includes it.
Mistakes whose texts overlap come into different copies, so there are a few of them. A copy is
compiled once (extras/lab/plant.cu); the environment variable PLANT says which of its mistakes it makes.
"""
import os, re, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor

LIST, FOLDER = "extras/lab/mistakes.txt", "build/plant"
SOURCES = [s for s in ("mgpu.cu", "extras/networks/networks.cu") if os.path.exists(s)]
# Less than the program takes by itself: a third, smaller minibatch shall be the last
OPTIONS = {"run": "run GPUS=2 EPOCHS=1 BATCH=64 LIMIT=150", "check": "MODEL=lenet"}
WIDTH = 300  # of what is printed of the words
SECONDS = {"run": 60, "check": 120}
MEANT = "if this is intended, use FIRST_CHECK=0"
SAMPLE = """
lenet_no_flatten params_no_attach allreduce_no_broadcast allreduce_sum_early split_no_begin
train_backward_gpu0 sgd_sign attach_on_gpu0 backward_mean relu_no_bounds right_flatten
right_relu_looks_at_y
""".split()


class Entry:
    def __init__(self, number, section, name, words):
        self.number, self.section, self.name, self.words = number, section, name, words
        self.expect, self.options, self.hunks, self.right = None, [], [([], [])], False

    def changes(self, texts):
        """(source, begin, end, new text), without what old and new text have in common.
        A hunk belongs to the first source in which its old text stands exactly once."""
        for old, new in (("\n".join(lines) for lines in hunk) for hunk in self.hunks):
            source = next((s for s in SOURCES if texts[s].count(old) == 1), None)
            if not source:
                times = ", ".join(f"{texts[s].count(old)} times in {s}" for s in SOURCES)
                print(f"{LIST}: {self.name}: its old text occurs {times}: {old}")
                yield None
                continue
            begin = len(os.path.commonprefix([old, new]))
            shorter = min(len(old), len(new)) - begin
            end = len(os.path.commonprefix([old[::-1], new[::-1]])[:shorter])
            text = new[begin:len(new) - end].replace("PLANTED", f"(planted == {self.number})")
            at = texts[source].index(old)
            yield source, at + begin, at + len(old) - end, text


def read_list():
    """A block is NAME: words, then options:, expect: or right, then a hunk as diff prints it."""
    entries, section = [], ""
    for line in open(LIST):
        line = line.rstrip("\n")
        if line.startswith("=="):
            section = line[2:].strip()
        elif line == "@@":
            entries[-1].hunks.append(([], []))
        elif line and line[0] in "-+ ":
            old, new = entries[-1].hunks[-1]
            if line[0] in "- ":
                old.append(line[2:])
            if line[0] in "+ ":
                new.append(line[2:])
        elif line == "right":
            entries[-1].right = True
        elif line and line[0] != "#":
            key, value = line.split(":", 1)
            if key == "options":
                entries[-1].options = value.split()
            elif key == "expect":
                entries[-1].expect = re.compile(value.strip(), re.I | re.S)
            else:
                entries.append(Entry(len(entries) + 1, section, key, value.strip()))
    names = [e.name for e in entries]
    for e in entries:
        if names.count(e.name) > 1 or bool(e.expect) == e.right or \
                any("PLANTED" not in "".join(new) for old, new in e.hunks):
            sys.exit(f"{LIST}: {e.name} occurs twice, or lacks expect: or right, or PLANTED")
    return entries


def build(entries, name=""):
    """Put each entry into the first copy that has room for it, and compile the copies."""
    texts, copies = {s: open(s).read() for s in SOURCES}, []
    changes = {e: list(e.changes(texts)) for e in entries}
    if any(None in places for places in changes.values()):
        sys.exit(1)
    for e in sorted(entries, key=lambda e: changes[e]):
        for n, copy in enumerate(copies + [[]]):
            pairs = [sorted([a, b]) for a in copy for b in changes[e] if a[0] == b[0]]
            if all(texts[a[0]][a[2]:b[1]].strip() for a, b in pairs):  # code stands between them
                break
        copies[n:n + 1] = [copy + changes[e]]
        e.program = f"{FOLDER}/{name}{n}/check"
    for n, source in ((n, source) for n in range(len(copies)) for source in SOURCES):
        path, text, at = f"{FOLDER}/{name}{n}/{source}", "", 0
        for begin, end, new in sorted(change[1:] for change in copies[n] if change[0] == source):
            text += texts[source][at:begin] + new
            at = end
        text += texts[source][at:]
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if not os.path.exists(path) or open(path).read() != text:
            open(path, "w").write(text)
    programs = [f"{FOLDER}/{name}{n}/check" for n in range(len(copies))]
    make = ["nice", "make", "-k", "--no-print-directory", "BACKEND=cpu", *programs, "data"]
    if subprocess.run(make).returncode:
        sys.exit("a copy does not compile: see above")
    return programs


def start(program, number, what, options):
    """-> was something noticed, the words, seconds"""
    words = [*OPTIONS[what].split(), "LOG=/dev/null", *options]
    words = list({word.split("=")[0]: word for word in words}.values())  # the last of each name
    begin = time.time()
    try:
        p = subprocess.run([program, *words], capture_output=True, text=True,
                           errors="replace", env={**os.environ, "PLANT": str(number)},
                           timeout=SECONDS[what], stdin=subprocess.DEVNULL)
        status, out, err = p.returncode, p.stdout, p.stderr
    except subprocess.TimeoutExpired:
        return False, f"still running after {SECONDS[what]} s", SECONDS[what]
    said = [s for s in out.splitlines() if s.startswith("notice: ") and "share" not in s]
    said += err.splitlines()
    if status < 0:
        said.append(f"signal {-status}")
    return status != 0 or bool(said), " / ".join(said), time.time() - begin


def try_one(e):
    """-> for run and for check: the verdict, seconds, the words"""
    for what in OPTIONS:
        noticed, words, seconds = start(e.program, e.number, what, e.options)
        if e.right:
            yield "alarm" if noticed and MEANT not in words else "quiet", seconds, words
        else:
            yield ("silent" if not noticed else
                   "named" if e.expect.search(words) else "generic"), seconds, words


def try_all(entries):
    """A line an entry, then the counts. -> those that are not as they should be"""
    count, bad, times = {}, [], {what: [] for what in OPTIONS}
    tried = ThreadPoolExecutor(2).map(lambda e: list(try_one(e)), entries)
    for e, results in zip(entries, tried):
        got = {}
        for what, (verdict, seconds, words) in zip(OPTIONS, results):
            got[what] = verdict
            times[what].append(seconds)
            print(f"{e.name:28} {what:5} {verdict:7} {seconds:5.1f} s  {words[:WIDTH]}", flush=True)
        both = [got["run"], got["check"]]
        best = next(x for x in ("named", "generic", "silent", "alarm", "quiet") if x in both)
        if best not in ("named", "quiet"):
            bad.append(f"{e.name}: {best}: {e.words}")
        for row in (e.section, "all"):
            for column in (best, "run " + got["run"], "check " + got["check"]):
                count[row, column] = count.get((row, column), 0) + 1
    columns = ["run named", "check named", "named", "generic", "silent", "quiet", "alarm"]
    print("\n" + " " * 36 + "".join(f"{c:>12}" for c in columns))
    for row in dict.fromkeys(row for row, column in count):
        print(f"{row:36}" + "".join(f"{count.get((row, c), 0):12}" for c in columns))
    for what in times:
        print(f"{what}: {sum(times[what]):.0f} s, the longest {max(times[what]):.1f} s")
    if bad:
        print("\n".join(["", "Unexpected:", *bad]))
    return bad


def main():
    what, *names = sys.argv[1:] or ["help"]
    entries = read_list()
    if what == "build":
        build(entries)
    elif what == "try":
        chosen = [e for e in entries if not names or any(n in e.name for n in names)]
        programs = build(entries)
        for what in ("run", "check"):  # with none of them planted nothing may be noticed
            for program in programs:
                noticed, words, seconds = start(program, 0, what, [])
                if noticed:
                    sys.exit(f"{program}: {what} complains without a mistake: {words}")
        try_all(chosen)
    elif what == "sample":
        chosen = [e for e in entries if e.name in SAMPLE]
        build(chosen, "sample")
        sys.exit(1 if try_all(chosen) else 0)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
