#!/bin/sh
# elsewhere.sh FOLDER: makes a folder in which make works as it does here, where this one cannot be
# written: its files are links to those here, but what is built and fetched lies there.
here=$(pwd) there=$1
mkdir -p "$there/data" && there=$(cd "$there" && pwd) || exit 1
if [ "$there" = "$here" ]; then echo "BUILD=$1: it is this folder" >&2; exit 1; fi
case $there in "$here"/*) ;; *) [ ! -e "$there/mgpu.cu" ] || [ -h "$there/mgpu.cu" ] || {
    echo "BUILD=$1: another project lies there" >&2
    exit 1
} ;; esac
for file in "$here"/* "$here"/data/*; do
    name=${file#"$here"/}
    case $name in build | data) continue ;; esac
    case $there/ in "$file"/*) continue ;; esac
    [ -e "$there/$name" ] || ln -sf "$file" "$there/$name" || exit 1
done
