# From a fresh clone, with Python 3.11, git and make: `make train` or `make test`.
# Everything is installed into .venv, pinned by constraints.txt; a second call installs nothing.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

# The Python that makes .venv (3.11 or newer): `make train PYTHON=/path/to/python`.
ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell if python3.11 -c '' >/dev/null 2>&1; then echo python3.11; else echo python3; fi)
endif

# What `make train` trains, and further flags: `make train ENV_ID=Acrobot-v1 ARGS="--seed 3"`.
ALGO ?= ppo
ENV_ID ?= CartPole-v1
ARGS ?=

# Test processes side by side; each imports torch, so more than the cores is slower.
TEST_WORKERS ?= 2

# Runs of each side and task in `make bench`, and where the peers' environments are made.
BENCH_REPEATS ?= 3
PEERS ?= .peers

# Which datasets `make datasets` makes, and its options; by default all: `make datasets DATASETS="halfcheetah --budget 300000"`.
DATASETS ?=

# Where `make measure` puts runs and manifests.
MEASURED ?= runs/measured

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Stamps: each is newer than the files it was installed from. A dev install is a core install as well.
VENV_MADE := $(VENV)/.made
CORE := $(VENV)/.installed-core
DEV := $(VENV)/.installed-dev

.PHONY: help train test lint types contracts docs test-fast test-learning test-soak test-browser bench measure datasets format clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

train: $(CORE) ## Train PPO on CartPole-v1 from its preset, and evaluate it (ALGO, ENV_ID, ARGS change that)
	@$(BIN)/python -m rl_training.cli train $(ALGO) $(ENV_ID) $(ARGS)

test: lint types contracts docs test-fast ## Everything that must pass: lint, types, import contracts, docs, fast tests

lint: $(DEV) ## Lint and check formatting (ruff)
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .

types: $(DEV) ## Check types (mypy, strict)
	@$(BIN)/python -m mypy

contracts: $(DEV) ## Check which layer imports which (import-linter)
	@$(BIN)/lint-imports

docs: $(DEV) ## Build the documentation into site/, warnings are errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict --clean --site-dir site

test-fast: $(DEV) ## The fast tests only (TEST_WORKERS processes)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(TEST_WORKERS)

test-learning: $(DEV) ## The tests that train until something is learned (minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) -m learning

test-soak: $(DEV) ## The long stability and memory tests
	@$(BIN)/python -m pytest -m soak

test-browser: $(DEV) ## The pages of plot and report in a real browser (Chromium, which it does not install)
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do \
		command -v $$name >/dev/null && exit 0; done; \
		echo 'error: there is no Chromium here. Install it (Debian: apt-get install chromium) and try again.' >&2; exit 1
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser

# A side that fails is shown on the page, and does not keep the others from it: hence the minus signs.
bench: $(DEV) ## Speed against other packages, and its page in the docs: a little more than an hour on an idle machine (BENCH_REPEATS, PEERS)
	-@$(BIN)/python benchmarks/throughput.py --repeats $(BENCH_REPEATS) --environments $(PEERS)
	-@$(BIN)/python benchmarks/costs.py --environments $(PEERS)
	-@$(BIN)/python benchmarks/frame_replay.py
	-@$(BIN)/python benchmarks/limits.py
	-@$(BIN)/python benchmarks/scaling.py
	@$(BIN)/python benchmarks/page.py

datasets: $(DEV) ## Make the datasets of the offline benchmarks in ./datasets (hours for HalfCheetah; DATASETS="pendulum cartpole" chooses)
	@$(BIN)/python scripts/make_datasets.py $(DATASETS)

measure: $(DEV) ## Measure the presets for the results page: days, continues where it stopped (MEASURED, ARGS)
	@OMP_NUM_THREADS=1 $(BIN)/python scripts/measure.py --output-dir $(MEASURED) $(ARGS)

format: $(DEV) ## Format the code, and mend what ruff can mend
	@$(BIN)/python -m ruff check --fix-only --quiet .
	@$(BIN)/python -m ruff format .

clean: ## Remove .venv, caches and built files; runs/ is kept
	rm -rf $(VENV) site dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find src tests examples scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(VENV_MADE):
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo 'error: "$(PYTHON)" is missing or older than Python 3.11. Name a newer one: make PYTHON=/path/to/python' >&2; \
		exit 1; }
	@echo 'Making $(VENV) with $(PYTHON) ...'
	@"$(PYTHON)" -m venv $(VENV)
	@touch $@

$(CORE): pyproject.toml constraints.txt | $(VENV_MADE)
	@echo 'Installing rl-training into $(VENV) (the first time this takes minutes) ...'
	@$(PIP_INSTALL) --editable .
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(VENV_MADE)
	@echo 'Installing rl-training with its dev extras into $(VENV) (the first time this takes minutes) ...'
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch $(CORE) $@
