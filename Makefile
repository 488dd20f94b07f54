# `make train`, `make demo` and `make test`. Each sets up its environment first, once for each version of Python.
# Ray, which rows at servers need, is in it only behind `make cluster`, which `make test-slow` and `make soak` begin with.
PYTHON ?= python3
ARGS ?=
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV := .venv-$(VERSION)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: train demo test test-slow test-cluster soak lint format docs setup cluster clean

train: setup
	$(BIN)/python experiments/train.py $(ARGS)

demo: setup
	$(BIN)/python experiments/demo.py $(ARGS)

test: lint
	$(BIN)/python -m pytest -n 2 -m "not slow" $(ARGS)

test-slow: cluster
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m slow $(ARGS)

test-cluster: cluster
	$(BIN)/python -m pytest tests/test_cluster.py tests/test_two_hosts.py $(ARGS)

soak: cluster
	$(BIN)/python experiments/oac_equivalence.py --soak-minutes 10 $(ARGS)
	$(BIN)/python experiments/shadowsync_soak.py --minutes 10 $(ARGS)
	$(BIN)/python experiments/train_soak.py --minutes 10 $(ARGS)
	$(BIN)/python experiments/cluster_soak.py --kills 50 $(ARGS)
	$(BIN)/python experiments/cluster_trainers_soak.py --minutes 10 $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site, in build/docs. Its environment is its own: Sphinx is in no other.
docs: $(VENV)-docs/installed
	$(VENV)-docs/bin/python -m sphinx -W --keep-going -q -b html docs build/docs $(ARGS)

$(VENV)-docs/installed: docs/requirements.txt requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install -qq -r requirements.txt -r docs/requirements.txt
	$(VENV)-docs/bin/python -m pip install -qq --no-deps --editable .
	@touch $@

setup: $(VENV)/installed

$(VENV)/installed: requirements.txt pyproject.toml
	@[ -n "$(VERSION)" ] || { echo 'make found no Python that runs as "$(PYTHON)": make PYTHON=python3.12 ...' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "jaxrec needs Python 3.11 or newer, and $(PYTHON) is $(VERSION): make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -qq -r requirements.txt
	$(PIP) install -qq --no-deps --editable .
	$(PIP) check
	@touch $@

cluster: $(VENV)/cluster

$(VENV)/cluster: $(VENV)/installed
	$(PIP) install -qq -c requirements.txt --editable '.[cluster]'
	$(PIP) check
	@touch $@

clean:
	rm -rf .venv .venv-* build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
