# Every target prepares .venv first (scripts/setup.sh: nothing is installed outside it; a second run takes a second).
SHELL := /bin/bash
VENV := .venv/bin
# SEED=123 repeats the order of a run that printed "Using --randomly-seed=123".  JOBS=0 runs the tests one after another.
JOBS ?= 2
PYTEST := $(VENV)/python -m pytest -n $(JOBS) $(if $(SEED),--randomly-seed=$(SEED))

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev setup-bench demo dev down test test-full test-matrix check mutants native check-native bench bench-quick simulation locks docs images stand-ins

help: ## What there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## .venv with what runs
	@scripts/setup.sh run

setup-dev: ## .venv with what runs and what tests need
	@scripts/setup.sh dev

setup-bench: ## .venv with the peers too that benchmarks measure us beside (deps/bench.lock: obstore, s5cmd)
	@scripts/setup.sh bench

demo: setup ## Platform, real model, cold and warm answer, explained; leaves nothing behind
	@$(VENV)/python -m thaw.dev.demo

dev: setup ## The platform on this machine, in the foreground (Ctrl-C ends it)
	@$(VENV)/thaw dev up

down: setup ## End a platform that runs here, also after a crash of its supervisor
	@$(VENV)/thaw dev down

test: setup-dev ## Every test but the long ones, in random order (SEED=123 repeats it), by two processes (JOBS=2); TESTS=PATH runs some
	@$(PYTEST) -m "not full" $(TESTS)

test-full: setup-dev ## Every test
	@$(PYTEST)

test-matrix: setup-dev ## make test ten times: 2 and 4 cores, just booted and up for a year, alone and beside others (hours)
	@$(VENV)/python scripts/test_matrix.py --write

check: setup-dev ## Lint, types, layers, unit tests; says whether docs/simulation.md is out of date
	@$(VENV)/ruff check . && $(VENV)/ruff format --check .
	@$(VENV)/mypy
	@$(VENV)/lint-imports
	@$(PYTEST) -m "not vllm and not full" tests
	@$(VENV)/python bench/simulate.py --changed

mutants: setup-dev ## Plant small faults and count those that the tests notice (MUTANTS="ledger --most 0": all of one module)
	@$(VENV)/python scripts/mutants.py $(MUTANTS)

native: ## The native library (csrc/); without it the runtime reads segments in Python
	@$(MAKE) -s -C csrc all

check-native: ## Native tests: plain, then under the address, undefined-behaviour and thread sanitizers
	@set -e; for flavour in plain asan tsan; do echo "== $$flavour"; \
	    THAW_FUZZ_ITERATIONS=$(or $(FUZZ),50000) $(MAKE) -s -C csrc FLAVOUR=$$flavour check; done

bench: setup-bench ## The published benchmarks (hours), then docs/benchmarks.md from what they print; BENCH="warm relay" runs some
	@$(VENV)/python -m bench._publish $(BENCH)

bench-quick: setup-bench ## Every benchmark, under two minutes each; the page stays as it is unless PAGE=1
	@$(VENV)/python -m bench._publish --quick $(if $(PAGE),--record) $(BENCH)

simulation: setup-dev ## Simulate every point with five seeds, by JOBS processes; writes docs/simulation.md (TRACES=DIR: workload files too)
	@$(VENV)/python bench/simulate.py --all --seeds 5 --jobs $(JOBS) --docs docs $(if $(TRACES),--traces "$(TRACES)")

images: ## Build the container images (needs Docker); docs/docker.md
	@scripts/images.sh

stand-ins: setup ## Without a registry: the images that those stand on or run beside, from Debian's and PyPI's packages
	@$(VENV)/python scripts/stand_ins.py

docs: setup ## Write the generated pages again
	@$(VENV)/python -m thaw.dev.pages
	@$(VENV)/python -m tests.reference_pages

# The locks: what each is made from is beside it.  torch must be the CPU build, so its wheel has to be in reach.
UV_COMPILE := $(VENV)/uv pip compile --python-version 3.11 --generate-hashes $(if $(PIP_FIND_LINKS),--find-links "$(PIP_FIND_LINKS)")
locks: setup-dev ## Resolve deps/*.in again
	@$(UV_COMPILE) deps/tools.in -o deps/tools.lock
	@$(UV_COMPILE) deps/cpu.in --override deps/cpu-overrides.txt -o deps/cpu.lock
	@cd deps && ../$(UV_COMPILE) dev.in --override cpu-overrides.txt -o dev.lock
	@cd deps && ../$(UV_COMPILE) bench.in -o bench.lock
	@$(UV_COMPILE) deps/gpu.in -o deps/gpu.lock
