#!/usr/bin/env python3
"""Makes a page of mgpu.cu for a browser: comments at the left, at the right the code they explain.

    page.py mgpu.cu build/cpp/mgpu.cu OUTPUT EXPLORER PAGE

The second file is the first in C++, line by line, for clang: it says what each name refers to.
OUTPUT is what the program has printed; EXPLORER what make show has made, or a file that is missing.
Of mgpu.cu this knows the form of its comments, and that demos prints what a reader wants to see.
"""

import bisect
import collections
import ctypes
import html
import pathlib
import re
import subprocess
import sys

import clang.cindex as clang
import jinja2
import pygments.lexers
from pygments.token import Token

CHAPTER = "https://d2l.ai/chapter_computational-performance/multiple-gpus.html"
CONCISE = CHAPTER.replace(".html", "-concise.html")
HEAD = r'// (\d+)\. (.*?)(?: {3,}(tutorials?): "(.*?)".*)?$'  # // 6. Experiment     tutorial: "..."
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

    def __init__(self, source, translated):
        gcc = subprocess.run(["g++", "-print-file-name=include"], capture_output=True, text=True)
        flags = ["-xc++", "-std=c++17", "-Icpu", "-isystem", gcc.stdout.strip()]
        macros = clang.TranslationUnit.PARSE_DETAILED_PROCESSING_RECORD
        unit = clang.Index.create().parse("mgpu.cu", flags, [("mgpu.cu", translated)], macros)
        for d in unit.diagnostics:
            if d.severity >= clang.Diagnostic.Error:
                sys.exit(f"page.py: clang does not understand mgpu.cu: {d}")
        # A launch is something else in C++: on its line columns say nothing
        pairs = zip(source.split("\n"), translated.split("\n"))
        self.moved = {n for n, (a, b) in enumerate(pairs, 1) if a != b}
        self.definitions = {}  # by place: the id, such as add_, copyto-2, Tensor::ptr
        self.mentions = {}  # by line, column, name: the id
        self.known = collections.Counter()
        self.extents = []  # (first line, last line, id), of what is defined outside of structs
        self.used_by = collections.defaultdict(set)
        tops = [top for top in unit.cursor.get_children() if place(top)]
        for cursor in (cursor for top in tops for cursor in top.walk_preorder()):
            if cursor.kind in DEFINITIONS and place(cursor) not in self.definitions:
                self.define(cursor)
        for cursor in (cursor for top in tops for cursor in top.walk_preorder()):
            self.refer(cursor)
        self.extents.sort()

    def define(self, cursor):
        name, parent, macro = cursor.spelling, cursor.semantic_parent, cursor.kind == Kind.MACRO
        global_ = macro or cursor.is_definition() and parent.kind in (Kind.UNIT, Kind.STRUCT_DECL)
        if not name or not global_:
            return
        if cursor.kind in MEMBERS:
            name = f"{parent.spelling}::{name}"
        self.known[name] += 1
        unique = f"{name}-{self.known[name]}" if self.known[name] > 1 else name
        self.definitions[place(cursor)] = unique
        if macro or cursor.lexical_parent.kind == Kind.UNIT:
            self.extents.append((cursor.extent.start.line, cursor.extent.end.line, unique))

    def refer(self, cursor):
        to, where = cursor.referenced, place(cursor)
        if cursor.kind == Kind.OVERLOADED_DECL_REF:
            to = clang.conf.lib.clang_getOverloadedDecl(cursor, 0)
        for to in (to and to.get_definition(), to):
            target = to and self.definitions.get(place(to))
            if target and where and where not in self.definitions:
                self.mentions.setdefault((*self.spot(*where), to.spelling), target)

    def spot(self, line, column):
        return line, 0 if line in self.moved else column

    def find(self, line, column, word):
        """The id that a word of the source refers to, or None"""
        found = self.mentions.get((*self.spot(line, column), word))
        first, last, user = self.extents[bisect.bisect(self.extents, (line, 1e9)) - 1]
        if found and first <= line <= last and found != user:
            self.used_by[found].add(user)
        return found


# ----- Code: what a word is, say Pygments (its colour) and clang (its link) ----------------------

KINDS = {Token.Comment.Preproc: "p", Token.Comment: "c", Token.Keyword.Type: "t"}
KINDS |= {Token.Keyword: "k", Token.Literal.String: "s", Token.Literal.Number: "n"}


def highlighted(source, names):
    """The lines of the source in HTML"""
    lines, column = [""], 1
    for kind, text in pygments.lexers.CudaLexer(stripnl=False, ensurenl=False).get_tokens(source):
        css = next((c for k, c in KINDS.items() if kind in k), None)
        for part in re.split(r"(\n|\w+)", text):
            if part == "\n":
                lines, column = lines + [""], 1
                continue
            shown, at = html.escape(part, quote=False), (len(lines), column)
            if css and part.strip():
                shown = f"<i class={css}>{shown}</i>"
            if part and at in names.definitions:
                name = names.definitions[at]
                tag = "span" if "::" in name else f'a class=d href="#{name}"'
                shown = f'<{tag} id="{name}">{shown}</{tag.split()[0]}>'
            elif css not in ("c", "s") and (name := names.find(*at, part)):
                shown = f'<a href="#{name}">{shown}</a>'
            lines[-1] += shown
            column += len(part)
    return lines


def printed(text, output):
    """(last line, what it has printed) of each printf in the text of a function"""
    pattern, ends = "", []
    for call in re.finditer(r'(for \(.*\)\s*)?printf\("((?:[^"\\]|\\.)*)"[^;]*;', text):
        words = re.escape(call[2].replace("\\n", "\n")).replace("%s", r".*(?:\n .*)*?")
        pattern += f"((?:{words})+?)" if call[1] else f"({words})"
        ends.append(text[: call.end()].count("\n"))
    found = re.search(pattern + r"(?=\S)", output)
    return zip(ends, found.groups()) if found else sys.exit("page.py: demos printed something else")


# ----- Prose: the comments at the left margin ---------------------------------------------------

INLINE = r"""`[^`]+` | \bmake\ [a-z]+\b(?:\ [A-Z_]+=\w+)* | (?P<url>https?://[\w/.-]+\w) | \b[A-Z_]+=[\w,.]*\w | (?P<call>\b[\w.]+\([^()]*\)) |
    (?P<section>\b[Ss]ections?\ \d+((,|\ to|\ and)\ \d+)*) | (?P<title>\d+)\.\ (?:TITLES)\b |
    \b\w+(?:\[(?:[^][\s]|\[[^][\s]*\])*\])+ | [\w/]*[a-zA-Z]\w*_\w*(?:\.h\b)? | \b_+\w+ |
    \b\w+::\w+"""


def inline(text, names, titles):
    """Names, `code`, "section 8" and "8. Title", with links"""

    def shown(match):
        word = html.escape(match[0].strip("`"), quote=False)
        target = word.partition("(")[0]
        if match["url"]:
            return f'<a href="{word}">{word}</a>'
        if match["section"]:
            return re.sub(r"(^\w+ )?(\d+)", r'<a href="#section-\2">\1\2</a>', word)
        if match["title"]:
            return f'<a href="#section-{match["title"]}">{word}</a>'
        if target in names.known:
            return f'<a href="#{target}"><code>{word}</code></a>'
        return word if match["call"] else f"<code>{word}</code>"

    pattern = INLINE.replace("TITLES", "|".join(re.escape(title) for title in titles))
    pieces, at = [], 0
    for match in re.finditer(pattern, text, re.VERBOSE):
        pieces += [html.escape(text[at : match.start()], quote=False), shown(match)]
        at = match.end()
    return "".join(pieces) + html.escape(text[at:], quote=False)


def prose(comment, link):
    """Paragraphs and lists; what is indented, or has gaps, is a picture or a table"""
    blocks, before = [("", [])], ""
    for line in comment:
        gaps, item = re.search(r"\S {3,}\S", line), re.match(r"  \d+\. (.*)", line)
        tag = "p" if line else ""
        if item and not gaps or before == "li" and line.startswith("     "):
            tag = "li"
        elif gaps or line.startswith("  "):
            tag = "pre"
        if tag != before or tag == "li" and item:
            blocks.append((tag, []))
        blocks[-1][1].append(item[1] if tag == "li" and item else line)
        before = tag
    out = ""
    for tag, lines in blocks:
        if tag == "pre":
            out += table(lines, link)
        elif tag:
            out += f"<{tag}>{link(' '.join(line.strip() for line in lines))}</{tag}>"
    return re.sub(r"(<li>.*</li>)", r"<ol>\1</ol>", out)


def table(lines, link):
    """Two columns, or else text that stays as it is: a picture, or what may be wrapped"""
    rows = [re.fullmatch(r" *((?:\S+ )*) +((?:\S+ )*\S+)", line) for line in lines]
    starts = [row.start(2) if row else -9 * i for i, row in enumerate(rows)]
    if len(lines) > 1 and max(starts) - min(starts) < 2:
        rows = "".join(f"<tr><td>{link(row[1])}<td>{link(row[2])}" for row in rows)
        return f"<table>{rows}</table>"
    indent = min(len(line) - len(line.lstrip()) for line in lines)
    css = "" if any(not re.search(r"\w\w", line) for line in lines) else " class=wrap"
    return f"<pre tabindex=0{css}>" + link("\n".join(line[indent:] for line in lines)) + "</pre>"


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


def row(lines, code, first, middle, last, names, link):
    comment, heading = [line[3:] for line in lines[first:middle]], ""
    if comment and comment[0].startswith("--- "):
        heading, _, text = comment[0][4:].partition(": ")
        comment[0] = re.sub(r"^[a-z](?=[a-z]* )", lambda letter: letter[0].upper(), text)
    users = collections.defaultdict(set)
    for line, _, name in names.extents:
        if middle < line <= last and (others := names.used_by[name]):
            name = name.split("-")[0]
            users[name] |= {other.split("-")[0] for other in others} - {name}
    text = "\n".join(code[middle:last]).rstrip().replace("</samp>\n", "</samp>")
    return dict(
        heading=heading, prose=prose(comment, link), code=text, line=middle + 1, users=users
    )


def sections(source, names, output):
    lines, code = source.split("\n"), highlighted(source, names)
    begin, end, _ = next(e for e in names.extents if e[2] == "demos")
    for line, text in printed("\n".join(lines[begin - 1 : end]), output):
        code[begin - 1 + line] += f"\n<samp>{html.escape(text.rstrip(), quote=False)}</samp>"
    starts = [i for i, line in enumerate(lines) if re.fullmatch("// -{80,}", line)]
    heads = [re.match(HEAD, lines[i + 1]) for i in starts]
    link = lambda text: inline(text, names, [head[2].strip() for head in heads])
    for head, begin, end in zip([None] + heads, [-2] + starts, starts + [len(lines)]):
        parts = split(lines, begin + 2, end)
        section = dict(rows=[row(lines, code, *part, names, link) for part in parts])
        if head:
            section.update(number=head[1], title=head[2].strip(), tutorial=head[4])
            anchor = re.sub(r"\W+", "-", (head[4] or "").lower())
            section["url"] = CONCISE if head[3] == "tutorials" else f"{CHAPTER}#{anchor}"
        yield section


def main(source, translated, output, explorer, page):
    read = lambda path: pathlib.Path(path).read_text()
    source = read(source).rstrip("\n")
    names = Names(source, read(translated).split("\n", 1)[1])  # without its #line 1
    show = read(explorer) if pathlib.Path(explorer).exists() else ""
    show = re.search(r"(?s)<!-- explorer -->(.*)<!-- /explorer -->", show)
    loader = jinja2.FileSystemLoader(pathlib.Path(__file__).parent)
    template = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True)
    template.filters["slug"] = lambda text: re.sub(r"\W+", "-", text.lower())
    text = template.get_template("page.html").render(
        sections=list(sections(source, names, read(output))),
        chapter=CHAPTER,
        explorer=show[1] if show else "",
    )
    tags = re.sub(r"(?s)<(script|style).*?</\1>", "", text)
    ids = collections.Counter(re.findall(r'<[^>]+\sid="?([^\s">]+)', tags))
    twice = [i for i, n in ids.items() if n > 1]
    dead = [link for link in re.findall(r'href="#([^"]*)"', tags) if link not in ids]
    if twice or dead:
        sys.exit(f"page.py: ids that are there twice: {twice}; links to nowhere: {dead}")
    pathlib.Path(page).write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
