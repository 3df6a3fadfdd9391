# Longshore. `make demo` and `make test` need Python 3.11+, git and make, and set up the rest.
SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help setup demo demo-stop check test test-deep test-vllm gpu-check lint lock wheel docs

installed := .venv/installed

help:
	@echo "make setup      .venv with everything, at locked versions"
	@echo "make demo       start a stack in .demo, train models and adapters on it, by example and by reward"
	@echo "make demo-stop  stop that stack"
	@echo "make check      for the inner loop: linters, types, the pure maths, one run end to end (minutes)"
	@echo "make test       the whole test suite"
	@echo "make test-deep  every point of the matrices of which make test draws some; before a release"
	@echo "make test-vllm  a leased vLLM, in an environment of its own (.venv-vllm, 3.5 GB)"
	@echo "make gpu-check  on a CUDA device: its tests and benchmarks, JSON into benchmarks/results"
	@echo "make lint       ruff, mypy, import-linter"
	@echo "make lock       write requirements/constraints.txt from .venv, and requirements/locked, the same with hashes"
	@echo "make wheel      the wheel, in dist"
	@echo "make docs       the documentation site, in build/site"

$(installed): pyproject.toml requirements/constraints.txt $(wildcard requirements/locked/*.txt) $(addprefix requirements/,clients.txt uv.txt install.sh clients.sh pip_install.sh)
	@requirements/install.sh

setup: $(installed)

demo: setup
	@.venv/bin/python -m examples.demo

demo-stop: setup
	@.venv/bin/longshore dev --stop --root .demo

# Every test file can be imported; what starts no server; one run through a whole stack.
check: lint
	@found="$$(.venv/bin/python -m pytest --collect-only -qq tests 2>&1)" || { echo "$$found" | tail -40; exit 1; }
	@.venv/bin/python -m pytest -q -n 2 --dist loadfile \
		tests/test_structure.py tests/shared tests/activities/formats tests/activities/packing tests/activities/tokenizing \
		tests/activities/trajectories tests/workflows/test_imports.py tests/workflows/test_replay.py \
		tests/service/test_parsers.py tests/service/test_openai_translation.py tests/service/test_art_translation.py \
		tests/megatron_worker/head tests/megatron_worker/tensors tests/megatron_worker/training \
		tests/megatron_worker/test_losses.py tests/megatron_worker/test_policy_losses.py \
		tests/megatron_worker/test_head.py tests/megatron_worker/test_tree_attention.py \
		tests/end_to_end/test_sft.py::test_a_run_ends_with_a_published_adapter

test: setup
	@tests/run.sh

test-deep: setup
	@LONGSHORE_TEST_DEEP=1 tests/run.sh -m "deep or drawn"

test-vllm: setup
	@requirements/vllm.sh
	@.venv/bin/python -m pytest tests/vllm tests/megatron_worker/test_sampler_conformance.py

gpu-check: setup
	@.venv/bin/python -m benchmarks.gpu_check

lint: setup
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports

# A local build of torch (+cpu) is the same version: the lock names the public one. CUDA libraries are pinned by torch itself.
lock: setup
	@.venv/bin/python -m pip freeze --exclude-editable | grep -v -E '^(nvidia-|cuda-)' | sed 's/+cpu$$//' > requirements/constraints.txt
	@.venv/bin/python requirements/lock.py .venv/uv/bin/uv

wheel: setup
	@infra/check_wheel.sh --build-only

docs: setup
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet
