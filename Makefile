# `make train`, `make demo` and `make test`. Each sets up its environment first, once for each version of Python.
# Ray and Jupyter are in it only after `make cluster notebooks`, which `make test-all` begins with.
# The Python is the newest of these versions on the path or in pyenv, as 3.12 and 3.13 have a faster JAX than 3.11. Each
# candidate is asked for its version, as a shim of pyenv may be on the path and run nothing.
define FIND_PYTHON
for version in 3.13 3.12 3.11; do \
  for candidate in "python$$version" python3 "$${PYENV_ROOT:-$$HOME/.pyenv}/versions/$$version".*/bin/python; do \
    if "$$candidate" -c "import sys, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '$$version')" >/dev/null 2>&1; then \
      echo "$$candidate"; exit; \
    fi; \
  done; \
done
endef
ifndef PYTHON
PYTHON := $(shell $(FIND_PYTHON))
endif
# The other stack of requirements.txt, for `make test-all`.
OLDER ?= python3.11
ARGS ?=
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
$(info Python: $(or $(VERSION:%=$(PYTHON) %),none that runs as '$(PYTHON)'))
VENV := .venv-$(VERSION)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: train demo test test-all two-stacks laws lint ruff types soak format docs setup cluster notebooks colabs clean

train: setup
	$(BIN)/python experiments/train.py $(ARGS)

demo: setup
	$(BIN)/python experiments/demo.py $(ARGS)

# The gate: what must be green before a commit, right whenever threads happen to run. `make -k test` goes on after a failure.
GATE := gate or not (slow or process or realtime or random_instant or more or quarantine)
test: ruff types laws

laws: setup
	$(BIN)/python -m pytest -n 2 -q --durations=15 -m "$(GATE)" $(ARGS)

# Everything, by hand on a quiet machine: what the gate leaves out, with random draws, and both stacks.
test-all: two-stacks ruff types cluster notebooks
	HYPOTHESIS_PROFILE=random $(BIN)/python -m pytest -n 2 --dist loadgroup --durations=25 $(ARGS)
	$(MAKE) types laws PYTHON=$(OLDER)

two-stacks:
	@[ "$(VERSION)" != 3.11 ] || \
	  { echo 'make test-all tests Python 3.11 after a newer one: make test-all PYTHON=python3.12' >&2; exit 1; }

soak: cluster
	$(BIN)/python experiments/oac_equivalence.py --soak-minutes 10 $(ARGS)
	$(BIN)/python tests/soak/shadowsync_soak.py --minutes 10 $(ARGS)
	$(BIN)/python tests/soak/train_soak.py --minutes 10 $(ARGS)
	$(BIN)/python tests/soak/cluster_soak.py --kills 50 $(ARGS)
	$(BIN)/python tests/soak/cluster_trainers_soak.py --minutes 10 $(ARGS)

lint: ruff types

ruff: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site, in build/docs. Its environment is its own: Sphinx is in no other.
docs: $(VENV)-docs/installed
	$(VENV)-docs/bin/python -m sphinx -W --keep-going -q -b html docs build/docs $(ARGS)

$(VENV)-docs/installed: docs/requirements.txt requirements.txt requirements-notebooks.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install -qq -r requirements.txt -r requirements-notebooks.txt -r docs/requirements.txt
	$(VENV)-docs/bin/python -m pip install -qq --no-deps --editable .
	@touch $@

setup: $(VENV)/installed

$(VENV)/installed: requirements.txt pyproject.toml
	@[ -n "$(VERSION)" ] || { echo 'make found no Python 3.11 to 3.13 on the path or in pyenv, or none that runs as \
	  "$(PYTHON)": make PYTHON=python3.12 ...' >&2; exit 1; }
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

notebooks: $(VENV)/notebooks

$(VENV)/notebooks: $(VENV)/installed requirements-notebooks.txt
	$(PIP) install -qq -r requirements-notebooks.txt
	$(PIP) check
	@touch $@

# Runs the notebooks whose outputs are not of today's code, and stores the new ones; ARGS=colabs/1_oac.ipynb runs that.
colabs: notebooks
	$(BIN)/python tests/test_colabs.py $(ARGS)

clean:
	rm -rf .venv .venv-* build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
