#!/usr/bin/env bash
# Build llama.cpp's quantizer, with which tests/test_gguf_oracle.py makes GGUF files.
#
#     scripts/build_oracles.sh        # as `make oracles` does; minutes on two cores
#
# The source is that of the PyPI package llama-cpp-python, about 75 MB. The program goes to
# build/oracles/llama-quantize and all else is deleted, so that a second run does nothing.
# $PYTHON names the Python whose pip is used. cmake and ninja come from PyPI where they are missing.
set -euo pipefail

version=0.3.36 # of llama-cpp-python; the newest when the tests were written
root=$(cd "$(dirname "$0")/.." && pwd)
target=$root/build/oracles
if [ -x "$target/llama-quantize" ]; then echo "$target/llama-quantize is there"; exit 0; fi
python=${PYTHON:-$root/.venv/bin/python}
if ! command -v c++ > /dev/null; then
    echo "error: no C++ compiler; install one, such as g++" >&2
    exit 2
fi

mkdir -p "$target"
work=$(mktemp -d "$target/work.XXXXXX")
trap 'rm -rf "$work"' EXIT
"$python" -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest "$work" \
    "llama-cpp-python==$version"
tar -xzf "$work"/llama_cpp_python-*.tar.gz -C "$work" --strip-components=1
missing=()
for tool in cmake ninja; do command -v "$tool" > /dev/null || missing+=("$tool"); done
if [ ${#missing[@]} -gt 0 ]; then
    "$python" -m pip install --quiet --target "$work/tools" "${missing[@]}"
    export PATH="$work/tools/bin:$PATH" PYTHONPATH="$work/tools"
fi

# -O1 and no vector units of this CPU: quick to compile, and small models take no time.
# One static program: nothing else has to stay.
cmake -S "$work/vendor/llama.cpp" -B "$work/build" -G Ninja -Wno-dev \
    -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_FLAGS_RELEASE=-O1 -DCMAKE_CXX_FLAGS_RELEASE=-O1 \
    -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
    -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_SUBPROCESS=OFF \
    -DGGML_NATIVE=OFF -DGGML_LLAMAFILE=OFF -DGGML_OPENMP=OFF -DGGML_CPU_REPACK=OFF > "$work/log" \
    || { tail -n 20 "$work/log" >&2; exit 1; }
cmake --build "$work/build" --target llama-quantize --parallel 2 > "$work/log" \
    || { tail -n 40 "$work/log" >&2; exit 1; }
strip "$work/build/bin/llama-quantize" 2> /dev/null || true
mv "$work/build/bin/llama-quantize" "$target/llama-quantize"
echo "built $target/llama-quantize"
