# `make quickstart`, `make test` and `make check` each create .venv if it is missing.

PYTHON ?= python3
# To install another build of torch: TORCH='torch==2.14.1 torchvision==0.29.1 --extra-index-url URL'.
TORCH ?= torch==2.14.1 torchvision==0.29.1
VENV := .venv
BIN := $(VENV)/bin
# Shards for the quickstart instead of the generated corpus: make quickstart SHARDS='pile/*.jsonl.zst'
SHARDS ?=
OUT ?= quickstart

.PHONY: help venv quickstart test test-all check docs bench clean

help:  ## Show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

venv: $(VENV)/.complete  ## Create .venv from requirements.lock

$(VENV)/.complete: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info[:2] < (3, 14)))' || \
	  { echo "error: Python 3.11, 3.12 or 3.13 is required, but $(PYTHON) is $$($(PYTHON) -V 2>&1). Set PYTHON=…" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "error: $(PYTHON) has no venv module. On Debian and Ubuntu, run: apt-get install python3-venv" >&2; exit 2; }
	@command -v c++ >/dev/null || command -v g++ >/dev/null || \
	  { echo "error: a C++ compiler is required. On Debian and Ubuntu, run: apt-get install g++" >&2; exit 2; }
	@echo "Installing into $(VENV) (once; about 6 GB and a few minutes)."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile $(TORCH) -r requirements.lock
	$(BIN)/pip install --quiet --no-compile --no-deps --no-build-isolation -e .
	@touch $@

quickstart: venv  ## Prepare, train, compare and export two small models (SHARDS=… to use your own text)
	@PATH="$(CURDIR)/$(BIN):$$PATH" OUT='$(OUT)' SHARDS='$(SHARDS)' scripts/quickstart.sh

# Unit tests run in several processes; the others start ranks and hosts themselves.
PARALLEL := -n logical --maxprocesses 4 --dist loadfile

test: venv  ## Run the tests except the heavy ones
	@$(BIN)/python -m pytest -m "not heavy" $(PARALLEL) tests/unit
	@$(BIN)/python -m pytest -m "not heavy" --ignore tests/unit

test-all: venv  ## Run all tests
	@$(BIN)/python -m pytest $(PARALLEL) tests/unit
	@$(BIN)/python -m pytest --ignore tests/unit

check: venv  ## Run ruff, pyright, import-linter and the language test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest -q tests/unit/test_language.py

docs: venv  ## Generate docs/configuration.md, the table in docs/checkpoints.md and docs/pictures
	@$(BIN)/python -m leviathan.config.reference
	@$(BIN)/python docs/pictures/draw.py

bench: venv  ## Run the CPU benchmarks (about 45 minutes; run nothing else at the same time)
	@mkdir -p benchmarks/out
	@for name in lev loss materialize step prep engines checkpoint stream generate eval scaling tensor_parallel metrics_cost; do \
	  $(BIN)/python benchmarks/$$name.py --json > benchmarks/out/$$name.jsonl || exit 1; done
	@$(BIN)/python benchmarks/harness.py benchmarks/out/*.jsonl

clean:  ## Remove the output of the quickstart (not .venv)
	rm -rf $(OUT)
