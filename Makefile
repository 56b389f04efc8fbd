# Everything is set up in .venv; each target works on a fresh machine with Python 3.11 or 3.12.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install link
install: $(VENV)/.deps link

# The dependencies, installed again only when pyproject.toml changes.
$(VENV)/.deps: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip "setuptools>=77" wheel
	$(BIN)/python -m pip install -q --config-settings editable_mode=strict -e '.[test]'
	touch $@

# A strict editable install is a tree of links, so that type checkers and import-linter see one
# package; it is made again whenever files may have been added.
link: $(VENV)/.deps
	@$(BIN)/python -m pip install -q --no-deps --no-build-isolation \
	  --config-settings editable_mode=strict -e .
