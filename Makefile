# make demo    train a small Qwen with sparse ring attention on two processes, no GPU needed
# make test    every test that runs without a GPU
# make test-gpu, make bench    on a machine with an NVIDIA GPU, with its own Python (PYTHON=python3)
# make docs    the documentation as a site in site/; a broken link is an error
# make lint, make format

PYTHON ?= $(shell sh .ci/find_python)
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: setup demo test test-gpu bench docs lint format clean

setup: $(VENV)/installed

$(VENV)/installed: setup.py constraints.txt
	$(if $(PYTHON),,$(error no Python >= 3.12))
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,tools,docs]'
	touch $@

demo: setup
	PYTHONWARNINGS=ignore::UserWarning PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bash examples/demo_cpu.sh

# The kernels' tests run under Triton's interpreter, which has to be chosen before Triton is imported. Tests of a single
# process share the cores; those that start processes of their own have them to themselves.
test: setup
	TRITON_INTERPRET=1 $(RUN) -m pytest -q -n 2 tests/kernels
	$(RUN) -m pytest -q -n 2 tests/tools tests/test_*.py
	$(RUN) -m pytest -q tests/model tests/ring tests/reliability tests/examples

test-gpu:
	$(or $(PYTHON),python3) -m pytest -q -m gpu tests

bench:
	$(or $(PYTHON),python3) -m tools.bench.bench_kernels

docs: setup
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: setup
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean:
	rm -rf $(VENV) demo build dist site *.egg-info .pytest_cache .ruff_cache
