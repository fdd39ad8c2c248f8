# `make train` and `make test` need Python 3.11+ and make; everything else is installed into .venv on first use.
PYTHON ?= python3
BIN := .venv/bin
UV := $(BIN)/uv pip
DATA_ROOT ?= data

.DEFAULT_GOAL := help
.PHONY: help train test lint format bench lock sample clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

train: .venv/train  ## train ResNet-18 on real digits with two workers; any setting: make train SUNSPOT_EPOCHS=3
	@$(foreach name,$(filter SUNSPOT_%,$(.VARIABLES)),$(name)='$($(name))') $(BIN)/python -m app

test: .venv/dev  ## the test suite that needs no cluster
	$(BIN)/python -m pytest -q

lint: .venv/dev  ## format, lint, types, import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy app submitter scripts
	$(BIN)/lint-imports

format: .venv/dev  ## put the code into its one form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/dev  ## the benchmarks beside their yardsticks, as one table
	@$(foreach name,$(filter SUNSPOT_%,$(.VARIABLES)),$(name)='$($(name))') $(BIN)/python -m scripts.bench

lock: .venv/dev  ## lock the newest dependencies, with hashes
	$(BIN)/uv pip compile -q --upgrade $(LOCK) requirements/uv.in -o requirements/uv.txt
	$(BIN)/uv pip compile -q --upgrade $(LOCK) pyproject.toml --extra train -o requirements/train.txt
	$(BIN)/uv pip compile -q --upgrade $(LOCK) pyproject.toml --extra train --extra dev -c requirements/train.txt -o requirements/dev.txt
LOCK := --universal --python-version 3.11 --generate-hashes --no-annotate --no-header

sample: .venv/dev  ## make the bundled digits again from the published files: make sample DATA_ROOT=data
	$(BIN)/python -m scripts.make_sample --data-root $(DATA_ROOT)

clean:  ## remove what was installed here; runs and data stay
	rm -rf .venv

# uv installs in seconds what pip takes minutes for; pip brings uv, by its hash.
.venv/uv: requirements/uv.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r $<
	@touch $@

.venv/train: requirements/train.txt pyproject.toml .venv/uv
	@test -e .venv/dev || $(UV) install -q --require-hashes -r $<
	@$(UV) install -q --no-deps -e .
	@touch $@

.venv/dev: requirements/dev.txt pyproject.toml .venv/uv
	$(UV) install -q --require-hashes -r $<
	@$(UV) install -q --no-deps -e .
	@touch $@ .venv/train
