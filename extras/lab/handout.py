#!/usr/bin/env python3
"""Makes a copy of the project for students, without the solutions of the exercise.

    make handout DIR=folder [HIDE='ring tree']

HIDE: algorithms of section 7 that leave mgpu.cu, with their names in its tables and the READMEs; by
default all but naive, bucket and yours. What judges submissions, and shows what is wrong with
them, stays with the teacher.
"""

import os
import re
import shutil
import sys

KEPT = ["naive", "bucket", "yours"]
ALIASES = {"local": "host", "device": "by_tensor"}  # the lab's words
TEACHERS = """extras/lab/tests.cu extras/lab/right extras/lab/mistakes.txt extras/lab/plant.py
    extras/lab/plant.cu extras/lab/grade.py extras/lab/grade_test.py extras/lab/gradescope.schema.json
    extras/lab/handout.py extras/lab/teacher.mk extras/lab/teacher.md
    extras/networks/tests.cu""".split()


def read(path):
    with open(path) as file:
        return file.read()


def blocks_of(section):
    """// --- name: ...   ->   [name, text], the first without a name"""
    parts = re.split(r"(?m)^(?=// --- )", section)
    return [[re.match(r"(?:// --- (\w+))?", part)[1], part] for part in parts]


def without_algorithms(source, hidden):
    begin, end = (source.index(f"\n// {n}. ", source.index("\n// 2. A toy")) for n in (7, 8))
    blocks = [b for b in blocks_of(source[begin:end]) if b[0] not in hidden]
    # What only the hidden ones have called
    section = "".join(text for _, text in blocks)
    for name in re.findall(r"(?m)^static void (\w+)\(", section):
        if len(re.findall(rf"\b{name}\b", section)) == 1 and name != "send":
            section = re.sub(
                rf"(?m)(?:^//[^\n]*\n)*^static void {name}\((?s:.*?)^}}\n\n?", "", section
            )
    # Tools stay, used or not
    section = re.sub(
        r"(?m)^static (std::vector<Tensor> flatten|Tensor chunk|void send)\(", r"\1(", section
    )
    gone = hidden + [alias for alias, name in ALIASES.items() if name in hidden]
    section = re.sub(rf'\{{"(?:{"|".join(gone)})", \w+\}}, *', "", section)
    table = re.search(r"(?s)(algorithms = \{\n)(.*?)(\};)", section)
    entries = re.findall(r"\{[^}]*\},", table[2])
    section = section.replace(
        table[0], table[1] + "".join(f"    {e}\n" for e in entries) + table[3]
    )
    source = source[:begin] + section + source[end:]
    return source


def without_words_of_lab(source, hidden):
    """KVSTORE's local and device, where what they stand for is hidden"""
    for alias, name in ALIASES.items():
        if name not in hidden:
            continue
        source = re.sub(rf'(?m)^    algorithms.push_back\(\{{"{alias}", .*\n', "", source)
        source = re.sub(rf'(?m)^.*options.allreduce = "{alias}";\n', "", source)
        source = re.sub(r'(?m)^    \{"KVSTORE", .*\n', "", source)
    return source


def without_names(text, hidden):
    """Commands name yours instead; the brackets, rows, items and paragraphs that name one go, and the
    headings that then have nothing below them"""
    words = "|".join(
        f"`(allreduce_)?{n}`|ALLREDUCE={n}" + ("" if n == "host" else rf"|\b{n}\b") for n in hidden
    )
    names = "|".join(hidden)
    text = re.sub(rf"(?m)^(    .*ALLREDUCE=)(?:{names})\b", r"\1yours", text)
    text = re.sub(rf"\s*\([^()]*(?:{words})[^()]*\)(?!\w)", "", text)
    parts = re.split(r"(\n(?=[|*-] )|\n\n+(?!    ))", text)
    kept = [parts[0]]
    for gap, part in zip(parts[1::2], parts[2::2]):
        if not re.search(words, part):
            kept += [gap, part]
    return re.sub(r"(?m)^## .*\n+(?=## |\Z)", "", "".join(kept))


def in_tests(text, hidden):
    """The tests try others in their place"""
    for name in hidden + [alias for alias, of in ALIASES.items() if of in hidden]:
        other = "naive" if name == "by_tensor" else "bucket"  # either takes scattered tensors
        text = re.sub(
            rf'"{name}"|(?<=ALLREDUCE=){name}\b', lambda m: m[0].replace(name, other), text
        )
    return text


def main(folder, hidden):
    table = read("mgpu.cu").split("algorithms = {")[1]
    names = re.findall(r'\{"(\w+)", allreduce_(?=\1\b)', table)
    hidden = hidden or [name for name in names if name not in KEPT]
    for name in hidden:
        if name not in names or name in ("naive", "yours"):
            sys.exit(
                f"handout: HIDE={name} is unknown: choose one of {', '.join(n for n in names if n not in KEPT)}"
            )
    if not folder:
        sys.exit("handout: DIR=folder must name the folder to create")
    if os.path.exists(folder) and os.listdir(folder):
        sys.exit(f"handout: {folder} is not empty")
    left_out = [os.path.normpath(t) for t in TEACHERS] + (["extras/nodes"] if "ring" in hidden else [])
    for (
        top
    ) in (
        "Makefile README.md LICENSE mgpu.cu tests.cu .clang-format data extras/cpu extras/fast extras/lab"
        " extras/networks extras/nodes extras/definitions.awk".split()
    ):
        for path, _, files in os.walk(top) if os.path.isdir(top) else [("", [], [top])]:
            for file in (os.path.join(path, f) for f in files):
                if any(file == t or file.startswith(t + "/") for t in left_out):
                    continue
                if file.endswith(".gz") or "__pycache__" in file or not os.path.exists(file):
                    continue
                if file.startswith("extras/lab/wrong/") and not file.endswith(".h"):
                    continue
                os.makedirs(os.path.join(folder, path), exist_ok=True)
                shutil.copy(file, os.path.join(folder, file))

    def change(path, how):
        path = os.path.join(folder, path)
        text = how(read(path)) if os.path.exists(path) else ""
        if text:
            with open(path, "w") as file:
                file.write(text)

    change("mgpu.cu", lambda text: without_algorithms(text, hidden))
    change("extras/networks/networks.cu", lambda text: without_words_of_lab(text, hidden))
    for file in ("tests.cu", "extras/fast/tests.cu"):
        change(file, lambda text: in_tests(text, hidden))
    pages = ("README.md", "extras/lab/README.md", "extras/lab/fabric.md", "extras/fast/README.md")
    for file in pages:
        change(file, lambda text: without_names(text, hidden))

    change(
        "extras/lab/predict.sh",
        lambda text: re.sub(rf"(?:(?<=:-)| )(?:{'|'.join(hidden)})\b(?=[a-z_ ]*\}})", "", text),
    )
    shown = "".join(read(os.path.join(folder, page)) for page in pages if os.path.exists(page))
    for picture in ("naive", "overlap", "allreduce", "map", "nodes", "show"):
        if f"data/{picture}.svg)" not in shown:
            os.remove(os.path.join(folder, f"data/{picture}.svg"))
    print(f"{folder}: without {', '.join(hidden)}. Try `make test` and `make exercise` in it")


if __name__ == "__main__":
    words = dict(word.split("=", 1) for word in sys.argv[1:])
    main(words.get("DIR", ""), words.get("HIDE", "").split())
