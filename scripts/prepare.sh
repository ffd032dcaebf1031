#!/usr/bin/env bash
# Prepare a model of the Hub for generate.py: download, convert and quantize it in one pass.
#
#     scripts/prepare.sh mistralai/Mixtral-8x7B-Instruct-v0.1          # 16 bits
#     scripts/prepare.sh mistralai/Mixtral-8x7B-Instruct-v0.1 int4     # and quantized
#
# This is `generate.py --model OWNER/NAME:FORMAT --prepare_only`, which resumes after an
# interruption. Files go to checkpoints/OWNER/NAME; $MOE_FAST_CHECKPOINTS replaces "checkpoints".
# The last line of stdout is the directory for --checkpoint_path. $PYTHON names the Python to use;
# default: .venv's, else python3.
#
# A model published in MXFP4 (gpt-oss) or block-wise FP8 (Qwen3) keeps its format: its directory
# is model_mxfp4 or model_fp8b instead of model_bf16.
set -euo pipefail

usage="usage: scripts/prepare.sh OWNER/NAME [FORMAT]
example: scripts/prepare.sh mistralai/Mixtral-8x7B-Instruct-v0.1 int4"
case "${1:-}" in
    -h | --help) echo "$usage"; exit 0 ;;
    */*) ;;
    *) echo "error: give a repository's name as OWNER/NAME; ${usage%%$'\n'*}" >&2; exit 2 ;;
esac
model=$1
if [ "${2:-bf16}" != bf16 ]; then model=$1:$2; fi # bf16: the published format
if [ $# -gt 2 ]; then echo "error: too many arguments; ${usage%%$'\n'*}" >&2; exit 2; fi

root=$(cd "$(dirname "$0")/.." && pwd)
python=python3
if [ -x "$root/.venv/bin/python" ]; then python="$root/.venv/bin/python"; fi
python=${PYTHON:-$python}

has_torch='import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'
if ! "$python" -c "$has_torch"; then
    fix="run make demo in $root first, or name another Python: PYTHON=... $0 $*"
    echo "error: $python has no PyTorch: $fix" >&2
    exit 2
fi
"$python" "$root/generate.py" --model "$model" --prepare_only
echo "next: $python $root/generate.py --model $model --interactive" >&2
