# Two commands: `make demo` and `make test`. Each sets up .venv by itself when needed.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

.PHONY: demo test gpu-test sweep lint bench clean

demo: $(INSTALLED)
	$(VENV)/bin/ndpp race --overwrite

test: lint
	$(RUN) -m pytest -n auto --dist worksteal -m "not slow and not gpu"

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

gpu-test: $(INSTALLED)
	$(RUN) -m pytest -m gpu

sweep: $(INSTALLED)
	$(RUN) -m pytest -n auto -m slow

bench: $(INSTALLED)
	$(RUN) -m benchmarks cpu-table

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build src/*.egg-info
