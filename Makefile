# Every target prepares .venv first.  scripts/setup.sh installs nothing outside .venv, and a second run takes a second.
SHELL := /bin/bash
VENV := .venv/bin
# RECORD=1 writes down how long each module took.  SEED=123 repeats the order of a run that printed "Using --randomly-seed=123".  JOBS=0 runs the tests one after another.
# JOBS processes run the tests: one more than there are cores, because each often waits for what it has started; at most five, for their memory.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 1); echo $$((n < 4 ? n + 1 : 5)))
PYTEST := $(VENV)/python -m pytest -n $(JOBS) $(if $(SEED),--randomly-seed=$(SEED)) $(if $(RECORD),--record-durations)

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev setup-bench system-packages demo dev down quick test test-full test-clients test-kubernetes test-matrix check mutants native check-native bench bench-quick simulation locks docs images stand-ins

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Make .venv with everything that Thaw needs to run
	@scripts/setup.sh run

setup-dev: ## Make .venv with everything that Thaw and its tests need
	@scripts/setup.sh dev

setup-bench: ## As setup-dev, with the programs that benchmarks compare Thaw with (deps/bench.lock: obstore, s5cmd)
	@scripts/setup.sh bench

demo: setup ## Start a platform and a real model, explain a cold and a warm answer, and leave nothing behind
	@$(VENV)/python -m thaw.dev.demo

dev: setup ## Run the platform on this machine, in the foreground (Ctrl-C ends it)
	@$(VENV)/thaw dev up

down: setup ## End a platform that runs on this machine, also after a crash of its supervisor
	@$(VENV)/thaw dev down

system-packages:
	@scripts/system_packages.sh

quick: setup-dev ## Check lint, types and layers, and run the tests that need no engine, platform or container
	@$(PYTEST) -m quick

test: system-packages setup-dev ## Run all but the long tests, in random order (SEED=123 repeats it), by one process more than there are cores (JOBS=2: by two); TESTS=PATH runs some
	@$(PYTEST) -m "not full" $(TESTS)

test-full: system-packages setup-dev ## Run every test
	@$(PYTEST)

test-clients: setup-dev ## Run LangChain, instructor, litellm and llm (deps/clients.lock, in .venv-clients) against a platform
	@test -d .venv-clients || $(VENV)/python -m venv .venv-clients
	@.venv-clients/bin/pip install -q --no-deps --require-hashes -r deps/clients.lock
	@THAW_CLIENTS_PYTHON=$(CURDIR)/.venv-clients/bin/python $(PYTEST) tests/e2e/test_frameworks.py

test-kubernetes: setup-dev ## Run a platform on the cluster that KUBECONFIG names, or on one made here (root), and delete it again
	@KUBECONFIG="$(KUBECONFIG)" $(VENV)/python -m pytest -m kubernetes tests/kubernetes_real

test-matrix: setup-dev ## Run make test on 2 and 4 cores, just booted and up for a year, idle and busy, as on older processors (hours)
	@$(VENV)/python scripts/test_matrix.py --write

check: setup-dev ## Check lint, types, layers and unit tests; say whether docs/simulation.md is out of date
	@$(VENV)/ruff check . && $(VENV)/ruff format --check .
	@$(VENV)/mypy
	@$(VENV)/lint-imports
	@$(PYTEST) -m "not vllm and not full" tests
	@$(VENV)/python bench/simulate.py --changed

mutants: setup-dev ## Plant small faults and count how many the tests notice (MUTANTS="ledger --most 0": all of one module)
	@$(VENV)/python scripts/mutants.py $(MUTANTS)

native: ## Build the native library (csrc/); without it the runtime reads segments in Python
	@$(MAKE) -s -C csrc all

check-native: ## Run the native tests: plain, then with the address, undefined-behaviour and thread sanitizers
	@set -e; for flavour in plain asan tsan; do echo "== $$flavour"; \
	    THAW_FUZZ_ITERATIONS=$(or $(FUZZ),50000) $(MAKE) -s -C csrc FLAVOUR=$$flavour check; done

bench: setup-bench ## Run the published benchmarks (hours) and write docs/benchmarks.md from their output; BENCH="warm relay" runs some
	@$(VENV)/python -m bench._publish $(BENCH)

bench-quick: setup-bench ## Run every benchmark for less than two minutes; only PAGE=1 writes the page
	@$(VENV)/python -m bench._publish --quick $(if $(PAGE),--record) $(BENCH)

simulation: setup-dev ## Simulate every point with five seeds, by JOBS processes; writes docs/simulation.md (TRACES=DIR: workload files too)
	@$(VENV)/python bench/simulate.py --all --seeds 5 --jobs $(JOBS) --docs docs $(if $(TRACES),--traces "$(TRACES)")

images: ## Build the container images (needs Docker); docs/docker.md
	@scripts/images.sh

stand-ins: setup ## Without a registry, make the images that Thaw's images need, from Debian's and PyPI's packages
	@$(VENV)/python scripts/stand_ins.py

docs: setup ## Write the generated pages anew
	@$(VENV)/python -m thaw.dev.pages
	@$(VENV)/python -m tests.reference_pages

# The locks: the source of each lock is in the same folder.  For a CPU host torch must be the CPU build, so its wheel
# must be reachable.  For a GPU host it must not be: a folder in PIP_FIND_LINKS may hold the CPU build, and it would win.
UV_COMPILE := $(VENV)/uv pip compile --python-version 3.11 --generate-hashes $(if $(PIP_FIND_LINKS),--find-links "$(PIP_FIND_LINKS)")
locks: setup-dev ## Resolve deps/*.in anew
	@$(UV_COMPILE) deps/tools.in -o deps/tools.lock
	@$(UV_COMPILE) deps/cpu.in --override deps/cpu-overrides.txt -o deps/cpu.lock
	@cd deps && ../$(UV_COMPILE) dev.in --override cpu-overrides.txt -o dev.lock
	@cd deps && ../$(UV_COMPILE) bench.in -o bench.lock
	@cd deps && ../$(UV_COMPILE) clients.in -o clients.lock
	@$(VENV)/uv pip compile --python-version 3.11 --generate-hashes deps/gpu.in -o deps/gpu.lock
