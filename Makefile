# Every target that needs an environment makes it first: a stamp file for each level, renewed when pyproject.toml changes.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Small matrices lose more in starting threads than they gain: tests run one thread a process.
ONE_THREAD := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1
WORKERS ?= 2

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test check lint types imports sizes kernels bench

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1~\2/p' $(MAKEFILE_LIST) | awk -F'~' '{ printf "%-15s %s\n", $$1, $$2 }'

setup: $(VENV)/dev.stamp  ## make .venv with the package, its extras and the development tools

demo: $(VENV)/base.stamp  ## train a tiny K3 on the standard library's sources, then continue a prompt (base install only)
	rm -rf runs/demo
	$(BIN)/rille train tiny --out runs/demo
	$(BIN)/rille generate runs/demo --prompt "def "
	@echo "the command is $(BIN)/rille, or plain rille after: . $(BIN)/activate"

test: $(VENV)/dev.stamp  ## run the tests
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(WORKERS)

check: lint types imports sizes kernels test  ## what CI runs: lint, types, import contracts, size report, kernels, tests

lint: $(VENV)/dev.stamp  ## ruff: rules and format
	$(BIN)/ruff check --output-format concise .
	$(BIN)/ruff format --check .

types: $(VENV)/dev.stamp  ## pyright on rille/
	$(BIN)/pyright

imports: $(VENV)/dev.stamp  ## the import contracts
	$(BIN)/lint-imports --no-logo

sizes: $(VENV)/dev.stamp  ## lengths of functions and files, and what `import rille` costs
	$(BIN)/python tools/size_report.py

kernels: $(VENV)/dev.stamp  ## compile every kernel for Hopper, without a GPU: registers, spills, shared memory, wgmma
	$(ONE_THREAD) $(BIN)/python -m rille.ops.ahead --jobs $(WORKERS)

bench: $(VENV)/dev.stamp  ## run the benchmarks: each passes its test first, then takes times
	@test -d benchmarks || { echo "no benchmarks yet"; exit 1; }
	@for file in $$(find benchmarks/*/ -maxdepth 1 -name '*.py' | sort); do echo "$$file"; $(BIN)/python "$$file" || exit 1; done

# pip is the last thing that venv installs: where it is missing, the environment is not whole.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Rille needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Torch goes first and alone, so that no later range of versions can pull another build. One that is there and new enough stays.
$(VENV)/base.stamp: pyproject.toml | $(BIN)/pip
	@$(BIN)/python tools/torch_present.py || { echo "installing $(TORCH), about half a minute"; $(PIP) install -qq $(TORCH); }
	$(PIP) install -qq -e .
	@touch $@

$(VENV)/dev.stamp: pyproject.toml | $(VENV)/base.stamp
	$(PIP) install -qq -e '.[dev]'
	@touch $(VENV)/base.stamp $@
