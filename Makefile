# Two commands are all the set-up there is: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all oracles lint clean

$(VENV)/.run: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("moe-fast needs Python 3.11 or newer; name one: make PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo 'installing PyTorch and the other packages into $(VENV): minutes, and gigabytes where PyTorch comes with CUDA'
	$(BIN)/python -m pip install --quiet --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --quiet --editable .
	touch $@

$(VENV)/.test: $(VENV)/.run
	$(BIN)/python -m pip install --quiet --quiet --editable '.[test]'
	touch $@

demo: $(VENV)/.run
	$(BIN)/python generate.py --prompt 'def read_lines(path):' --max_new_tokens 100 --temperature 0.6 --seed 1
	@echo 'next: . $(BIN)/activate, and then python generate.py --help, or scripts/prepare.sh OWNER/NAME for a model from the Hub'

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow' -n 2 --dist loadfile

test-all: lint oracles
	$(BIN)/python -m pytest

# Packages that tests are held against. What they depend on is left out: it is not needed, and would replace what is.
# hqq's solver is another one from 0.2.7 on (tests/test_quantize.py).
oracles: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --no-deps hqq==0.2.6 termcolor || echo 'no hqq: its tests will be skipped'

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
