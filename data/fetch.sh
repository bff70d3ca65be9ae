#!/bin/sh
# sh data/fetch.sh data|mnist|doctest
#
# Brings the files of a set that are missing or damaged. A file counts only if its sum is listed. It
# is moved into place whole, so that nothing half-written is ever left there.
export LC_ALL=C
debian=https://deb.debian.org/debian/pool/main/d

# A set is a folder, a list of sums and names, and sources that are tried until nothing is missing:
#   /FOLDER               a folder of this machine
#   apt:PACKAGE           a Debian package, as this machine's package lists know it
#   apt-update:PACKAGE    a Debian package, with package lists fetched just for it; needs no root
#   https://.../NAME.deb  a Debian package
#   https://...           a folder on the web
as_is=  # not empty: a file that is there is used as it is
case $1 in
data)
    folder=data sums=data/sha256
    sources="/usr/share/datasets/fashion-mnist
        apt:dataset-fashion-mnist
        apt-update:dataset-fashion-mnist
        $debian/dataset-fashion-mnist/dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb
        https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion
        http://fashion-mnist.s3-website.eu-central-1.amazonaws.com" ;;
mnist)
    folder=data/mnist sums=data/mnist.sha256 as_is=yes
    sources="https://storage.googleapis.com/cvdf-datasets/mnist
        https://ossci-datasets.s3.amazonaws.com/mnist" ;;
doctest)
    folder=build/doctest sums=data/doctest.sha256
    sources="apt:doctest-dev
        apt-update:doctest-dev
        $debian/doctest/doctest-dev_2.4.9~ds-1_all.deb
        https://raw.githubusercontent.com/doctest/doctest/v2.4.9/doctest" ;;
*)
    echo "data/fetch.sh: $1 is unknown: choose data, mnist or doctest" >&2
    exit 1 ;;
esac
files=$(sed -n 's/^[0-9a-f]*  //p' "$sums" | sort -u)

# What is on its way. It goes at the end; what a killed run has left there goes now.
new=$PWD/$folder/.fetch.$$
trap 'rm -rf "$new"; rmdir "$folder" 2>/dev/null' EXIT
trap 'exit 1' HUP INT PIPE TERM
for old in "$folder"/.fetch.*; do
    [ -e "/proc/${old##*.}" ] || rm -rf "$old"
done

right() {  # right PATH: is it there, with a sum that is listed for its name?
    [ -f "$1" ] && grep -qxF "$(sha256sum <"$1" | cut -c-64)  ${1##*/}" "$sums"
}
keep() {  # moves what is right from $new to $folder; ends when nothing is missing
    missing=
    for file in $files; do
        if [ -n "$as_is" ] && [ -f "$folder/$file" ]; then continue; fi
        right "$folder/$file" || { right "$new/$file" && mv -f "$new/$file" "$folder/"; } ||
            missing="$missing $file"
    done
    [ -n "$missing" ] || exit 0
}

get() {  # get ADDRESS PATH
    curl -fsSL --connect-timeout 10 --speed-limit 1000 --speed-time 20 -o "$2" "$1" ||
        wget -nv --timeout=10 --tries=1 -O "$2" "$1"
}
apt() {  # apt-get for any user, whatever apt's sandbox user may read
    apt-get -qq -o APT::Sandbox::User="$(id -un)" -o Acquire::Retries=0 \
        -o Acquire::http::Timeout=10 -o Acquire::https::Timeout=10 "$@"
}
own_apt() {  # the same with package lists of its own
    apt -o Dir::State::Lists="$new/lists" -o Dir::Cache="$new/cache" -o Debug::NoLocking=1 "$@"
}
unpack() {  # the .deb file in $new, with dpkg-deb or with what g++ brings anyway
    for deb in "$new"/*.deb; do
        dpkg-deb -x "$deb" "$new/deb" || (cd "$new/deb" && ar x "$deb" && tar xf data.tar.*)
    done
    for file in $missing; do find "$new/deb" -name "$file" -exec mv -f {} "$new/" \; ; done
}
try() {  # try SOURCE: puts the missing files into $new, as far as it has them
    rm -rf "$new"
    mkdir -p "$new/deb" "$new/lists/partial" "$new/cache/archives/partial"
    cd "$new" || return
    case $1 in
    /*) for file in $missing; do cp "$1/$file" .; done ;;
    apt:*) apt download "${1#apt:}" && unpack ;;
    apt-update:*) own_apt update && own_apt download "${1#apt-update:}" && unpack ;;
    *.deb) get "$1" package.deb && unpack ;;
    *) for file in $missing; do get "$1/$file" "$file"; done ;;
    esac
}

keep
for file in $missing; do
    [ ! -e "$folder/$file" ] || echo "$folder/$file is damaged: it will be replaced" >&2
done
echo "fetching$missing into $folder/" >&2
mkdir -p "$new" || { echo "cannot fetch$missing: make $folder/ writable" >&2; exit 1; }
full=
for source in $sources; do
    said=$(try "$source" 2>&1 >/dev/null)  # the error messages
    case $said in
    *'No space left'* | *'quota exceeded'* | *'enough free space'* | *'curl: (23)'*) full=yes ;;
    esac
    keep
done

if [ -n "$full" ]; then
    echo "cannot fetch$missing: no space left for $folder/: make room and try again" >&2
    exit 1
fi
{
    echo "cannot fetch$missing: no source answers."
    echo "Please put each file into $folder/. Each of these sources has it:"
    for source in $sources; do
        case $source in
        http*.deb) echo "    $source (unpack it with dpkg-deb -x)" ;;
        http*) echo "    $source/FILE" ;;
        esac
    done
} >&2
exit 1
