#!/usr/bin/env bash
# From the Hub to a model that generate.py takes: download, convert, quantise, in one command.
#
#     scripts/prepare.sh mistralai/Mixtral-8x7B-Instruct-v0.1          # 16 bits
#     scripts/prepare.sh mistralai/Mixtral-8x7B-Instruct-v0.1 int4     # and in fewer bits
#
# Each step is all or nothing and is left out where its result is there, so after an interruption the same command goes
# on from where it was. The files go to checkpoints/REPO, or to the folder in $MOE_FAST_CHECKPOINTS; the last line of
# standard output is the directory for --checkpoint_path. $PYTHON names another Python than python3.
# What is published in MXFP4 (gpt-oss) or in FP8 with a scale for each block (Qwen3) keeps it: model_mxfp4 or model_fp8b
# takes the place of model_bf16.
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

home=$(cd "$(dirname "$0")/.." && pwd)
directory=${MOE_FAST_CHECKPOINTS:-checkpoints}/$repo
python=${PYTHON:-$(if [ -x "$home/.venv/bin/python" ]; then echo "$home/.venv/bin/python"; else echo python3; fi)}

if ! "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; then
    echo "error: $python has no PyTorch: run make demo in $home first, or name another Python: PYTHON=... $0 $*" >&2; exit 2
fi

whole() { [ -f "$1/config.json" ]; }  # a converted checkpoint has its name only once it is complete
step() { echo "$1: $2" >&2; }

plain=bf16  # or the format in which it is published
if ! whole "$directory/model_bf16"; then
    for format in mxfp4 fp8b; do
        if whole "$directory/model_$format"; then plain=$format; fi
    done
fi
if [ "$mode" = bf16 ]; then mode=$plain; fi

if whole "$directory/model_$mode"; then
    step prepare "$directory/model_$mode is there already"
else
    if whole "$directory/model_$plain"; then
        step download "not needed"
    else
        step download "$repo"
        "$python" "$home/scripts/download.py" --repo_id "$repo" --output_dir "$directory" > /dev/null
        step convert "$directory"
        converted=$("$python" "$home/convert_hf_checkpoint.py" --checkpoint_dir "$directory")
        plain=${converted##*model_}
        if [ "$mode" = bf16 ]; then mode=$plain; fi
    fi
    if [ "$mode" != "$plain" ]; then
        step quantise "$directory/model_$mode"
        "$python" "$home/quantize.py" --checkpoint_path "$directory/model_$plain" --mode "$mode" > /dev/null
    fi
fi
step next "$python $home/generate.py --checkpoint_path $directory/model_$mode --interactive"
echo "$directory/model_$mode"
