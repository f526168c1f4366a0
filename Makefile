# `make` lists the targets. Everything runs in .venv next to this file.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE_TESTS := $(addprefix tests/,test_config.py model data methods tasks discovery runs report fit/test_expect.py \
	predict/test_predictor.py commands/test_train.py commands/test_predict.py train/test_swad.py)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-lowest test-newest chaos check format docs bench clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(VENV)/.ready  ## create .venv with all extras but timm; done once per change of pyproject.toml or constraints.txt

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "setup: installing into $(VENV); the first time takes some minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2> /dev/null || $(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	sed '/^torch==/d' constraints.txt > $(VENV)/constraints.txt  # a torch that is there stays
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable ".[all,dev,docs]"
	@touch $@

demo: setup  ## train and compare on images whose answer is known: a table, and a page with the maps (about eight minutes)
	$(BIN)/patchgen weights fetch
	$(BIN)/patchgen demo

test: setup  ## the fast tests, on two cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

test-slow: setup  ## the tests that take minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow

test-lowest:  ## the core's tests with the lowest versions that pyproject.toml allows, in .venv-lowest
	test -x .venv-lowest/bin/python || $(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --constraint constraints-lowest.txt torch
	.venv-lowest/bin/python -m pip install --quiet --constraint constraints-lowest.txt --editable . pytest hypothesis httpx
	OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest -q $(CORE_TESTS)

# torch stays at the tested version: its newest build can be several GB
test-newest:  ## the same with the newest versions, in .venv-newest; TESTS=tests/model runs a part
	test -x .venv-newest/bin/python || $(PYTHON) -m venv .venv-newest
	grep '^torch==' constraints.txt > .venv-newest/torch.txt
	.venv-newest/bin/python -m pip install --quiet --constraint .venv-newest/torch.txt torch
	.venv-newest/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager \
		--constraint .venv-newest/torch.txt --editable . pytest hypothesis httpx
	OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest -q $(or $(TESTS),$(CORE_TESTS))

chaos: setup  ## 300 kills, faults, 5,000 bad inputs and the attacks of tests/hostile, on two cores; about an hour
	OMP_NUM_THREADS=1 $(BIN)/python tests/chaos/run.py --seed 1 --kills 300 --inputs 5000 --jobs 2
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "slow or not slow" tests/hostile

check: setup docs  ## lint, format, types, and the documentation's links
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: setup  ## the documentation as a site in site/; a broken link fails
	$(BIN)/mkdocs build --strict

format: setup  ## fix what ruff can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: setup  ## cost of a PatchGen training step against LP+LN on this machine
	$(BIN)/python -m benchmarks rate

clean:  ## remove caches and builds; .venv and runs stay
	rm -rf dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
