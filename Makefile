# `make quickstart`, `make test` and `make check` start from nothing: each makes .venv if it is missing.

PYTHON ?= python3
# Another build of torch: TORCH='torch==2.14.1 torchvision==0.29.1 --extra-index-url URL'.
TORCH ?= torch==2.14.1 torchvision==0.29.1
VENV := .venv
BIN := $(VENV)/bin
# The user's own shards for the quickstart: make quickstart SHARDS='pile/*.jsonl.zst'
SHARDS ?=
OUT ?= quickstart

.PHONY: help venv quickstart test test-all check docs bench clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

venv: $(VENV)/.complete  ## Make .venv from requirements.lock

$(VENV)/.complete: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info[:2] < (3, 14)))' || \
	  { echo "error: Python 3.11, 3.12 or 3.13 is needed; $(PYTHON) is $$($(PYTHON) -V 2>&1). Set PYTHON=…" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "error: $(PYTHON) has no venv module; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 2; }
	@command -v c++ >/dev/null || command -v g++ >/dev/null || \
	  { echo "error: a C++ compiler is needed; on Debian and Ubuntu: apt-get install g++" >&2; exit 2; }
	@echo "Installing into $(VENV): about 6 GB and some minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile $(TORCH) -r requirements.lock
	$(BIN)/pip install --quiet --no-compile --no-deps --no-build-isolation -e .
	@touch $@

quickstart: venv  ## Prepare, train, compare and export two small models (SHARDS=… for your own text)
	@$(BIN)/python -m leviathan.quickstart --out $(OUT) $(if $(SHARDS),--shards '$(SHARDS)')

test: venv  ## Run the tests
	@$(BIN)/python -m pytest -m "not heavy"

test-all: venv  ## Run the tests, the long ones too
	@$(BIN)/python -m pytest

check: venv  ## ruff, pyright, import-linter, language
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest -q tests/unit/test_language.py

docs: venv  ## Write docs/configuration.md, the key table of docs/checkpoints.md and docs/pictures
	@$(BIN)/python -m leviathan.config.reference
	@$(BIN)/python docs/pictures/draw.py

bench: venv  ## Run the benchmarks on the CPU: about 45 minutes, with nothing else running
	@mkdir -p benchmarks/out
	@for name in lev loss materialize step prep engines checkpoint stream generate eval scaling tensor_parallel metrics_cost; do \
	  $(BIN)/python benchmarks/$$name.py --json > benchmarks/out/$$name.jsonl || exit 1; done
	@$(BIN)/python benchmarks/harness.py benchmarks/out/*.jsonl

clean:  ## Remove what quickstart made (not .venv)
	rm -rf $(OUT)
