#!/usr/bin/env bash
# Builds the image of Containerfile with one wheel and checks it as it is meant to run: not root, on a read-only file
# system, without network. Prints its size, its slowest commands, and the time from start to the first token.
#
#   scripts/release/check_container.sh dist/quantkit-*-manylinux*_x86_64.whl
#   BUILD_OPTIONS="--build-arg BASE=my-python" RUN_OPTIONS="--cpus 2" ENGINE=docker scripts/release/check_container.sh WHEEL
set -euo pipefail
export LC_ALL=C  # a point in EPOCHREALTIME
engine=${ENGINE:-podman}
image=${IMAGE:-quantkit-check}
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

mkdir -p "$folder/context/dist" "$folder/models"
cp "$1" "$folder/context/dist"
cp "$root/Containerfile" "$folder/context"
chmod 755 "$folder"
chmod 777 "$folder/models"  # the image's user writes there
# shellcheck disable=SC2086
"$engine" build --no-cache ${BUILD_OPTIONS:-} --tag "$image" --file "$folder/context/Containerfile" "$folder/context"
"$engine" image inspect --format 'image: {{.Size}} bytes, user {{.Config.User}}' "$image"

run() {
    local start=$EPOCHREALTIME
    # shellcheck disable=SC2086
    "$engine" run --rm --network none --read-only --tmpfs /tmp --cap-drop all --security-opt no-new-privileges \
        --volume "$folder/models:/work" ${RUN_OPTIONS:-} "$image" "$@"
    echo "== $(((${EPOCHREALTIME/./} - ${start/./}) / 1000)) ms: quantkit $*"
}

run --version
run demo --output demo
run verify demo/int8
run bench demo/bf16 demo/int8 demo/int4-g64
run generate demo/int4-g64 "My fellow citizens" --max-new-tokens 20
run generate demo/int4-g64 "My fellow citizens" --max-new-tokens 1
echo "== the last command is a cold start up to the first token"
