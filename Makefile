# Two commands for a newcomer: `make demo` and `make test`. Both make .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test attack kernels lint bench gpu clean

demo: $(VENV)/.installed
	$(BIN)/clearhead demo

# A file of tests stays in one process: its fixtures are made once. Tests use one thread each.
test: $(VENV)/.installed
	$(BIN)/python -m pytest -n logical --dist loadfile

# An hour of generated attacks; another SEED makes others, and `make test` makes a few of each kind.
CASES ?= 10000
SEED ?= 0
attack: $(VENV)/.installed
	CLEARHEAD_ATTACK_CASES=$(CASES) CLEARHEAD_ATTACK_SEED=$(SEED) $(BIN)/python -m pytest tests/attack

# The GPU's kernels without one: in Triton's interpreter, then through its compilers. Triton lies apart,
# so that everything else meets what a CPU build of PyTorch has.
kernels: $(VENV)/triton
	TRITON_INTERPRET=1 PYTHONPATH=$< $(BIN)/python -m pytest tests/ops/test_shaped.py tests/ops/test_differential_fused.py
	PYTHONPATH=$< $(BIN)/python -m pytest tests/ops/test_kernels.py

lint: $(VENV)/.installed
	$(BIN)/pre-commit run --all-files

bench: $(VENV)/.installed
	$(BIN)/clearhead bench --output results/bench.jsonl

# On a machine with a GPU and its own torch: tests, then figures; no .venv, nothing is installed.
gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu
	PYTHONPATH=src $(PYTHON) -m clearhead bench kernel blocks encoders training-step attention memory --rounds 5 --output results/gpu.jsonl

# torch first and by its exact version: a range would let pip take a newer build.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "clearhead needs Python 3.11 or later: make PYTHON=python3.12 demo")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@

$(VENV)/triton: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt --upgrade --target $@ triton
	@touch $@

clean:
	rm -rf $(VENV) demo build
