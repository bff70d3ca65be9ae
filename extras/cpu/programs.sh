#!/bin/sh
# programs.sh PROGRAM ...: compiles and runs each as make cu does. A program is a .cu file, or a
# folder with a main.cu and others. What it prints must be what stands behind "// prints: " in its
# first lines, and nothing else. Status 1 if one differs.
export CU_FILE CUDA_CPU_DEVICES="${CUDA_CPU_DEVICES:-2}"
passed=0 failed=0
mkdir -p build/cu
for program; do
    main=$program CU_FILE=$program
    if [ -d "$program" ]; then
        main=$program/main.cu CU_FILE=$(printf '%s ' "$program"/*.cu)
    fi
    sed -n 's|^// prints: ||p' "$main" >build/cu/expected
    if sh extras/cpu/cu.sh >build/cu/out 2>build/cu/err && cmp -s build/cu/expected build/cu/out &&
        { [ "$CHECK" ] || [ ! -s build/cu/err ]; }; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "$program: failed: expected <, printed >" >&2
        diff build/cu/expected build/cu/out >&2
        cat build/cu/err >&2
    fi
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
