# Every target sets itself up: .venv is made from the pins in constraints.txt on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXPERIMENTS := $(basename $(notdir $(wildcard experiments/*.toml)))

.PHONY: setup demo test check bench experiments clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "twinscope needs Python 3.11 or later: set PYTHON=python3.x")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing twinscope and its pinned dependencies into $(VENV) (about two minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[demo,test]'
	@touch $@

demo: setup
	@$(BIN)/twinscope demo

test: setup
	@$(BIN)/python -m pytest

check: setup
	@$(BIN)/ruff check src tests benchmarks docs
	@$(BIN)/ruff format --check src tests benchmarks
	@$(BIN)/pyright
	@$(BIN)/python -m pytest -q tests/test_floors.py

bench: setup
	@for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

# All named experiments, one after the other; one alone is `.venv/bin/twinscope VERB experiments/NAME.toml`.
experiments: setup
	@for name in $(EXPERIMENTS); do \
	    case $$name in cost*|frontier*) verb=cost ;; leak*) verb=leak ;; collapse*) verb=collapse ;; reuse*) verb=scan ;; *) verb=train ;; esac; \
	    $(BIN)/twinscope $$verb experiments/$$name.toml || exit 1; \
	done

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache
