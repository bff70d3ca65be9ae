#!/usr/bin/env python3
"""Makes a page of mgpu.cu for a browser: comments at the left, at the right the code they explain.

    page.py mgpu.cu build/cpp/mgpu.cu OUTPUT EXPLORER PAGE FLAGS...

The second file is the first in C++, line by line: by it clang, with FLAGS, says what a name means.
OUTPUT is what the program has printed, EXPLORER a part of what make show has made, or empty. This
shows the headings that mgpu.cu has, whatever their words, and where its demos print something.
"""

import bisect
import collections
import ctypes
import html
import itertools
import pathlib
import re
import sys
import textwrap

import clang.cindex as clang
import jinja2
import pygments.lexers
from pygments.token import Token

CHAPTER = "https://d2l.ai/chapter_computational-performance/multiple-gpus.html"
RULE = r"// ([-=*_])\1{19,}"  # the first line of a section; the second one has its title
HEAD = r'// (?:\d+\. )?(?P<title>.*?)(?: {3,}chapter: "(?P<chapter>.*?)".*)?$'
slug = lambda title: re.sub(r"\W+", "-", title.lower())
Kind = clang.CursorKind
Kind.UNIT, Kind.MACRO = Kind.TRANSLATION_UNIT, Kind.MACRO_DEFINITION
MEMBERS = Kind.FIELD_DECL, Kind.CXX_METHOD
DEFINITIONS = MEMBERS + (Kind.FUNCTION_DECL, Kind.FUNCTION_TEMPLATE, Kind.STRUCT_DECL)
DEFINITIONS += (Kind.TYPEDEF_DECL, Kind.VAR_DECL, Kind.MACRO)


def place(cursor):
    """Its line and column, in a macro's arguments too; None outside of mgpu.cu"""
    file, line, column = clang.c_object_p(), ctypes.c_uint(), ctypes.c_uint()
    where = (ctypes.byref(x) for x in (file, line, column))
    clang.conf.lib.clang_getFileLocation(cursor.location, *where, None)
    return (line.value, column.value) if file and clang.File(file).name == "mgpu.cu" else None


class Names:
    """Where each name is defined, and what each mention of one refers to"""

    def __init__(self, source, translated, flags):
        macros = clang.TranslationUnit.PARSE_DETAILED_PROCESSING_RECORD
        unit = clang.Index.create().parse("mgpu.cu", flags, [("mgpu.cu", translated)], macros)
        for d in unit.diagnostics:
            if d.severity >= clang.Diagnostic.Error:
                sys.exit(f"page.py: clang does not understand mgpu.cu: {d}")
        pairs = enumerate(zip(source.split("\n"), translated.split("\n")), 1)
        self.moved = {n for n, (a, b) in pairs if a != b}  # launches: there columns say nothing
        self.definitions = {}  # by place: the name, such as Tensor::ptr; overloads have the same
        self.mentions = {}  # by line, column and word: the same
        self.extents = []  # (first line, last line, name), of what is defined outside of structs
        self.used_by = collections.defaultdict(set)
        tops = [top for top in unit.cursor.get_children() if place(top)]
        cursors = [cursor for top in tops for cursor in top.walk_preorder()]
        for cursor in cursors:
            self.define(cursor)
        for cursor in cursors:
            self.refer(cursor)
        self.known = set(self.definitions.values())
        self.extents.sort()

    def define(self, cursor):
        name, parent, macro = cursor.spelling, cursor.semantic_parent, cursor.kind == Kind.MACRO
        outside = macro or cursor.is_definition() and parent.kind in (Kind.UNIT, Kind.STRUCT_DECL)
        if name and outside and cursor.kind in DEFINITIONS:
            name = f"{parent.spelling}::{name}" if cursor.kind in MEMBERS else name
            self.definitions.setdefault(place(cursor), name)
            if macro or cursor.lexical_parent.kind == Kind.UNIT:
                self.extents.append((cursor.extent.start.line, cursor.extent.end.line, name))

    def refer(self, cursor):
        to, where = cursor.referenced, place(cursor)
        if cursor.kind == Kind.OVERLOADED_DECL_REF:
            to = clang.conf.lib.clang_getOverloadedDecl(cursor, 0)
        for to in (to and to.get_definition(), to):
            target = to and self.definitions.get(place(to))
            if target and where and where not in self.definitions:
                key = where[0], where[1] * (where[0] not in self.moved), to.spelling
                self.mentions.setdefault(key, target)

    def find(self, line, column, word):
        """What a word of the source refers to, or None"""
        found = self.mentions.get((line, column * (line not in self.moved), word))
        first, last, user = self.extents[bisect.bisect(self.extents, (line, 1e9)) - 1]
        if found and first <= line <= last and found != user:
            self.used_by[found].add(user)
        return found


# ----- Code: what a word is, say Pygments (its colour) and clang (its link) ----------------------

KINDS = {Token.Comment.Preproc: "p", Token.Comment: "c", Token.Keyword: "k", Token.Literal: "s"}


def highlighted(source, names):
    """The lines of the source in HTML. Of overloads the first one has the link's target"""
    lines, column, seen = [""], 1, set()
    for kind, text in pygments.lexers.CudaLexer(stripnl=False, ensurenl=False).get_tokens(source):
        css = next((c for k, c in KINDS.items() if kind in k), None)
        for part in re.split(r"(\n|\w+)", text):
            if part == "\n":
                lines, column = lines + [""], 1
                continue
            shown, at = html.escape(part, quote=False), (len(lines), column)
            if css and part.strip():
                shown = f"<i class={css}>{shown}</i>"
            if part and (name := names.definitions.get(at)):
                anchor = "" if name in seen else f' id="{name}"'
                shown = f"<b{' class=d' * ('::' not in name)}{anchor}>{shown}</b>"
                seen.add(name)
            elif css not in ("c", "s") and (name := names.find(*at, part)):
                shown = f'<a href="#{name}">{shown}</a>'
            lines[-1] += shown
            column += len(part)
    return lines


def printed(text, output):
    """(last line, what it has printed) of each printf and print in the text of a function"""
    pattern, ends = "", []
    for call in re.finditer(r'(printf?)\("((?:[^"\\]|\\.)*)"[^;]*;', text):
        words = re.escape(call[2].replace("\\n", "\n")).replace("%s", r".*(?:\n .*)*?")
        words += r":\n(?: .*\n)+" * (call[1] == "print")  # a title, and tensors below it
        pattern += f"({words})"
        ends.append(text[: call.end()].count("\n"))
    found = re.search(pattern + r"(?=\S)", output)
    return zip(ends, found.groups()) if found else sys.exit("page.py: the demos printed something else")


# ----- Prose: the comments at the left margin ---------------------------------------------------

INLINE = r"""`[^`]+` | \bmake\ [a-z]+\b(?:\ [A-Z_]+=\w+)* | \b[A-Z_]+=[\w,.]*\w | \b\w+::\w+ |
    (?P<plain>\b[\w.]+\([^()]*\)) | (?P<section>\b[Ss]ections?\ \d+((,|\ to|\ and)\ \d+)*) |
    ^(?P<title>\d+)\..* | \b\w+(?:\[(?:[^][\s]|\[[^][\s]*\])*\])+ |
    [\w/]*[a-zA-Z]\w*_\w*(?:\.h\b)? | \b_+\w+"""


def inline(text, names):
    """Names, `code`, "section 8" and "8. Title", with links"""

    def shown(match):
        word = match[0].strip("`")
        name = word.partition("(")[0]
        if match["section"]:
            return re.sub(r"(^\w+ )?(\d+)", r'<a href="#section-\2">\1\2</a>', word)
        if match["title"]:
            return f'<a href="#section-{match["title"]}">{word}</a>'
        if name in names.known:
            return f'<a href="#{name}"><code>{word}</code></a>'
        return word if match["plain"] else f"<code>{word}</code>"

    return re.sub(INLINE, shown, html.escape(text, quote=False), flags=re.VERBOSE)


def prose(comment, names):
    """Paragraphs and lists; what is indented, or has gaps, is a table or a picture"""
    item, wide = re.compile(r"  \d+\. (?!.* {3})|     \S"), re.compile(r"  |.*\S {3,}\S")
    kind = lambda t: "ol" if item.match(t) else "pre" if wide.match(t) else "p" if t else ""
    out = ""
    for tag, lines in itertools.groupby(comment, kind):
        lines = list(lines)
        parts = re.split(r"(?:^|\s+)\d+\. " if tag == "ol" else "^", " ".join(lines))[1:]
        text = ("<li>" * (tag == "ol")).join([""] + [inline(part, names) for part in parts])
        out += table(lines, names) if tag == "pre" else f"<{tag}>{text}</{tag}>" if tag else ""
    return out


def table(lines, names):
    """Two columns, or else text that stays as it is: a picture, or what may be wrapped"""
    rows = [re.fullmatch(r" *((?:\S+ )*) +((?:\S+ )*\S+)", line) for line in lines]
    starts = [row.start(2) if row else -9 * i for i, row in enumerate(rows)]
    if len(lines) > 1 and max(starts) - min(starts) < 2:
        cells = [[inline(cell.strip(), names) for cell in row.groups()] for row in rows]
        return f"<table>{''.join(f'<tr><td>{a}<td>{b}' for a, b in cells)}</table>"
    css = "" if any(not re.search(r"\w\w", line) for line in lines) else " class=wrap"
    return f"<pre tabindex=0{css}>{inline(textwrap.dedent(chr(10).join(lines)), names)}</pre>"


def split(lines, begin, end):
    """(begin, code, end) of each row: a comment, and code up to the next one or an empty line"""
    marks = [re.match("// (----|clang-format)", line) for line in lines]  # they belong to code
    is_comment = lambda i: lines[i].startswith("//") and not any(marks[i - 1 : i + 1])
    while begin < end:
        code = next((i for i in range(begin, end) if not is_comment(i)), end)
        if code + 1 < end and not lines[code] and not is_comment(code + 1):
            code += 1
        ends = lambda i: is_comment(i) or not lines[i - 1] and re.match(r"\w", lines[i])
        stop = next((i for i in range(code + 1, end) if ends(i)), end)
        yield begin, code, stop
        begin = stop


def row(lines, code, first, middle, last, names):
    comment, heading = [line[3:] for line in lines[first:middle]], ""
    if comment and comment[0].startswith("--- "):
        heading, _, text = comment[0][4:].partition(": ")
        comment[0] = re.sub(r"^[a-z](?=[a-z]* )", lambda letter: letter[0].upper(), text)
    defined = [name for line, _, name in names.extents if middle < line <= last]
    link = '<a href="#{0}">{0}</a>'.format
    used = {n: [*map(link, sorted(names.used_by[n]))] for n in defined if names.used_by[n]}
    text = "\n".join(code[middle:last]).rstrip().replace("</samp>\n", "</samp>")
    row = dict(id=f"line-{middle + 1}", heading=heading, line=middle + 1, code=text, used=used)
    return dict(row, prose=prose(comment, names))


def sections(source, names, output):
    lines, code = source.split("\n"), highlighted(source, names)
    begin, end, _ = next(e for e in names.extents if e[2] == "demos")
    for line, text in printed("\n".join(lines[begin - 1 : end]), output):
        code[begin - 1 + line] += f"\n<samp>{html.escape(text.rstrip(), quote=False)}</samp>"
    starts = [i for i, line in enumerate(lines) if re.fullmatch(RULE, line)]
    for number, (begin, end) in enumerate(zip([-1] + starts, starts + [len(lines)])):
        head = number and re.match(HEAD, lines[begin + 1])
        section = head.groupdict(default="") if head else {}
        rows = [row(lines, code, *r, names) for r in split(lines, begin + 1 + bool(head), end)]
        section["url"] = CHAPTER + "#" + slug(section.get("chapter", ""))
        yield dict(section, rows=rows, number=number, id=f"section-{number}")


def main(source, translated, output, explorer, page, *flags):
    read = lambda path: pathlib.Path(path).read_text()
    source = read(source).rstrip("\n")
    names = Names(source, read(translated).split("\n", 1)[1], flags)  # but for #line 1
    parts = list(sections(source, names, read(output)))
    loader = jinja2.FileSystemLoader(pathlib.Path(__file__).parent)
    template = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True)
    template = template.get_template("page.html")
    text = template.render(sections=parts, chapter=CHAPTER, explorer=read(explorer))
    known = lambda link: link[0] if f'id="{link[1]}"' in text else link[2]
    text = re.sub(r'<a href="#(section-\d+)">([^<]*)</a>', known, text)
    tags = re.sub(r"(?s)<(script|style).*?</\1>", "", text)
    ids = re.findall(r'<[^>]+\sid="?([^\s">]+)', tags)
    wrong = set(re.findall(r'href="#([^"]*)"', tags)) - set(ids)
    if wrong := wrong | {i for i in ids if ids.count(i) > 1}:
        sys.exit(f"page.py: these ids are missing or occur twice: {sorted(wrong)}")
    pathlib.Path(page).write_text(text)


main(*sys.argv[1:])
