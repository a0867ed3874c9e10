#!/bin/sh
# Builds llama.cpp's llama-server and llama-quantize from the sources in llama-cpp-python's source package, for this
# processor and without the web page, and prints the path of llama-server. What is already there is kept. Needs cmake,
# ninja, a C++ compiler and pip, and takes half an hour on two cores.
#
#   scripts/peers/llama_server.sh FOLDER
#   VERSION=0.3.36 PYTHON=python3 JOBS=2 scripts/peers/llama_server.sh FOLDER
set -eu
version=${VERSION:-0.3.36}
mkdir -p "${1:?a folder is needed}"
folder=$(cd "$1" && pwd)
source=$folder/llama_cpp_python-$version
build=$folder/build-$version

if [ ! -x "$build/bin/llama-server" ] || [ ! -x "$build/bin/llama-quantize" ]; then
    if [ ! -d "$source" ]; then
        # From wheels what pip needs to read the package: cmake from source takes an hour.
        "${PYTHON:-python3}" -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest "$folder" \
            "llama-cpp-python==$version" >&2
        mkdir "$source.partial"
        tar -xzf "$source.tar.gz" -C "$source.partial" --strip-components 1
        mv "$source.partial" "$source"
    fi
    cmake -G Ninja -S "$source/vendor/llama.cpp" -B "$build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
        -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF \
        -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF >&2
    nice -n 5 cmake --build "$build" --target llama-server llama-quantize --parallel "${JOBS:-2}" >&2
fi
echo "$build/bin/llama-server"
