# Two commands are all the set-up there is: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Python compiles a module when it is first imported; pip would take half a minute for all of them.
# It has to keep what it compiled: else each of the tests' processes takes 3 s more for PyTorch.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/python -m pip install --no-compile --quiet --quiet --constraint constraints.txt
TYPED := benchmark.py checkpoint.py convert_hf_checkpoint.py eval.py generate.py model.py quantize.py \
	serve.py chat_template.py tokenizer.py tp.py runtime models server tool_calls hub memory gguf_files host cli

.PHONY: demo test step_through test-all oracles clients lint check clean

$(VENV)/.run: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("moe-fast needs Python 3.11 or newer; name one: make PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo 'installing PyTorch and the other packages into $(VENV): minutes, and gigabytes if PyTorch comes with CUDA'
	$(BIN)/python -m pip install --quiet --quiet --upgrade pip
	$(PIP) --editable '.[serve]'
	touch $@

$(VENV)/.test: $(VENV)/.run
	$(PIP) --editable '.[test]'
	touch $@

demo: $(VENV)/.run
	$(BIN)/python generate.py --prompt "$$(printf 'import os\n\n\ndef find_files(directory, suffix):\n')" \
		--stop "$$(printf '\ndef')" --temperature 0.4 --repetition_penalty 1.1 --seed 28
	@echo
	@echo 'Next, after `. $(BIN)/activate`:'
	@echo '  python serve.py                                              a chat page on http://127.0.0.1:8000'
	@echo '  python generate.py --model OWNER/NAME:int4 --interactive     a model from the Hub, in 4 bits'

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(TYPED)

# OMP_NUM_THREADS=1: tests run two processes side by side. They take whole files, since fixtures of
# a file may cost a minute, and in the order of tests/conftest.py.
check: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow' -n 2 --dist loadfile --no-loadscope-reorder

# mypy, and kernels as Python, have one thread: the other tests begin meanwhile.
test: $(VENV)/.test
	@$(MAKE) --no-print-directory --jobs 3 lint check step_through

# Kernels as Python. Triton reads TRITON_INTERPRET when it is imported: a process of its own.
step_through: $(VENV)/.test
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m 'not slow' tests/test_step_through.py

test-all: lint oracles clients
	$(BIN)/python -m pytest

# What tests compare with. Packages without their dependencies, which would replace what is installed.
# hqq's solver is another one from 0.2.7 on (tests/test_quantize.py). llama.cpp's quantizer is built.
oracles: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --no-deps hqq==0.2.6 termcolor || echo 'no hqq: its tests will be skipped'
	PYTHON=$(BIN)/python scripts/build_oracles.sh || echo 'no llama-quantize: its tests will be skipped'

# Clients of the server, about 200 MB (tests/test_clients.py).
clients: $(VENV)/.test
	$(PIP) --editable '.[clients]' || echo 'no clients: their tests will be skipped'

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis .mypy_cache
