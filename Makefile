# make demo    post-train the embedded model (about two minutes after the installation)
# make test    lint, types, tests
# make prove   every long proof and benchmark; writes experiments/results/
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
# On all cores, where pip takes one; some packages carry files for other versions of Python.
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true

.PHONY: demo test prove clean

demo: $(VENV)/.demo
	$(BIN)/digen train experiments/digits.yaml --run.name demo-$$(date +%Y%m%d-%H%M%S)

test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

prove: $(VENV)/.dev
	$(BIN)/python experiments/prove.py

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "digen needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade 'pip>=25.1'

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) install --no-compile -e '.[diffusion,demo]' -c constraints.txt
	$(COMPILE)
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) install --no-compile -e '.[diffusion,demo,data,rewards,ray]' --group dev -c constraints.txt
	$(COMPILE)
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
