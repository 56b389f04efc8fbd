# make demo    capture a real training run and replay it: everything in under two minutes
# make test    all checks; what continuous integration runs
# Everything is set up in .venv. Works on a fresh machine with Python 3.11 or 3.12 and no GPU.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip --disable-pip-version-check -q
TREE := build/__editable__.alloclab-0.1.0-py3-none-any
# The real allocators' libraries, fetched once; see alloclab.validation.oracle_fetch.
export ALLOCLAB_ORACLE_DIR ?= $(CURDIR)/$(VENV)/oracles

.PHONY: help install link demo test lint unit oracles test-newest test-slow bench clean
help:
	@sed -n '1,3s/^# //p' Makefile

install: $(VENV)/.deps link

# The dependencies, installed again only when pyproject.toml changes.
$(VENV)/.deps: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) ..."
	@$(PIP) install --upgrade pip "setuptools>=77" wheel
	@$(PIP) install --config-settings editable_mode=strict -e '.[test]'
	@touch $@

# A strict editable install is a tree of links, so that type checkers and import-linter see one
# package; it is made again when files were added or removed.
HOUSE := alloclab policies simulator scenarios validation
LOCK := $(if $(shell command -v flock),flock $(VENV)/.lock)
link: $(VENV)/.deps
	@$(LOCK) sh -c 'find $(HOUSE) -type f ! -path "*/__pycache__/*" | sort > $(VENV)/.house.new; \
	  test -d $(TREE) && cmp -s $(VENV)/.house.new $(VENV)/.house || { \
	    $(PIP) install --no-deps --no-build-isolation --config-settings editable_mode=strict -e . \
	      > $(VENV)/link.log 2>&1 || { cat $(VENV)/link.log; exit 1; }; \
	    mv $(VENV)/.house.new $(VENV)/.house; }'

demo: install
	@$(BIN)/python examples/demo.py

test: lint oracles
	$(BIN)/pytest
	@$(MAKE) --no-print-directory test-newest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=$(TREE) $(BIN)/mypy -p alloclab
	MYPYPATH=$(TREE) $(BIN)/mypy tests examples benchmarks
	cd $(TREE) && ../../$(BIN)/lint-imports --config ../../pyproject.toml

# Without a network the oracle tests are skipped; they say how to get the libraries.
oracles: install
	-@$(BIN)/python -m alloclab.validation.oracle_fetch

# The JAX-facing tests once more with the other supported Python: 3.12 takes the newest jax.
OTHER := $(if $(findstring 3.12,$(shell $(BIN)/python -V 2>/dev/null)),3.11,3.12)
OTHER_PYTHON = $(firstword $(foreach each,python$(OTHER) $(wildcard $(HOME)/.pyenv/versions/$(OTHER)*/bin/python),\
	$(shell $(each) -c "import sys; print(sys.executable)" 2>/dev/null)))
test-newest: install
	@if [ -z "$(OTHER_PYTHON)" ]; then echo "no Python $(OTHER) found: not tested with it"; else \
	  set -e; other=$(VENV)/python$(OTHER); \
	  test -x $$other/bin/python || $(OTHER_PYTHON) -m venv $$other; \
	  cmp -s pyproject.toml $$other/.deps || { \
	    $$other/bin/python -m pip --disable-pip-version-check install -q '.[test]'; \
	    cp pyproject.toml $$other/.deps; }; \
	  $$other/bin/python -m pip --disable-pip-version-check install -q --no-deps \
	    --force-reinstall .; \
	  $$other/bin/pytest -m jax; fi

test-slow: install oracles
	$(BIN)/pytest -m slow

bench: install oracles
	@for each in $(filter-out traces,$(basename $(notdir $(wildcard benchmarks/*.py)))); do \
	  echo "== $$each"; $(BIN)/python -m benchmarks.$$each || exit 1; done

clean:
	rm -rf build dist *.egg-info demo-out
