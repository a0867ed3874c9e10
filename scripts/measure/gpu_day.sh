#!/usr/bin/env bash
# What to run on a GPU that is available for a while. Each stage stands alone, prints as it goes, and ends well within ten
# minutes; all of them take some thirty.
#
#   scripts/measure/gpu_day.sh STAGE [--dry-run]
#
#   1  the machine and its ceilings, two layers through inductor with the code that it makes, the tests that need a GPU
#   2  a small model says the same as on the CPU; whole models decode in each way, profiled, with tile configs as they are
#   3  kernels and tiles side by side: few tokens, many, attention over either cache
#   4  tile configs for the shapes of Llama-2-7B and Llama-3.1-8B, the most used first
#   5  every shape at 1 to 4096 tokens and whole models, next to bfloat16 and peers
#   6  GPTQ on the GPU against the CPU
#
# Results go to $OUT or ./gpu-day: a log and at most two files a stage. Stage 5 takes the tile configs that stage 4 left
# in ./gpu-day/triton_configs.json, so copy them there, and decodes as QUANTKIT_DECODE says: set it to what was fastest
# in stage 2. Wheels of scripts/measure/gpu_wheels.sh in ./.whl are installed first. A dry run takes tiny sizes through Triton's
# interpreter, on the CPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
stage=${1:?which stage, 1 to 6}
out=$(mkdir -p "${OUT:-gpu-day}" && cd "${OUT:-gpu-day}" && pwd)
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

# The package as it is installed, without installing it.
cp -r quantkit "$site/"
for folder in kernels evals cli; do cp -r "$folder" "$site/quantkit/"; done
if compgen -G ".whl/*.whl" >/dev/null; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" .whl/*.whl
fi
export PYTHONPATH="$site:$PWD/scripts/measure" QUANTKIT_CACHE="$site/cache"

dry=()
if [[ ${2:-} == --dry-run ]]; then
    dry=(--dry-run)
    export GPU_DAY_DRY_RUN=1 TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES=
fi
started=$SECONDS
failed=0

# try SECONDS COMMAND...: for so long at most, but in a dry run; the others of a stage go on where one fails.
try() {
    local most=$1
    shift
    echo "== $*"
    timeout -k 5 "$((${#dry[@]} > 0 ? 0 : most))" "$@" || { echo "== exit code $?: $*"; failed=1; }
}

run() {
    case $stage in
    1)
        try 90 "$python" scripts/measure/gpu_environment.py --out "$out/environment.json"
        TORCH_LOGS=output_code try 120 "$python" scripts/measure/gpu_decode.py --schemes int4-g128 --contexts 128 --layers 1,2 \
            --decoding compiled 2>"$out/layers.txt"
        local chosen=(-W default -p no:cacheprovider --durations=5)
        if [[ ${#dry[@]} -gt 0 ]]; then
            chosen+=(-k "share_rows or five_launches")
        elif "$python" -c "import xdist" 2>/dev/null; then
            chosen+=(-n "$(nproc)")
        fi
        try 280 "$python" -m pytest -q "${chosen[@]}" $(grep -l "^def test_" tests/kernels/triton_*.py)
        ;;
    2)
        try 270 "$python" scripts/measure/gpu_agreement.py --out "$out/agreement.json"
        try 290 "$python" scripts/measure/gpu_decode.py --out "$out/decode.json" --decoding eager,compiled --profile 1 \
            --schemes bf16,int4-g128,int8 --contexts 128,4096 --seconds 200
        ;;
    3)
        try 270 "$python" scripts/measure/gpu_kernels.py --out "$out/kernels.json" --seconds 220
        ;;
    4)
        local configs="$out/triton_configs.json"
        if [[ -f gpu-day/triton_configs.json && ! -f $configs ]]; then cp gpu-day/triton_configs.json "$configs"; fi
        try 300 "$python" scripts/measure/tune_triton.py --schemes int4-g128,int8 --tokens 1,16,128,1024,8,32,256 \
            --output "$configs" --seconds 270 "${dry[@]}"
        ;;
    5)
        if [[ -f gpu-day/triton_configs.json ]]; then
            cp gpu-day/triton_configs.json "$site/quantkit/kernels/triton_configs.json"
        fi
        try 190 "$python" scripts/measure/measure_gpu.py --schemes int8,int4-g128 --json "$out/products.json" --seconds 170 \
            "${dry[@]}"
        try 210 "$python" scripts/measure/gpu_decode.py --out "$out/decode.json" --shapes llama-2-7b,llama-3.1-8b \
            --schemes bf16,int4-g128,int4-g128+modules,int8,int8+modules,int4-g128+head-int8 --contexts 128,4096 \
            --prefill 2048 --decoding "${QUANTKIT_DECODE:-compiled}" --seconds 150
        ;;
    6)
        try 270 "$python" scripts/measure/gpu_gptq.py --out "$out/gptq.json" --seconds 200
        ;;
    *)
        echo "no stage $stage: 1 to 6"
        failed=2
        ;;
    esac
    echo "== stage $stage: $((SECONDS - started)) s, results in $out"
    return "$failed"
}

run 2>&1 | tee "$out/stage-$stage.log"
