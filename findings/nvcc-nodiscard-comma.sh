#!/bin/bash
# nvcc warns that the result of a [[nodiscard]] function is ignored (2809-D), although an overloaded
# comma operator takes it as its argument. It does so in templates, where it seems to take the comma
# for the built-in one as long as the type of an operand is unknown. Both versions below warn if the
# left operand is a T. 13.5.37 also warns in a lambda whose operands have known types, if the right
# one names a captured variable. CAPTURE(v[i]) of doctest expands to that, and with
# -Werror all-warnings it stops the build. g++ is rightly quiet. A copy of the result, made first,
# avoids the warning.
#
# Seen on Linux, x86-64, with nvcc from PyPI and the g++ 12.2.0 of Debian, which it needs:
#
#     g++ -Wall -Wextra: no warning
#     nvcc 13.0.88: 2809-D in by_t; sums 3 3 3
#     nvcc 13.5.37: 2809-D in by_t by_capture; sums 3 3 3
set -euo pipefail
script=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/sums.cu" <<'END'
#include <cstdio>
struct Sum {
    int value = 0;
    Sum &operator,(int x) { value += x; return *this; }
};
struct Three { [[nodiscard]] int get() const { return 3; } };

void plain(Sum &sum, const Three &three) { sum, three.get(); }
template <class T> void by_t(T &sum, const Three &three) { sum, three.get(); }
template <class T> void by_capture(Sum &sum, const Three &three, T) { [&] { sum, three.get(); }(); }

int main() {
    Sum a, b, c;
    plain(a, Three());
    by_t(b, Three());
    by_capture(c, Three(), 0);
    std::printf("%d %d %d\n", a.value, b.value, c.value);
}
END

cd "$folder"
g++ -x c++ -std=c++17 -Wall -Wextra -Werror -fsyntax-only sums.cu
echo 'g++ -Wall -Wextra: no warning' >seen
for version in 13.0.88 13.5.37; do
    python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-deps \
        --target "$version" "nvidia-cuda-nvcc==$version" "nvidia-nvvm==$version" \
        "nvidia-cuda-crt==$version" "nvidia-cuda-runtime==$version"
    "$version/nvidia/cu13/bin/nvcc" -std=c++17 sums.cu -o sums >log 2>&1 || { cat log; exit 1; }
    functions=$(sed -n '/warning #2809-D/ { n; s/.* void \([a-z_]*\).*/\1/p; }' log |
        awk '!printed[$0]++' | paste -sd ' ') # without the repetition for the device
    echo "nvcc $version: 2809-D in $functions; sums $(./sums)" >>seen
done
cat seen

# The comment above is what to expect.
sed -n 's/^#     //p' "$script" | diff - seen || { echo 'not as stated'; exit 1; }
echo 'as stated'
