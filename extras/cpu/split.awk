# Splits cuda_runtime.h, so that what an edit of mgpu.cu does not change is compiled once: the
# functions that begin a line with inline and have a body of several lines are only declared, or,
# with -v bodies=1, defined and not inline. Lines keep their numbers.
in_body { in_body = !/^}/; print ""; next }
# The head of a function, one line or more: a variable has no ( before its =, and ends in this line
!in_head && /^(\[\[noreturn\]\] |__attribute__\(\(.*\)\) )?inline [^=]*(\(|[^;{}]$)/ &&
    !/always_inline|::[A-Za-z_]+\(/ && before !~ /^template/ { in_head = 1; head = "" }
{ before = $0 }
!in_head { print; next }
{ head = head $0 "\n" }
# It ends with ); or with {, else the body is in its last line, and it stays as it is
/\);$|\{( \/\/.*)?$/ { sub(/inline /, "", head) }
/\{( \/\/.*)?$/ && !bodies { sub(/ \{[^{]*$/, ";\n", head); in_body = 1 }
/[;{}]( \/\/.*)?$/ { printf "%s", head; in_head = 0 }
