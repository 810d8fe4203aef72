# Needs Python >= 3.11 with pip, and make. Everything else goes into $(VENV).
#
# PyTorch is used by the demo and the tests, on the CPU only. On Linux, PyPI's torch is
# the CUDA build, of several GB: to get the CPU build, set TORCH_INDEX to the package
# index for CPU that PyTorch's own installation page names.
#   make test TORCH_INDEX=<url>        torch from that index, before all others
#   make test TORCH=torch==2.12.0      another version
#   make test TORCH= EXTRAS=test PYTEST="-m 'not torch and not slow and not long'"    no torch at all
#   make test EXTRAS=test,torch    without XLA's compiler for GPUs (600 MB), and its tests
#
# The versions are those of tests/constraints.txt, so that a release of another project
# fails nothing here until somebody takes it up; it says nothing to who installs fsdp-jax.
#   make test CONSTRAINTS=         the newest of everything

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= test,torch,plan,docs
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
CONSTRAINTS ?= tests/constraints.txt
PYTEST ?=
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

# Compiled programs outlive a run of the tests; empty: they are compiled anew each time.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.jax_cache

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help demo test test-all test-distributed test-foreign test-foreign-installed test-long durations constraints notebooks figures lint docs clean
.DEFAULT_GOAL := help

help:  ## Show this list.
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(INSTALLED)  ## Shard a small model, train it, and carry it to PyTorch and back.
	$(BIN)/fsdp-jax demo

# Tests of a file share its fixtures, in one worker; tests/conftest.py orders the files.
# A worker that dies is not replaced: with loadfile, pytest-xdist 3.8 would wait for ever.
DIST := -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0

test: $(INSTALLED)  ## Run the light tests, and a cheap case of each other test: 900 CPU-seconds at most. JOBS=n workers; PYTEST=... adds arguments.
	$(BIN)/pytest $(DIST) $(PYTEST)

test-all: $(INSTALLED)  ## Run all tests but the long ones, and report what each took to build/junit.xml.
	$(BIN)/pytest $(DIST) -m "not long" --junitxml=build/junit.xml $(PYTEST)

# A worker for each job would starve them: a job of four processes is four by itself.
test-distributed: $(INSTALLED)  ## Run the tests that start jobs of several processes; `make test-all` runs them too.
	$(BIN)/pytest -m distributed $(PYTEST)

# In an environment of its own: what others need may not fit what the tests need.
test-foreign:  ## Train models of other packages, in an environment of their own with these.
	$(MAKE) test-foreign-installed VENV=.venv-foreign EXTRAS=test,foreign,plan TORCH= CONSTRAINTS=

test-foreign-installed: $(INSTALLED)
	$(BIN)/pytest -m foreign tests/foreign $(PYTEST)

test-long: $(INSTALLED)  ## Run the tests that take minutes; their outcome goes to benchmarks/results.
	$(BIN)/python benchmarks/long_tests.py $(PYTEST)

durations: $(INSTALLED)  ## Run all tests, and record what each takes: that decides who runs it.
	$(BIN)/pytest $(DIST) -m "not long or grid" --junitxml=build/junit.xml $(PYTEST)
	$(BIN)/python tests/record_durations.py build/junit.xml

constraints: $(INSTALLED)  ## Keep the versions that are installed as those that the tests run with.
	$(BIN)/pip freeze --exclude-editable | grep -v '^torch==' >tests/constraints.txt

notebooks: $(INSTALLED)  ## Run the notebooks anew, and keep what they show.
	$(BIN)/python notebooks/run_notebooks.py

figures: $(INSTALLED)  ## Measure anew what is published and not of these sources; ONLY="import torture" names some.
	$(BIN)/python benchmarks/figures.py $(if $(ONLY),--only $(ONLY))

lint: $(INSTALLED)  ## Check style, format and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# PYTHONPATH: the pages show what the sources here say, installed or not.
docs: $(INSTALLED)  ## Build the documentation into build/docs; a broken link is an error.
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs build -f docs/mkdocs.yml

clean:  ## Remove the environments and the caches.
	rm -rf .venv .venv312 .venv-foreign build dist .jax_cache .pytest_cache .ruff_cache .hypothesis
	find fsdp_jax bridge tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
	  "Python >= 3.11 is needed, and $(PYTHON) is %d.%d: name another, as in" \
	  " `make PYTHON=python3.12`." % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
ifneq ($(strip $(TORCH)),)
	$(BIN)/python -m pip install --no-deps "$(TORCH)" $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
endif
	$(BIN)/python -m pip install -e ".[$(EXTRAS)]" $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
	@touch $@
