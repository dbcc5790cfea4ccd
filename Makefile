# Everything happens in .venv, which the first command makes.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help demo test check lint format bench docs clean

help:           ## this list
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 12

demo: $(READY)  ## FedAvg and FedCSD on label-skewed digits: progress, a table and a picture
	@$(BIN)/fedcsd compare demo.toml --methods fedavg,fedcsd --seeds 0,1,2 --out runs/demo --overwrite

test: $(READY)  ## the whole test suite
	@$(BIN)/python -m pytest -n 4 --dist worksteal

check: lint     ## style, types and unit tests: a minute and a half, for between changes
	@$(BIN)/python -m pytest -n 2 -m "not (slow or program or docs or gpu or browser or flower)"

lint: $(READY)  ## style, types, the direction of imports, docstrings
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && PYTHONPATH=src $(BIN)/lint-imports --no-cache && $(BIN)/python tools/docstrings.py src tests benchmarks studies tools

format: $(READY) ## put the code into the house style
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

bench: $(READY) ## the speed and robustness claims, measured here (several minutes)
	@$(BIN)/python benchmarks/plain_loop.py && $(BIN)/python benchmarks/many_clients.py && $(BIN)/python benchmarks/overhead.py && $(BIN)/python benchmarks/convolution.py && $(BIN)/python benchmarks/kill_and_resume.py && $(BIN)/python benchmarks/deploy.py

docs: $(READY)  ## the documentation as a site, in site/: open site/index.html
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "written: site/index.html"

clean:          ## remove the environment and what tools left behind
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis site

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fedcsd needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing fedcsd and its dependencies into .venv (torch is large: this can take some minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)
