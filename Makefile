# Two commands: `make train` and `make test`. Both set up .venv first, once.
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin

.PHONY: train test test-slow soak lint format setup clean

train: setup
	$(BIN)/python experiments/train.py $(ARGS)

test: lint
	$(BIN)/python -m pytest -n 2 -m "not slow" $(ARGS)

test-slow: setup
	$(BIN)/python -m pytest -n 2 -m slow $(ARGS)

soak: setup
	$(BIN)/python experiments/oac_equivalence.py --soak-minutes 10 $(ARGS)
	$(BIN)/python experiments/shadowsync_soak.py --minutes 10 $(ARGS)
	$(BIN)/python experiments/train_soak.py --minutes 10 $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: .venv/installed

.venv/installed: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxrec needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache
