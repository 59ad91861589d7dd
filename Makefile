# Everything a developer types. `make` alone prints this list.
#
# Variables: PROMPT (for make run), PYTHON (interpreter that makes the environment), VENV (its folder), TORCH (what pip installs first; on a
# machine without an NVIDIA GPU a CPU build is much smaller:
# make run TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'), JOBS (test processes).

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.ONESHELL:
.DEFAULT_GOAL := help

VENV ?= .venv
TORCH ?= torch==2.13.0
JOBS ?= 2
PROMPT ?= What is the capital of France?
ARGS ?=

SUITABLE := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
	$$p -c '$(SUITABLE)' >/dev/null 2>&1 && echo $$p && break; done)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CORE := pyproject.toml minisgl_core/__init__.py
PLUGINS := $(sort $(wildcard plugins/*/pyproject.toml))
editable = $(patsubst %/pyproject.toml,-e %,$(1))

# Two cores that also spin in OpenMP barriers lose more than they gain: one thread per test process.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

.PHONY: help
help:  ## Print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | awk -F'\t' '{printf "  make %-11s %s\n", $$1, $$2}'

# The environment. Stamps live in it: removing it removes them, and nothing is installed twice.

$(VENV)/.made:
	@test -x $(BIN)/python || test -n "$(PYTHON)" || \
		{ echo 'no Python 3.11 to 3.13 with venv found; install one, or name it: make PYTHON=/path/to/python' >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q --upgrade pip
	$(PIP) install -q 'hatchling>=1.27' 'editables>=0.5'
	touch $@

$(VENV)/.torch: $(VENV)/.made
	$(PIP) install -q $(TORCH)
	touch $@

$(VENV)/.run: $(VENV)/.torch $(CORE) plugins/minisgl_cpu_sim/pyproject.toml
	$(PIP) install -q --no-build-isolation -e . -e plugins/minisgl_cpu_sim
	touch $@

$(VENV)/.dev: $(VENV)/.torch $(CORE) $(PLUGINS)
	$(PIP) install -q --no-build-isolation -e '.[dev]' $(call editable,$(PLUGINS))
	touch $@ $(VENV)/.run

$(VENV)/.docs: $(VENV)/.torch pyproject.toml
	$(PIP) install -q --no-build-isolation -e '.[docs]'
	touch $@

# What people run.

.PHONY: run
run: $(VENV)/.run  ## Install the core and its CPU plugin, print the plan in a line and let a real model answer
	model=$$($(BIN)/minisgl demo-model)
	$(BIN)/minisgl generate --model "$$model" --device cpu --chat --prompt '$(PROMPT)' --max-tokens 32 --temperature 0
	@echo "why these backends: $(BIN)/minisgl explain --model $$model" >&2

.PHONY: install
install: $(VENV)/.dev  ## Install every package, editable, with the developers' tools

.PHONY: test
test: $(VENV)/.dev  ## Run the CPU test suite (ARGS: more for pytest)
	$(PYTEST) -m 'not slow and not gpu and not multi_gpu' $(ARGS)

.PHONY: test-all
test-all: $(VENV)/.dev  ## Run the slow tests too (.ci/nightly does; no commit runs them)
	$(PYTEST) -m 'not gpu and not multi_gpu' $(ARGS)

# On a GPU machine the distributions may be installed anywhere: the environment of `make install` serves if it is there, else
# the interpreter that has them. Nothing is installed here, so it works without a network. ARGS: see docs/gpu-check.md.
PYTHON_GPU ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)

.PHONY: gpu-check
gpu-check:  ## Check every GPU backend on this machine (ARGS='--quick': within eight minutes)
	PYTHONPATH=tests $(PYTHON_GPU) -P -m support.gpu $(ARGS)

.PHONY: lint
lint: $(VENV)/.dev  ## Check format, style, types and the architecture
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	MYPYPATH=tests $(BIN)/mypy -p support.gpu
	$(BIN)/mypy tools/config_page.py tools/inputs_page.py tools/performance_page.py
	$(BIN)/lint-imports

.PHONY: format
format: $(VENV)/.dev  ## Rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: wheels
wheels: $(VENV)/.made  ## Build the wheel of every package into dist/
	rm -rf dist
	$(PIP) wheel -q --no-deps --no-build-isolation -w dist . $(patsubst %/pyproject.toml,./%,$(PLUGINS))
	@ls -1 dist

.PHONY: docs
docs: $(VENV)/.docs  ## Build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.PHONY: config-page
config-page: $(VENV)/.dev  ## Write the tables of docs/configuration.md and docs/reference/inputs.md from the program itself
	$(BIN)/python tools/config_page.py
	$(BIN)/python tools/inputs_page.py

.PHONY: performance-page
performance-page: $(VENV)/.dev  ## Write the tables of docs/performance.md from benchmarks/results
	$(BIN)/python tools/performance_page.py

.PHONY: clean
clean:  ## Remove what was built; the environment stays
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
