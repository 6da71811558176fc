# make quickstart   a fresh clone to a first plan and a first training under one, without a GPU
# make test         lint, types and all CPU tests that are quick
# make test-all     the slow ones as well
PYTHON ?= python3
VENV   ?= .venv
OUT    ?= out
BIN    := $(VENV)/bin

STEP    := --dtype bf16 --checkpoint
PROFILE := profile opt-175b --batch 8 --seq 2048 $(STEP) --brief --plot $(OUT)/memory.png
PLAN    := plan opt-13b --hardware h200 --world-size 1 --host-memory 128GiB --batch 8 --seq 1024 $(STEP) \
           --brief --out $(OUT)/plan.json --plot $(OUT)/plan.png
TRAIN   := example/train.py --model opt-125m --batch 4 --seq 64 --checkpoint --device-memory 128MiB --steps 11

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-all lint clean

help:
	@sed -n '/^# make/s/^# //p' Makefile

quickstart: $(VENV)/.installed
	@mkdir -p $(OUT)
	@echo '$$ elixir $(PROFILE)'
	@$(BIN)/elixir $(PROFILE)
	@echo
	@echo '$$ elixir $(PLAN)'
	@$(BIN)/elixir $(PLAN)
	@echo
	@echo '$$ python $(TRAIN)'
	@$(BIN)/python $(TRAIN)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict elixir

# What takes the paths of CUDA: on a GPU, or on a device that is pretended.
ON_CUDA := tests/gpu
# ... and what takes longer.
RUNTIME := state optimizer rules views asked_gradients training gradients precision moments fused
MORE_ON_CUDA := $(RUNTIME:%=tests/unit/test_runtime_%.py) $(patsubst %,tests/unit/test_%.py,backward_steps_refused staging \
                backward_steps building rehome wrap user_errors user_mistakes hybrid_adam fused_kernels cross_entropy \
                kernels_adam)

test: lint
	$(BIN)/python -m pytest -m 'not slow'
	$(BIN)/python -m pytest -m 'not slow' --cuda $(ON_CUDA)

test-all: lint
	$(BIN)/python -m pytest
	$(BIN)/python -m pytest --cuda $(ON_CUDA) tests/unit/test_runtime_parity.py
	$(BIN)/python -m pytest -m 'not slow' --cuda $(MORE_ON_CUDA)

# The stamps let a second run start at once; they are renewed when the requirements change.
# requirements.txt goes first: it pins torch to a build that pip finds without the CUDA libraries, where one is offered.
# setuptools is named because building without isolation (which would download it again) needs it, and Python >= 3.12
# no longer puts it into a new environment.
$(VENV)/.requirements: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  found=$$($(PYTHON) --version 2>/dev/null) || found='missing or broken'; \
	  echo "Elixir needs Python 3.10 or newer, but '$(PYTHON)' is $$found. Try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; \
	  exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo 'cannot create $(VENV): is the venv module of $(PYTHON) installed?' >&2; exit 1; }
	$(BIN)/python -m pip install -qq 'setuptools>=68' wheel -r requirements.txt
	@touch $@

$(VENV)/.installed: $(VENV)/.requirements pyproject.toml setup.py
	$(BIN)/python -m pip install -qq --no-build-isolation -e '.[hf]'
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install -qq --no-build-isolation -e '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) $(OUT) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
