# Lists the definitions of a file that is written as mgpu.cu is, so that tools find them by name:
#     awk -f extras/definitions.awk mgpu.cu
# Each line has a name, the first line of the comment above, and the definition's first and last line.
# A definition begins at the left margin. If a line of it ends with {, it ends where all braces are
# closed, otherwise with a line that ends with ; or }. Everything from #if to #endif is one
# definition, with each name in it. Declarations are not listed. The words of comments do not matter.

# Return the line without comments. Strings become _.
function code_of(line) {
    gsub(/\\./, "", line)
    gsub(/'[^']?'|"[^"]*"/, "_", line)
    if (in_comment && !sub(/.*\*\//, "", line)) return ""
    gsub(/\/\*([^*]|\*+[^*\/])*\*+\//, "", line)
    sub(/\/\/.*/, "", line)
    in_comment = sub(/\/\*.*/, "", line)
    sub(/[ \t\r]+$/, "", line)
    return line
}
# End the definition that began with `head` in a line.
function finish(line) {
    end = line
    add_names(head)
    inside = ""
    above = 0
}
# Return how many braces a line opens, less those that it closes.
function opened(line) { return gsub(/\{/, "", line) - gsub(/\}/, "", line) }
# List the name at the end of a text.
function add(text) {
    if (!match(text, /[A-Za-z_0-9:~]+ *$/)) return
    name[++count] = substr(text, RSTART)
    sub(/ +$/, "", name[count])
    comment[count] = depth > 0 ? above_block : above
    first[count] = depth > 0 ? block : begin
    last[count] = end
}
# List the names in the head of a definition. Parentheses become @, and braces $.
function add_names(head,   i, n, part) {
    if (head ~ /^ *extern [^={]*;$/) return
    if (match(head, /^ *#[ \t]*define[ \t]+[A-Za-z_0-9]+/)) return add(substr(head, 1, RLENGTH))
    if (match(head, /^[^(]*\(\*[A-Za-z_0-9]+\)/)) return add(substr(head, 1, RLENGTH - 1))
    gsub(/\[\[[^]]*\]\]/, "", head)
    while (gsub(/\([^()]*\)/, "@", head)) continue
    while (gsub(/\{[^{}]*\}/, "$", head)) continue
    while (gsub(/<[^<>]*>/, "", head)) continue
    gsub(/(alignas|__[a-z_]+__) *@/, "", head)
    if (match(head, /(struct|class|union|enum) +[A-Za-z_0-9]+ *[:{$;]/)) {
        if (substr(head, RSTART + RLENGTH - 1, 1) != ";") add(substr(head, RSTART, RLENGTH - 1))
    } else if (head ~ /^[^@=]*@/) { # a function
        if (head ~ /[{$]/) add(substr(head, 1, index(head, "@") - 1))
    } else {
        n = split(head, part, ",")
        for (i = 1; i <= n; i++) {
            sub(/[^A-Za-z_0-9:~ *&].*/, "", part[i])
            add(part[i])
        }
    }
}

{ code = code_of($0) }
# A function within a body: a brace is missing above
inside == "body" && margin && code ~ /^[A-Za-z_][^=(;]* [*&]*[A-Za-z_0-9:]+\(.*\) \{/ &&
        code !~ /^(else|do|return) / {
    finish(margin)
}
!inside && code == "" { # a comment or an empty line
    above = /[^ \t\r]/ ? (above ? above : NR) : 0
    next
}
!inside && code ~ /^#[ \t]*if/ && !depth++ {
    block = NR
    above_block = above ? above : NR
}
!inside && code ~ /^#[ \t]*endif/ && !--depth {
    for (i = count; i > 0 && first[i] == block; i--) last[i] = NR
}
!inside && (code !~ /^[A-Za-z_[]|^#[ \t]*define/ || code ~ /namespace |^extern _ \{$/) {
    above = 0
    next
}
!inside {
    inside = code ~ /^#/ ? "macro" : "head"
    begin = NR
    head = ""
    above = above ? above : NR
}
inside != "body" { head = head " " code }
inside == "head" && code ~ /\{$/ {
    inside = "body"
    braces = opened(head)
    other = 0  # inside of #else, which may open the same brace once more
    margin = 0 # the first } at the left margin
    next
}
inside == "body" && !margin && code ~ /^\}/ { margin = NR }
inside == "body" && code ~ /^[ \t]*#/ { other = code ~ /#[ \t]*el/ }
inside == "body" && !other { braces += opened(code) }
inside == "macro" && code !~ /\\$/ || inside == "head" && code ~ /[;}]$/ ||
        inside == "body" && braces <= 0 {
    finish(NR)
}
END { for (i = 1; i <= count; i++) print name[i], comment[i], first[i], last[i] }
