# make demo   generate texts with the embedded models
# make test   run the tests
# make check  check style and types, and run the tests that find most faults, in under a minute
# make lint   check style and types
# make docs   build the pages of docs/ as a site, into build/docs; a broken link fails
# make wheels build the sources and the wheels of all platforms, into dist/, and check them
# make clean  remove whatever the others made
# make help   show these lines

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
INSTALL := $(PY) -m pip install --disable-pip-version-check -c constraints.txt

.PHONY: demo test check quick lint docs wheels clean help
.DELETE_ON_ERROR:
# Else each of the hundreds of processes that the tests start compiles detgen's sources again.
unexport PYTHONDONTWRITEBYTECODE

demo: $(VENV)/installed
	$(PY) -m detgen run sample_prompts/code.jsonl --output demo-out --overwrite
	@$(PY) tools/show_outputs.py demo-out sample_prompts/code.jsonl

test: $(VENV)/installed-dev
	$(PY) -m pytest -n auto --dist loadfile --no-loadscope-reorder

# What every change can break: the bits of all kinds of models, invariance, what is read, kept, written and judged.
QUICK := tests/test_frozen.py tests/test_layers.py tests/test_docs.py tests/test_params.py tests/program tests/outputs \
    tests/drafters tests/cache tests/prompts \
    $(addprefix --ignore tests/,drafters/test_auto.py drafters/test_self.py outputs/test_batch_results.py \
    prompts/test_files.py prompts/test_longest.py) \
    tests/verify/replay/test_audit.py tests/report/test_log.py tests/kernels/c/test_steps.py \
    tests/kernels/test_logprobs.py tests/runner/test_chains.py tests/run/test_lifecycle.py \
    $(addprefix tests/engine/test_,$(addsuffix .py,invariance decoding stopping)) \
    --deselect tests/test_frozen.py::test_so_are_those_of_similar_families

check: $(VENV)/installed-dev
	@$(MAKE) --no-print-directory --jobs=2 --output-sync lint quick

quick: $(VENV)/installed-dev
	$(PY) -m pytest -q -n logical --dist loadfile --no-loadscope-reorder $(QUICK)

lint: $(VENV)/installed-dev
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

docs: $(VENV)/installed-docs
	$(PY) -m sphinx -W --keep-going -n -q -b html docs build/docs
	@echo "build/docs/index.html"

wheels: $(VENV)/installed-dev
	$(PY) tools/wheels.py

help:
	@sed -n 's/^# make /make /p' Makefile

clean:
	rm -rf $(VENV) demo-out build dist detgen.egg-info detgen/kernels/c/*.so detgen/kernels/c/layout.h .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps make a second run start at once. detgen itself is installed in editable mode: an edit needs no new install.
$(VENV)/installed: pyproject.toml setup.py constraints.txt detgen/program/steps.py detgen/kernels/c/layout.py \
    $(wildcard detgen/kernels/*.h $(filter-out %/layout.h,$(wildcard detgen/kernels/c/*.[ch]))) | $(PY)
	$(INSTALL) --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(INSTALL) --editable ".[dev]"
	@touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(INSTALL) --editable ".[docs]"
	@touch $@

$(PY):
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "detgen needs Python 3.11 or later; name one: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
