#!/usr/bin/env python3
"""Plants the mistakes of extras/check/mistakes.txt into copies of mgpu.cu and its parts, one switch a
mistake, and looks whether `make run` and `make check` explain them.

    python3 extras/check/plant.py apply           find the place of each mistake; nothing is compiled
    python3 extras/check/plant.py try [NAME...]   run each, or those whose names contain a NAME
    python3 extras/check/plant.py sample          apply, then run some; status 1 if one fails

A copy is a folder with mgpu.cu, the parts extras/algorithms/ and extras/networks/ where they are
there, and program.cu, which includes these and extras/fast/. An operator with a mistake is an
edited one, so it runs in place of the tuned one. Mistakes that change the same place come into different
copies, so there are a few of them. A copy is compiled once (extras/check/plant.cu); the environment
variable PLANT says which of its mistakes it makes.
"""
import glob, os, re, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor

LIST, FOLDER = "extras/check/mistakes.txt", "build/plant"
PARTS = ["mgpu.cu", "extras/algorithms/algorithms.cu", "extras/networks/networks.cu"]
PARTS = [part for part in PARTS if os.path.exists(part)]
SOURCES = PARTS + sorted(glob.glob("extras/algorithms/*.h"))
FAST = "extras/fast"  # as students have it; what it replaces is included as fast.mk includes it
PLAIN = [p for p in PARTS if "algorithms" not in p] if os.path.exists(FAST) else []
# What is included as a copy that extras/replaced.sh makes, in which folder, and what replaces it
COPIED, COPIES = (PLAIN, "plain") if PLAIN else (["mgpu.cu"], "replaced")
REPLACING = ["extras/hooks.cu"] + [f"{FAST}/fast.cu"] * bool(PLAIN)
# Less than the program takes by itself: a third, smaller minibatch shall be the last
OPTIONS = {"run": "run GPUS=2 EPOCHS=1 BATCH=64 LIMIT=150", "check": ""}
if PARTS[-1].endswith("networks.cu"):
    OPTIONS["check"] = "MODEL=lenet"  # alone
WIDTH = 300  # of what is printed of the words
SECONDS = {"run": 60, "check": 120}
MEANT = "if this is intended, use CHECKS=0"
SAMPLE = """
params_no_attach allreduce_no_broadcast split_no_begin sgd_sign backward_mean relu_no_bounds
group_no_wait right_relu_looks_at_y
""".split()


class Source:
    """A file, and where its definitions stand, as extras/definitions.awk finds them"""

    def __init__(self, path):
        self.text = open(path).read()
        # Comments become blanks: they are no places
        self.code = re.sub(
            r"""("(\\.|[^"\\\n])*"|'(\\.|[^'\\\n])+')|//[^\n]*|(?s:/\*.*?\*/)""",
            lambda m: m[1] or re.sub(r"\S", " ", m[0]), self.text)
        line_begins = [0, *(m.end() for m in re.finditer("\n", self.text)), len(self.text)]
        self.definitions = {}  # name -> [(begin, end)]
        command = ["awk", "-f", "extras/definitions.awk", path]
        for line in subprocess.check_output(command, text=True).splitlines():
            name, _, first, last = line.split()
            place = line_begins[int(first) - 1], line_begins[int(last)]
            self.definitions.setdefault(name, []).append(place)

    def find(self, name, anchor):
        """(begin, end) of each place in the definitions of this name. A space in the anchor may be
        the end of a line."""
        pattern = re.compile(r"\s+".join(re.escape(word) for word in anchor.split()))
        return [m.span() for begin, end in self.definitions.get(name, ())
                for m in pattern.finditer(self.code, begin, end)]


class Change:
    def __init__(self, where, name, anchor, new):
        self.where, self.name, self.anchor, self.new = where, name, anchor, new

    def place(self, path, source, number):
        """(path, begin, end, new text)"""
        found, new = source.find(self.name, self.anchor), self.new
        if len(found) != 1:
            raise ValueError(
                f"{self.name} of {path} has this {len(found)} times, not once: {self.anchor}"
                if self.name in source.definitions else f"{path} defines no {self.name}")
        begin, end = found[0]
        old = source.text[begin:end]
        if "PLANTED" not in new:
            new = (f"if (PLANTED) {{ {new} }}" if self.where != "in" else
                   f"(PLANTED ? {new} : {old})" if new else f"if (!PLANTED) {old}")
        if self.where == "before":  # before the line's code
            begin = source.code.rfind("\n", 0, begin) + 1
            begin = end = begin + len(re.match(r"\s*", source.code[begin:])[0])
            new += " "
        elif self.where == "after":  # behind it
            begin = end = end + len(re.match(r".*", source.code[end:])[0].rstrip())
            new = " " + new
        return path, begin, end, new.replace("PLANTED", f"(planted == {number})")


class Entry:
    def __init__(self, number, kind, name, words):
        self.number, self.kind, self.name, self.words = number, kind, name, words
        self.expect, self.options, self.right, self.file = None, [], False, "mgpu.cu"
        self.changes = []

    def operators(self):
        """Those that it edits, which run instead of the tuned ones"""
        names = {c.name for c in self.changes}
        lines = open(f"{FAST}/operators") if PLAIN else []
        table = [line.split(": ") for line in lines if line[0] != "#"]
        return " ".join(ops for ops, definitions in table if names & set(definitions.split()))

    def places(self, sources):
        """Of each change; None if one has no place"""
        try:
            return [c.place(self.file, sources[self.file], self.number) for c in self.changes]
        except (KeyError, ValueError) as problem:
            print(f"{LIST}: {self.name}: {problem}")


def read_list():
    """A block is NAME: words, then options:, file:, expect: or right, then changes. mistakes.txt
    begins with an explanation."""
    entries, kind = [], ""
    for line in open(LIST):
        line = line.rstrip()
        change = re.match(r"(in|before|after) (\S+): (.+?) =>( .*|$)", line)
        if line.startswith("=="):
            kind = line[2:].strip()
        elif change:
            entries[-1].changes.append(Change(*change.groups()[:3], change[4].strip()))
        elif line.startswith(" "):  # the change goes on
            last = entries[-1].changes[-1]
            last.new = f"{last.new} {line.strip()}".strip()
        elif line == "right":
            entries[-1].right = True
        elif line and line[0] != "#":
            key, value = (text.strip() for text in line.split(":", 1))
            if key == "options":
                entries[-1].options = value.split()
            elif key == "file":
                entries[-1].file = value
            elif key == "expect":
                entries[-1].expect = re.compile(value, re.I | re.S)
            else:
                entries.append(Entry(len(entries) + 1, kind, key, value))
    names = [e.name for e in entries]
    for e in entries:
        if names.count(e.name) > 1 or bool(e.expect) == e.right or not e.changes:
            sys.exit(f"{LIST}: {e.name} occurs twice, or lacks a change, or expect: or right")
    return entries


def write_copies(entries, name=""):
    """Put each entry into the first copy that has room for it. -> the copies' folders"""
    sources, copies = {path: Source(path) for path in SOURCES}, []
    places = {e: e.places(sources) for e in entries}
    if None in places.values():
        sys.exit(1)
    for e in sorted(entries, key=lambda e: places[e]):
        for n, copy in enumerate(copies + [[]]):
            pairs = [sorted([a, b]) for a in copy for b in places[e] if a[0] == b[0]]
            if all(sources[a[0]].text[a[2]:b[1]].strip() for a, b in pairs):  # code stands between
                break
        copies[n:n + 1] = [copy + places[e]]
        e.program = f"{FOLDER}/{name}{n}/check"
    folders = [f"{FOLDER}/{name}{n}" for n in range(len(copies))]
    for folder, copy in zip(folders, copies):
        included = [f"{COPIES}/{part}" if part in COPIED else part for part in PARTS]
        included[1:1] = ["../../../extras/hooks.cu"]
        included += [f"../../../{FAST}/fast.cu"] if PLAIN else []
        texts = {"program.cu": "".join(f'#include "{part}"\n' for part in included)}
        for path in SOURCES:
            texts[path], at = "", 0
            for _, begin, end, new in sorted(place for place in copy if place[0] == path):
                texts[path] += sources[path].text[at:begin] + new
                at = end
            texts[path] += sources[path].text[at:]
        for path, text in texts.items():
            write(f"{folder}/{path}", text)
        for path in COPIED:
            command = ["sh", "extras/replaced.sh", f"{folder}/{path}"] + REPLACING
            write(f"{folder}/{COPIES}/{path}", subprocess.check_output(command, text=True))
    return folders


def write(path, text):  # unless it is there: make goes by times
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if not os.path.exists(path) or open(path).read() != text:
        open(path, "w").write(text)


def build(entries, name=""):
    programs = [f"{folder}/check" for folder in write_copies(entries, name)]
    make = ["nice", "make", "-k", "--no-print-directory", "BACKEND=cpu", *programs, "data"]
    if subprocess.run(make).returncode:
        sys.exit("a copy does not compile: see above")
    return programs


def start(program, number, operators, what, options):
    """-> was something noticed, the words, seconds"""
    words = [*OPTIONS[what].split(), *options]
    words = list({word.split("=")[0]: word for word in words}.values())  # the last of each name
    env = {**os.environ, "PLANT": str(number), "EDITED": operators}
    begin = time.time()
    try:
        p = subprocess.run([program, *words], capture_output=True, text=True,
                           errors="replace", env=env, timeout=SECONDS[what],
                           stdin=subprocess.DEVNULL)
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
        noticed, words, seconds = start(e.program, e.number, e.operators(), what, e.options)
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
        for row in (e.kind, "all"):
            for column in (best, "run " + got["run"], "check " + got["check"]):
                count[row, column] = count.get((row, column), 0) + 1
    columns = ["run named", "check named", "named", "generic", "silent", "quiet", "alarm"]
    rows = dict.fromkeys(row for row, column in count)
    width = max(map(len, rows))
    print("\n" + " " * width + "".join(f"{c:>12}" for c in columns))
    for row in rows:
        print(f"{row:{width}}" + "".join(f"{count.get((row, c), 0):12}" for c in columns))
    for what in times:
        print(f"{what}: {sum(times[what]):.0f} s, the longest {max(times[what]):.1f} s")
    if bad:
        print("\n".join(["", "Unexpected:", *bad]))
    return bad


def main():
    what, *names = sys.argv[1:] or ["help"]
    entries = read_list()
    if what == "apply":
        folders = write_copies(entries)
        print(f"{len(entries)} mistakes in {len(folders)} copies: {FOLDER}/")
    elif what == "try":
        chosen = [e for e in entries if not names or any(n in e.name for n in names)]
        programs = build(chosen, "chosen" if names else "")
        for what in ("run", "check"):  # with none of them planted nothing may be noticed
            for program in programs:
                noticed, words, seconds = start(program, 0, "", what, [])
                if noticed:
                    sys.exit(f"{program}: {what} complains without a mistake: {words}")
        try_all(chosen)
    elif what == "sample":
        chosen = [e for e in entries if e.name in SAMPLE]
        if len(chosen) < len(SAMPLE):
            sys.exit(f"{LIST} lacks one of {' '.join(SAMPLE)}")
        write_copies(entries)  # all have their places
        build(chosen, "sample")
        sys.exit(1 if try_all(chosen) else 0)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
