# make demo      the model in the package at work, then two small ones trained side by side (under three minutes on two cores)
# make test      the core suite (a few minutes on two cores)
# make test-all  that, and what is slow or heavy: what a change must pass
# make check     format, lint, types, import order
# make format    rewrite the code in the project's format
# make wheel     the wheel and the source distribution of a release, in dist/
# Each sets up .venv by itself; PYTHON=python3.12 make test chooses the interpreter.

PYTHON ?= python3
BIN := .venv/bin
CORE := .venv/.core
READY := .venv/.ready
OLDEST := .venv/oldest-hf
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Else every run would rewrite and compile all tests again.
unexport PYTHONDONTWRITEBYTECODE
# One worker a core; PYTEST_ARGS="-k loss" narrows a run down.
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal $(PYTEST_ARGS)

.PHONY: demo test test-all check format wheel clean

demo: $(CORE)
	@$(BIN)/thoughtbubbles demo

test: $(READY)
	$(PYTEST) -m "not slow"

test-all: $(READY) $(OLDEST)/.ready
	$(PYTEST)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_imports.py

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

wheel: $(READY)
	rm -rf dist
	$(BIN)/python -m hatchling build --directory dist

# torch first and by itself: under the constraint pip takes one build of it, and nothing installed later replaces that.
$(CORE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Thoughtbubbles needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Setting up .venv (a minute or two, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) torch numpy
	@$(PIP) --editable '.[analysis,serve]'
	@touch $@

$(READY): $(CORE)
	@$(PIP) --editable '.[dev]'
	@touch $@

# The oldest transformers that we support and what differs for it, beside the newest: tests put it in front of the path.
$(OLDEST)/.ready: $(READY) Makefile
	@rm -rf $(OLDEST)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(OLDEST) \
		transformers==5.17.0 huggingface_hub==1.33.0 httpx==0.28.1 httpcore==1.0.9
	@touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist
