#!/usr/bin/env bash
# Prepare a model for generate.py: download it from the Hub, convert it, quantize it.
#
#     scripts/prepare.sh mistralai/Mixtral-8x7B-Instruct-v0.1          # 16 bits
#     scripts/prepare.sh mistralai/Mixtral-8x7B-Instruct-v0.1 int4     # and quantized
#
# Each step is atomic, and is skipped if its result exists. So the same command resumes after
# an interruption. Files go to checkpoints/OWNER/NAME; $MOE_FAST_CHECKPOINTS replaces
# "checkpoints". The last line of stdout is the directory for --checkpoint_path. $PYTHON names
# the Python to use; default: .venv's, else python3.
#
# A model published in MXFP4 (gpt-oss) or block-wise FP8 (Qwen3) keeps its format: its directory
# is model_mxfp4 or model_fp8b instead of model_bf16.
set -euo pipefail

usage="usage: scripts/prepare.sh OWNER/NAME [int8|fp8|fp8b|int4|mxfp4|hqq4|hqq3|hqq2]
example: scripts/prepare.sh mistralai/Mixtral-8x7B-Instruct-v0.1 int4"
case "${1:-}" in
    -h | --help) echo "$usage"; exit 0 ;;
    */*) ;;
    *) echo "error: give a repository's name as OWNER/NAME; ${usage%%$'\n'*}" >&2; exit 2 ;;
esac
repo=$1 mode=${2:-bf16}
case "$mode" in
    bf16 | int8 | fp8 | fp8b | int4 | mxfp4 | hqq4 | hqq3 | hqq2) ;;
    *) echo "error: $mode is no number format; ${usage%%$'\n'*}" >&2; exit 2 ;;
esac
if [ $# -gt 2 ]; then echo "error: too many arguments; ${usage%%$'\n'*}" >&2; exit 2; fi

root=$(cd "$(dirname "$0")/.." && pwd)
directory=${MOE_FAST_CHECKPOINTS:-checkpoints}/$repo
python=python3
if [ -x "$root/.venv/bin/python" ]; then python="$root/.venv/bin/python"; fi
python=${PYTHON:-$python}

has_torch='import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'
if ! "$python" -c "$has_torch"; then
    fix="run make demo in $root first, or name another Python: PYTHON=... $0 $*"
    echo "error: $python has no PyTorch: $fix" >&2
    exit 2
fi

is_complete() { [ -f "$1/config.json" ]; }  # conversion renames a checkpoint when it is complete
step() { echo "$1: $2" >&2; }
verify() { "$python" "$root/checkpoint.py" "$1" --verify > /dev/null || exit 2; }

plain=bf16  # format of the converted checkpoint: bf16, mxfp4 or fp8b
if ! is_complete "$directory/model_bf16"; then
    for format in mxfp4 fp8b; do
        if is_complete "$directory/model_$format"; then plain=$format; fi
    done
fi
if [ "$mode" = bf16 ]; then mode=$plain; fi

if is_complete "$directory/model_$mode"; then
    step prepare "$directory/model_$mode is there already; verifying it"
    verify "$directory/model_$mode"
else
    if is_complete "$directory/model_$plain"; then
        step download "not needed"
        step quantize "verifying $directory/model_$plain"
        verify "$directory/model_$plain"
    else
        step download "$repo"
        "$python" "$root/scripts/download.py" --repo_id "$repo" --output_dir "$directory" \
            > /dev/null
        step convert "$directory"
        converted=$("$python" "$root/convert_hf_checkpoint.py" --checkpoint_dir "$directory")
        plain=${converted##*model_}
        if [ "$mode" = bf16 ]; then mode=$plain; fi
    fi
    if [ "$mode" != "$plain" ]; then
        step quantize "$directory/model_$mode"
        "$python" "$root/quantize.py" --checkpoint_path "$directory/model_$plain" \
            --mode "$mode" > /dev/null
    fi
fi
step next "$python $root/generate.py --checkpoint_path $directory/model_$mode --interactive"
echo "$directory/model_$mode"
