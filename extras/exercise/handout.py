#!/usr/bin/env python3
"""Makes a copy of the project for students, without the solutions of the exercise.

    make handout DIR=folder [HIDE='ring tree']

HIDE: algorithms of extras/algorithms/ that are left out; by default the whole folder is. nodes/ has a
ring. What judges submissions, and shows what is wrong with them, stays with the teacher.
"""

import glob
import os
import re
import shutil
import sys

COPIED = """Makefile LICENSE *.md *.cu .clang-format data extras/*.* extras/algorithms
    extras/check extras/cpu extras/exercise extras/fast extras/files extras/measure extras/networks
    extras/nodes extras/watch""".split()
TEACHERS = """extras/algorithms/tests.cu extras/check/tests.cu extras/exercise/tests.cu
    extras/measure/tests.cu extras/watch/tests.cu extras/exercise/right extras/check/mistakes.txt
    extras/check/plant.py extras/check/plant.cu extras/check/plant.mk extras/exercise/grade.py
    extras/exercise/grade_test.py extras/exercise/handout.py extras/exercise/teacher.mk
    extras/exercise/teacher.md extras/networks/tests.cu""".split()
# README's sentence on the solutions, and its row for their folder
SENTENCE = (
    r"Seven solutions are\s+in\s+\[.*?your\s+own\.\s+|`OVERLAP=1`, also there,.*?show\."
    r"|\n\| \| \[algorithms/\][^\n]*"
)


def change(path, pattern, text=""):
    """Replaces each match of a pattern in a file, if it is there."""
    if os.path.exists(path):
        with open(path) as file:
            changed = re.sub(pattern, text, file.read())
        with open(path, "w") as file:
            file.write(changed)


def main(folder, hidden):
    names = [os.path.basename(path)[:-2] for path in glob.glob("extras/algorithms/*.h")]
    for name in hidden:
        if name not in names:
            sys.exit(f"handout: HIDE={name} is unknown: choose one of {', '.join(sorted(names))}")
    if not folder:
        sys.exit("handout: DIR=folder must name the folder to create")
    if os.path.exists(folder) and os.listdir(folder):
        sys.exit(f"handout: {folder} is not empty")
    left_out = TEACHERS + [f"extras/algorithms/{name}.h" for name in hidden]
    left_out += [] if hidden else ["extras/algorithms"]
    left_out += [] if hidden and "ring" not in hidden else ["extras/nodes"]

    def ignored(where, files):
        """What shutil.copytree leaves out"""
        paths = {file: os.path.normpath(os.path.join(where, file)) for file in files}
        wrong = re.compile(r"extras/exercise/wrong/.*(?<!\.h)$|.*\.gz$|.*__pycache__$")
        return [file for file in files if paths[file] in left_out or wrong.match(paths[file])]

    for path in [path for pattern in COPIED for path in sorted(glob.glob(pattern))]:
        to = os.path.join(folder, path)
        if path in left_out:
            continue
        os.makedirs(os.path.dirname(to), exist_ok=True)
        if os.path.isdir(path):
            shutil.copytree(path, to, ignore=ignored)
        else:
            shutil.copy(path, to)

    if not hidden:
        change(os.path.join(folder, "README.md"), rf"(?s:{SENTENCE})")
    for name in hidden or names:
        change(os.path.join(folder, "README.md"), rf"(?m)^\| `{name}` \|.*\n")
        change(os.path.join(folder, "extras/algorithms/algorithms.cu"), rf'#include "{name}\.h"\n')
    print(f"{folder}: without {', '.join(sorted(hidden or names))}. Try `make test` and `make exercise` in it")


if __name__ == "__main__":
    words = dict(word.split("=", 1) for word in sys.argv[1:])
    main(words.get("DIR", ""), words.get("HIDE", "").split())
