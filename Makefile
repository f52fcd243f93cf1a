# Two commands on a fresh machine: `make demo` and `make test`. Both set everything up first.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DIST := dist
TORCH_INDEX := https://download.pytorch.org/whl/cpu
# A file stays with one worker, which makes what its tests share once; tests/conftest.py puts long files first.
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.PHONY: setup demo test test-all lint types docs reference dist clean

setup: $(READY)

# Constraints pin the exact set that tests use. PyPI's torch for Linux needs gigabytes of CUDA packages, so it comes from
# PyTorch's index of CPU builds, or from wherever else pip is configured to find one.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps --retries 1 --extra-index-url $(TORCH_INDEX) torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/longrope2 extend tiny --target-length 2048 -o runs/demo

test: $(READY)
	$(BIN)/python -m pytest $(PARALLEL)

# The second tier: what takes minutes.
test-all: test
	$(BIN)/python -m pytest $(PARALLEL) -m 'slow and not gpu and not network' -o faulthandler_timeout=1500

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/mkdocs build --strict

# The options in docs/reference.md; a test fails where they are not those of the commands.
reference: $(READY)
	$(BIN)/python -m longrope2.reference docs/reference.md

# Wheel and sdist, by the pinned build backend.
dist: $(READY)
	$(BIN)/python -m hatchling build --directory $(DIST)

clean:
	rm -rf $(VENV) $(DIST) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
