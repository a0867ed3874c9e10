#!/usr/bin/env bash
# The wheels that travel with the tree to a GPU's machine that has no network: what quantkit imports and that machine
# lacks, and torchao to measure against. Tree and wheels are to stay below 64 MiB.
#
#   scripts/measure/gpu_wheels.sh [FOLDER]            # .whl by default, for Linux on x86-64
#   PYTHON_VERSION=3.12 PACKAGES="torchao gguf" scripts/measure/gpu_wheels.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:-.whl}
mkdir -p "$folder"
platforms=()
for libc in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${libc}_x86_64")
done
for package in ${PACKAGES:-torchao gguf prompt_toolkit wcwidth}; do
    "${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --implementation cp \
        --python-version "${PYTHON_VERSION:-3.12}" "${platforms[@]}" -d "$folder" "$package" ||
        echo "no wheel of $package: its measurements are left out"
done
tree=$(git ls-files -z | xargs -0 du -cb | tail -1 | cut -f1)
wheels=$(du -cb "$folder"/*.whl | tail -1 | cut -f1)
echo "tree $((tree >> 20)) MiB, wheels $((wheels >> 20)) MiB"
test $((tree + wheels)) -lt $((64 << 20)) || { echo "more than 64 MiB: leave out a package"; exit 1; }
