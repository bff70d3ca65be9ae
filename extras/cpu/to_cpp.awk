# Walks once through a CUDA program and tells to_cpp.sed what no regular expression can: what is
# code, and where a function's body begins. It reads what the sed of to_cpp.sh makes: one word,
# blank or character a line, and an empty line for the end of one. It prints parts, each up to \036:
#
#   \005 and a comment, a string or a character: the code has \006 and its number and \006 instead
#       (a comment before the name of what is a device's or shared goes)
#   code, up to the end of a line where a declaration or statement ends. Its marks are
#       {\017        a body of a __global__ or __device__ function, in which static is a device's
#       {\020 }\021  the outer braces of a struct that is shared
#       \022 \023 \024 for { } ; between <<< and >>>
#       \024 \025 for ; and , within the value of a __device__ or __constant__ variable
#
# Of #if and #else, the first branch counts, unless that is #if 0. A macro is a text of its own.

BEGIN {
    ORS = ""
    FS = "\n"
    separator = "\036"
    code_begins()
    first = 1
}
END {
    if (mode) literal_ends()
    part_ends()
}

function code_begins() { restore(depth + 0 " 0 0 - 0 0 0 0 0 0 0 0 ;") }
# Where the walk is. depth: open braces. paren: open parentheses and brackets since the last brace.
# kernel, shared: the depth of the device's function or shared struct that the walk is in, or 0.
# head: what is being declared: d for a function or variable of a device, s for shared memory, - for
# anything else; the next five say where that began and what it had. launch: 1 more than the depth
# of an open <<<, or 0. last: the last word or character.
function state() {
    return depth " " paren " " kernel " " head " " head_depth " " head_paren " " parameters " " \
        value " " initializers " " shared " " launch " " launch_paren " " last
}
function restore(text,   part) {
    split(text, part, " ")
    depth = part[1] + 0
    paren = part[2] + 0
    kernel = part[3] + 0
    head = part[4]
    head_depth = part[5] + 0
    head_paren = part[6] + 0
    parameters = part[7] + 0
    value = part[8] + 0
    initializers = part[9] + 0
    shared = part[10] + 0
    launch = part[11] + 0
    launch_paren = part[12] + 0
    last = part[13]
}

function emit(text) {
    code[++pieces] = text
    size += length(text)
}
function part_ends(   i) {
    for (i = 1; i <= pieces; i++) print code[i]
    if (pieces) print separator
    pieces = size = 0
}
function literal_begins(kind, text) {
    dropped = head != "-" && !parameters && !value && kind ~ /^\//
    mode = kind
    escaped = 0
    if (dropped) return
    emit("\006" ++literals "\006")
    print "\005" text
}
function literal_ends() {
    if (dropped) emit(" ")
    else print separator
    mode = ""
}

function in_head() { return head != "-" && depth == head_depth && paren == head_paren }
function encoded() { return launch || value && head != "-" && depth > head_depth }

function open_brace(   body) {
    body = in_head() && head == "d" && (last ~ /^__(device|global|host)__$|^mutable$/ || \
        parameters && !value && (!initializers || last ~ /^[)}.]/))
    emit(launch ? "\022" : "{")
    if (body) emit("\017")
    if (head == "s" && in_head() && !value && !shared) {
        emit("\020")
        shared = depth + 1
    }
    parens[++depth] = paren
    paren = 0
    if (body) {
        head = "-"
        if (!kernel) kernel = depth
    }
}
function close_brace() {
    emit(launch ? "\023" : "}")
    if (!depth) return
    if (shared == depth) {
        emit("\021")
        shared = 0
    }
    if (kernel == depth) kernel = 0
    paren = parens[depth--]
    if (head_depth > depth) head = "-"
    if (launch > depth + 1) launch = 0
}
function semicolon() {
    if (launch == depth + 1) launch = 0
    emit(encoded() ? "\024" : ";")
    if (depth <= head_depth) head = "-"
}
function parenthesis(text) {
    emit(text)
    if (text ~ /[[(]/) {
        if (text == "(" && in_head() && \
            last !~ /^(__launch_bounds__|__align__|alignas|__attribute__|decltype|noexcept)$/)
            parameters = 1
        paren++
        operator = 0
    } else if (paren) {
        paren--
        if (depth == head_depth && paren < head_paren) head = "-"
    }
}
function declares(kind) {
    if (in_head() && head != "-") {
        if (kind == "s") head = kind
        return
    }
    head = kind
    head_depth = depth
    head_paren = paren
    parameters = value = initializers = 0
}

function word(text) {
    emit(text)
    if (last == "static" && static_piece && text !~ /^(const|__)/)
        code[static_piece] = "__device__ static"
    static_piece = text == "static" && kernel && last ~ /^[;{}]$/ ? pieces : 0
    if (static_piece || text ~ /^__(global|device|constant)__$/) declares("d")
    else if (text == "__shared__") declares("s")
    else if (text == "operator") operator = 1
    else if (text == "double" && last == "long" && (kernel || head == "d") && !told++)
        print ENVIRON["file"] ":" line + 1 ": notice: on a GPU long double has 64 bits, as double" \
            "\n" >"/dev/stderr"
}
function other(text) {
    if (text ~ /[{}]/) {
        if (text == "{") open_brace()
        else close_brace()
    } else if (text == ";") semicolon()
    else if (text ~ /[][()]/) parenthesis(text)
    else {
        emit(text == "," && head == "d" && (depth > head_depth || value && paren > head_paren) ? \
            "\025" : text)
        if (text == "=" && in_head() && !operator) value = 1
        else if (text == ":" && in_head() && parameters) initializers = 1
        else if (text ~ /^<<[ \t]*<$/ && last != "operator" && !launch) {
            launch = depth + 1
            launch_paren = paren
        } else if (text ~ /^>>[ \t]*>$/ && launch == depth + 1 && paren == launch_paren) launch = 0
    }
}

# A directive leaves all around it as it was, but for the branches of #if
function directive_ends() {
    restore(around)
    if (directive ~ /^if/) {
        before[++ifs] = around
        after[ifs] = ""
        skipped[ifs] = condition == "0"
    } else if (directive ~ /^(el|endif)/ && ifs) {
        if (!skipped[ifs] && after[ifs] == "") after[ifs] = around
        skipped[ifs] = 0
        restore(before[ifs])
        if (directive == "endif") {
            if (after[ifs] != "") restore(after[ifs])
            ifs--
        }
    }
    directive = ""
}
function line_ends() {
    if (directive && previous != "\\") directive_ends()
    emit("\n")
    first = 1
    if (size > 4000 && !directive && !paren && !launch && head == "-" && last ~ /^[;{}]$/)
        part_ends()
}

{ text = $0 }
text == "" { line++ }

# In a comment, string or character
mode == "//" && text == "" && previous != "\\" || \
(mode == "\"" || mode == "'") && text == "" && !escaped { literal_ends() }
mode {
    if (!dropped) print text == "" ? "\n" : text
    else if (text == "") emit("\n")
    if (mode == "/*") {
        if (text == "/" && previous == "*") literal_ends()
    } else if (mode == "raw") {
        if (delimiter == "") {
            if (text == "(") delimiter = ")" opened "\""
            opened = opened text
        }
        ending = substr(ending text, length(ending text) - 20)
        if (text == "\"" && delimiter != "" && \
            substr(ending, length(ending) - length(delimiter) + 1) == delimiter) literal_ends()
    } else if (mode != "//") {
        if (escaped) escaped = 0
        else if (text == "\\") escaped = 1
        else if (text == mode) literal_ends()
    }
    previous = text
    next
}

# In code
text == "\r" { next }
text == "" {
    line_ends()
    previous = ""
    next
}
previous == "/" && text ~ /^[\/*]$/ {
    pieces--
    last = before_slash
    literal_begins("/" text, "/" text)
    previous = "/" text
    next
}
text ~ /^["']$/ && directive != "include" && !(text == "'" && previous ~ /^[0-9]/) {
    literal_begins(text == "\"" && previous ~ /^(u8|[uUL])?R$/ ? "raw" : text, text)
    opened = delimiter = ending = ""
    last = previous = text
    first = 0
    next
}
text ~ /^[ \t]/ {
    emit(text)
    previous = text
    next
}
{
    if (text == "#" && first) {
        around = state()
        code_begins()
        directive = "#"
    } else if (directive == "#") {
        directive = text
        condition = ""
    } else if (directive ~ /^if/ && condition == "") condition = text
    first = 0
    before_slash = last
    if (text ~ /^[0-9A-Z_a-z\200-\377]/) word(text)
    else if (text ~ /^[\001-\037]/) emit(" ")
    else other(text)
    if (last == "operator" && text ~ /^[<>=]/) last = "operator"
    else last = text
    previous = text
}
