# Two commands do everything on a machine that has Python 3.11 or newer and make: `make verify` and `make test`.
# The first of either creates .venv and installs into it the versions of constraints/cpu.txt.

PYTHON ?= python3
PIP_FLAGS ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.f8emu-installed
# What tests/dialects and benchmarks.proofs.mma_sim compare with. They lie apart, where only these look: transformers,
# peft and accelerate change what they do where they can import torchao. What they need of others is in .venv.
STACKS := $(VENV)/stacks
# The newest torch, in an environment of its own.
NEWEST := $(VENV)/newest
# Touched where no compiler is found too: f8emu then works without its engine.
ENGINE := $(VENV)/.f8emu-engine

# Some of every room, all of what is cheap. Patterns are the shell's.
QUICK := tests/spec tests/architecture/test_contracts.py tests/architecture/test_public_surface.py \
	$(addprefix tests/oracle/test_,[as]c*.py casts.py exact_vs_numpy.py golden.py numpy_linear.py) \
	$(addprefix tests/conformance/test_,arrays.py cases.py doctor.py golden.py verify.py) \
	$(addprefix tests/torch_path/test_,values.py gemms.py) \
	$(addprefix tests/test_examples.py::test_,gemm_bits train_tiny own_kernel)

.DEFAULT_GOAL := help
.PHONY: help verify test newest quick check lint types contracts docs format exhaustive engine install clean

help:
	@echo 'make verify      prove that numpy, JAX and torch give the recorded bits of a Hopper GPU (ARGS=... is passed on)'
	@echo 'make test        the tests (ARGS=... is passed to pytest)'
	@echo 'make newest      the tests of torch and of the engine, with the newest torch instead of the pinned one'
	@echo 'make quick       a part of the tests that touches every room; under a minute on two cores'
	@echo 'make check       ruff, pyright, import-linter (lint, types, contracts)'
	@echo 'make docs        the documentation, from docs/ and the docstrings, into site/'
	@echo 'make format      let ruff format the code and sort the imports'
	@echo 'make exhaustive  all 2^32 float32 inputs of the casts; minutes'
	@echo 'make engine      compile the engine of emulated GEMMs again, if its sources changed'
	@echo 'make install     only create .venv'
	@echo 'make clean       remove .venv and every cache'
	@echo 'PYTHON=python3.12 chooses the interpreter; PIP_FLAGS=... is passed to pip install'

verify: $(ENGINE)
	$(BIN)/f8emu verify $(ARGS)

test: $(ENGINE)
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal $(ARGS)

newest: $(ENGINE) $(NEWEST)/.f8emu-installed
	PYTHONPATH=$(CURDIR):$(CURDIR)/reference $(NEWEST)/bin/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal tests/torch_path tests/native $(ARGS)

quick: $(ENGINE)
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal $(QUICK) $(ARGS)

check: lint types contracts

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright --pythonpath $(BIN)/python

contracts: $(STAMP)
	$(BIN)/lint-imports --no-logo

# A warning of mkdocs is an error; the variable silences an advertisement of its theme.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=.:reference $(BIN)/mkdocs build --strict --quiet

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

exhaustive: $(ENGINE)
	$(BIN)/python -m benchmarks.proofs.exhaustive $(ARGS)

engine: $(ENGINE)

install: $(ENGINE)

$(STAMP): pyproject.toml constraints/cpu.txt constraints/stacks.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "f8emu needs Python 3.11 or newer; $(PYTHON) is %s. Choose another: make PYTHON=python3.12" % sys.version.split()[0])'
	@echo 'Installing into $(VENV); once, a minute or two'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints/cpu.txt -e '.[all]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --no-deps --upgrade --target $(STACKS) -r constraints/stacks.txt
	@touch $@

# pip takes the variable instead of the constraints of its configuration, which on some machines cap torch.
$(NEWEST)/.f8emu-installed: constraints/newest.txt
	@echo 'Installing the newest torch into $(NEWEST); once, a few minutes'
	$(PYTHON) -m venv $(NEWEST)
	PIP_CONSTRAINT=constraints/newest.txt $(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -r constraints/newest.txt
	ln -sfn ../stacks $(NEWEST)/stacks
	@touch $@

$(ENGINE): $(STAMP) setup.py $(wildcard f8emu/native/src/*.[ch])
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info f8emu/native/_engine*.so .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find f8emu reference tests benchmarks examples docs -name __pycache__ -type d -prune -exec rm -rf {} +
