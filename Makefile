# make quickstart   a fresh clone to a first plan and a first training under one, without a GPU
# make test         five minutes: lint, types, and of each room the tests that are quick; in parts: make lint, make test-first
# make test-more    what else is not slow: ranks, frameworks, emulated GPU, recorded outcomes, documentation
# make test-all     the slow ones as well
# make golden       what recorded outcomes say: tests, plans, and runs compared with COMMIT (HEAD unless given)
# make pictures     the pictures of README and docs, made anew
# make finetune     the fine-tuning under DDP and under a plan: its table and picture, made anew
# make figures      README and pages of docs from their sources in docs/src, with the newest rows in benchmark/results
# make docs         the site, in out/site: pages, reference of names and commands; strict
# make wheel        the source archive and the wheel, in dist
# make wheel-check  the same wheel and what it needs, from the package index in a new environment: three commands run
# make release-check  what a release of the version in elixir/__init__.py still lacks
# make test-machines  replicas on two hosts that are made here, with a network of a given rate; needs root
# make test-newest  unit tests with the newest torch and transformers on the package index, in an environment of its own
# make test-oldest  unit tests and the rehearsed proof with the oldest torch that is supported, in an environment of its own
PYTHON ?= python3
VENV   ?= .venv
OUT    ?= out
BIN    := $(VENV)/bin
# What a process has compiled is kept for the next, whatever the environment says, so pip need not compile everything.
export PYTHONDONTWRITEBYTECODE :=
INSTALL := -m pip install -qq --no-compile

STEP    := --dtype bf16 --activation-checkpointing
TRACED  := profile opt-175b --batch 8 --seq 2048 $(STEP) --brief
PLANNED := plan opt-13b --hardware h200 --world-size 1 --host-memory 128GiB --batch 8 --seq 1024 $(STEP) --brief
PROFILE := $(TRACED) --plot $(OUT)/memory.png
PLAN    := $(PLANNED) --out $(OUT)/plan.json --plot $(OUT)/plan.png
TRAIN   := example/train.py --model opt-125m --batch 4 --seq 64 --activation-checkpointing --device-memory 128MiB --steps 11

.DEFAULT_GOAL := help
.PHONY: help quickstart pictures finetune figures test test-on-cuda test-all test-machines test-oldest test-newest \
        lint docs wheel wheel-check release-check clean golden test-first test-more test-later costs

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

pictures: $(VENV)/.installed
	@mkdir -p docs/images
	$(BIN)/elixir $(TRACED) --plot docs/images/memory.png
	$(BIN)/elixir $(PLANNED) --plot docs/images/plan.png
	$(BIN)/python -m benchmark.h200_bars

finetune: $(VENV)/.installed
	$(BIN)/python benchmark/finetune.py

figures: $(VENV)/.installed
	$(BIN)/python -m benchmark.quoted --write

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict elixir

docs: $(VENV)/.installed-docs
	$(BIN)/python .ci/site_pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict -q
	@echo out/site/index.html

wheel: $(VENV)/.installed-release
	rm -rf build dist
	$(BIN)/python -m build --no-isolation --outdir dist . > /dev/null
	@ls dist/*

# Outside of the repository, where nothing but what was installed can be imported.
wheel-check: wheel
	$(BIN)/python -m tests.common.installed --from-index

release-check: wheel
	$(BIN)/python .ci/release_check.py

# What takes the paths of CUDA: on a GPU, or on an emulated device.
ON_CUDA := tests/gpu
# ... and what takes longer.
MORE_ON_CUDA := $(patsubst %,tests/unit/wrapper/step/test_%.py,\
                    early_updates early_updates_memory staging optimizer precision moments \
                    adam_over_shards states_on_disk disk_in_use) \
                $(patsubst %,tests/unit/wrapper/test_%.py,wrap gradients rehome) \
                $(patsubst %,tests/unit/wrapper/assemble/test_%.py,building) \
                $(patsubst %,tests/unit/wrapper/weights_io/test_%.py,state_dict) \
                $(patsubst %,tests/unit/access/test_%.py,uses_of_weights views asked_gradients) \
                $(patsubst %,tests/unit/training/test_%.py,training user_errors user_mistakes) \
                $(patsubst %,tests/unit/kernels/test_%.py,hybrid_adam fused_kernels cross_entropy kernels_adam) \
                $(patsubst %,tests/unit/checkpoint/test_%.py,resume folder killed_saves snapshot optimizer_state_dict)

# Test files that run at a time, each on one thread: as many as there are cores, at most 8, or what TEST_PROCESSES says.
TEST_PROCESSES ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2); [ $$n -le 8 ] || n=8; echo $$n)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile
# Runs pytest once for each list of arguments, the later ones also after an earlier one has failed.
all_of = failed=0; for arguments in $(1); do \
           echo "pytest $$arguments"; eval "$(PYTEST) $$arguments" || failed=1; \
         done; exit $$failed

# The stages are marked by tests/common/stages.py. Types take what the tests leave of the cores.
test: $(VENV)/.installed-test
	@$(MAKE) --no-print-directory --keep-going -j2 lint test-first

test-first: $(VENV)/.installed-test
	$(PYTEST) -m 'not slow and not more'

# The emulated device takes what the other tests leave of the cores, which wait for files and ranks.
test-more: $(VENV)/.installed-test
	@$(MAKE) --no-print-directory --keep-going -j2 test-later test-on-cuda

test-later: $(VENV)/.installed-test
	$(PYTEST) -m 'more and not slow'

# tests/costs.json anew: what each test costs and finds.
costs: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m 'not slow' --write-costs tests/unit

COMMIT ?= HEAD

golden: $(VENV)/.installed-test
	$(PYTEST) -m 'not slow' $$(git ls-files 'tests/**/test_recorded_*.py')
	$(BIN)/python tools/golden_plans.py
	$(BIN)/python tools/golden_seconds.py
	$(BIN)/python tools/golden_runs.py $(COMMIT)

test-on-cuda: $(VENV)/.installed-test
	@mkdir -p $(OUT)
	@$(PYTEST) -n 1 -m 'not slow' --cuda $(ON_CUDA) > $(OUT)/test_on_cuda.txt 2>&1; failed=$$?; \
	  printf '\npytest --cuda $(ON_CUDA)\n'; cat $(OUT)/test_on_cuda.txt; exit $$failed

test-all: lint
	@$(call all_of,"" "--cuda $(ON_CUDA) tests/unit/training/test_parity.py" "-m 'not slow' --cuda $(MORE_ON_CUDA)")

# Two hosts are namespaces of this one, gone with the process that made them.
test-machines: $(VENV)/.installed-test
	@$(BIN)/python -m tests.common.two_hosts
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/machines

# The oldest versions that pyproject.toml allows, and the pair that a machine with a GPU is likely to have.
OLDEST := .venv-oldest

test-oldest: $(OLDEST)/.installed
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n $(TEST_PROCESSES) --dist loadfile -m 'not slow' tests/unit
	$(OLDEST)/bin/python benchmark/gpu_proof.py --rehearse --minutes 30

$(OLDEST)/.installed: requirements-oldest.txt pyproject.toml setup.py
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python $(INSTALL) 'setuptools>=77' wheel -r requirements-oldest.txt
	$(OLDEST)/bin/python $(INSTALL) --no-build-isolation --no-deps -e .
	@touch $@

# Whatever is newest on the day: nothing is kept from the run before but what pip finds unchanged.
NEWEST := .venv-newest

test-newest:
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python $(INSTALL) --upgrade 'setuptools>=77' wheel torch transformers
	$(NEWEST)/bin/python $(INSTALL) --no-build-isolation -e '.[test]'
	@$(NEWEST)/bin/python -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)'
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest -n $(TEST_PROCESSES) --dist loadfile -m 'not slow' tests/unit

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
	$(BIN)/python $(INSTALL) 'setuptools>=77' wheel -r requirements.txt
	@touch $@

# The distribution was called "elixir" before, which is another project's name on the package index.
$(VENV)/.installed: $(VENV)/.requirements pyproject.toml setup.py
	@$(BIN)/python -m pip uninstall -qq -y elixir
	$(BIN)/python $(INSTALL) --no-build-isolation -e '.[hf]'
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python $(INSTALL) --no-build-isolation -e '.[test]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python $(INSTALL) --no-build-isolation -e '.[docs]'
	@touch $@

$(VENV)/.installed-release: $(VENV)/.installed
	$(BIN)/python $(INSTALL) --no-build-isolation -e '.[release]'
	@touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(OUT) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
