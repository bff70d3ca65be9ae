#!/bin/sh
# sh data/unpack.sh [DATA=FOLDER] [WORD ...]
#
# Prepares the data set in FOLDER, by default data. A file that lies there packed is unpacked below
# build/. What is missing in data/ or data/mnist/ is downloaded first. Status 1, and a line that says
# what lies in FOLDER, if it does not have the data set. Other words are ignored.
export LC_ALL=C
folder=data
for word; do
    case $word in DATA=*) folder=${word#DATA=} ;; esac
done
names='train-images-idx3-ubyte train-labels-idx1-ubyte t10k-images-idx3-ubyte t10k-labels-idx1-ubyte'

case ${folder%/} in
data | ./data) fetched=data ;;
data/mnist | ./data/mnist) fetched=mnist ;;
*) fetched= ;;
esac

sum() { cksum 2>/dev/null <"$folder/$1.gz"; }  # sum NAME: of its archive; a date would not do
unpacked() {  # unpacked NAME: is the file there, plain or from the archive that is there now?
    [ -e "$folder/$1" ] || { [ -f "build/$folder/$1" ] &&
        { [ "$(sum "$1")" = "$(cat "build/$folder/$1.sum")" ] ||
            { [ "$fetched" ] && [ ! -e "$folder/$1.gz" ]; }; } 2>/dev/null; }
}
for name in $names; do unpacked "$name" || missing=yes; done
[ "$missing" ] || exit 0

[ ! "$fetched" ] || sh data/fetch.sh "$fetched" || exit 1
for name in $names; do
    archive=$folder/$name.gz
    if unpacked "$name" || [ ! -e "$archive" ]; then continue; fi
    case /$folder/ in */../*)
        echo "DATA=$folder: archives are unpacked into build/: give a path without .." >&2
        exit 1 ;;
    esac
    part=build/$folder/$name.$$
    trap 'rm -f "$part"' EXIT
    trap 'exit 1' HUP INT PIPE TERM
    of=$(sum "$name")
    if ! mkdir -p "build/$folder" || ! gzip -dc "$archive" >"$part" ||
        ! mv -f "$part" "build/$folder/$name" || ! echo "$of" >"build/$folder/$name.sum"; then
        echo "$archive cannot be unpacked into build/$folder/" >&2
        exit 1
    fi
done

missing=
for name in $names; do unpacked "$name" || missing=${missing:-$name}; done
[ "$missing" ] || exit 0
cannot() { echo "DATA=$folder: $*" >&2; exit 1; }
said=$(ls "$folder/." 2>&1 >/dev/null) || cannot "${said##*: }"
below=$(find -L "$folder" -maxdepth 4 \( -name "$missing" -o -name "$missing.gz" \) 2>/dev/null |
    sed 's|/[^/]*$||; s/^/DATA=/' | sort -u | head -n 5 | paste -sd ' ')
[ ! "$below" ] || cannot "the data set lies deeper: try $below"
# shellcheck disable=SC2012 # for people to read
there=$(ls "$folder" | head -n 100 | paste -sd ' ' | tr -d '[:cntrl:]' | cut -c -200)
cannot "there is no $missing, nor a .gz of it, but ${there:-nothing}: data/README.md has the names"
