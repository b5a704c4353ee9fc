# Quire: `make train` and `make test` need nothing but Python 3.11 or newer; the rest is set up once.

PYTHON ?= python3
BIN := .venv/bin
# Nothing is compiled ahead: most of what is installed is never imported by a given command.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt
# One thread for each of the test processes that share the machine; what they compile is kept, for the many
# they start and for the next time.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: help train test quick lint faults fuzz bench docs clean

help:
	@echo "make train   set up .venv, train the default recipe on built-in data, show the result"
	@echo "make test    everything: ruff, mypy, the whole test suite"
	@echo "make quick   the tests that are not marked slow"
	@echo "make lint    ruff and mypy alone"
	@echo "make faults  kill, full disks, flipped bits, hostile files: all that must not cost a run"
	@echo "make fuzz    ten minutes of fuzzing for every reader of files"
	@echo "make bench   side by side with the peers"
	@echo "make docs    the documentation as a site, in site/, the sheet's proofs run"
	@echo "make clean   remove .venv and the caches; runs/ stays"

train: .venv/.ready
	@$(BIN)/quire train mlp

test: lint
	$(PYTEST) -n 2 --dist worksteal -m "not long"

quick: .venv/.test
	$(PYTEST) -n 2 --dist worksteal -m "not slow and not long"

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

faults: .venv/.test
	$(BIN)/python -m tests.faults.kill --kills 500
	$(BIN)/python -m tests.faults.signals --count 50
	$(BIN)/python -m tests.faults.hostile --quiet
	$(BIN)/python -m tests.faults.flips --flips 1000
	$(BIN)/python -m tests.faults.full
	$(BIN)/python -m tests.faults.databases
	$(BIN)/python -m tests.faults.soak --minutes 30
	$(PYTEST) tests/faults/test_random.py --hypothesis-profile=faults
	$(PYTEST) -m long

fuzz: .venv/.test
	@$(BIN)/python -m pip install -qq --disable-pip-version-check atheris || echo "atheris cannot be installed here"
	$(BIN)/python -m tests.faults.fuzz --seconds 600

bench: .venv/.bench
	$(BIN)/quire bench --save benchmarks/results

docs: .venv/.test
	@$(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html; with search: $(BIN)/python -m http.server --directory site --bind 127.0.0.1"

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The stamp is written after success alone, so an interrupted set-up starts again.
.venv/.ready: pyproject.toml constraints.txt $(wildcard quire/kernels/host/*.cpp quire/kernels/host/*.h)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1)"; \
		  echo "  expected: Python 3.11 or newer"; \
		  echo "  fix: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "setting up .venv, once; this takes a minute or two"
	@$(PYTHON) -m venv .venv
	@$(PIP) -e ".[board,export]"
	@touch $@

.venv/.test: .venv/.ready
	@echo "adding to .venv what the tests and the documentation need, once"
	@$(PIP) -e ".[docs,test]"
	@touch $@

.venv/.bench: .venv/.ready
	@$(PIP) -e ".[bench]"
	@touch $@
