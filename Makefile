# Everything a checkout needs: each target installs into .venv what it uses, once.
#   make demo      two trainers share a daemon; losses and gradients compared
#   make test      every test that needs no GPU and no more than some seconds
#   make test-slow the others that need no GPU
#   make lint      ruff and mypy --strict
#   make docs      the documents' site, into build/site; a broken link fails it
#   make test-gpu  the tests that need a CUDA device: minutes, the slowest named at the end
#   make man       the manual page, from the parser
#   make bench     the way through the daemon against two plain memcpys, and the codec
#   make bench-codec-gpu   the codec on a GPU, beside every peer that is here (PEERS="--dietgpu LIB
#                  --splitzip FILE"; tests/bench/codec_gpu_peers.py says how to get them)
# PYTHON chooses the interpreter (3.11 to 3.13), VENV where packages go, WORKERS how many tests run
# at once. INSTALLED=1 installs nothing and takes PYTHON with what it has, as on a machine without
# a network; then tests run one by one.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 3
# Bytecode is compiled as modules are first imported: most of what is installed never is.
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
RUN := $(if $(INSTALLED),$(PYTHON),$(VENV)/bin/python) -m
ready = $(if $(INSTALLED),,$(VENV)/.installed$(1))
C_SOURCES := $(shell find kernels/storm_kernels -name "*.[ch]" -o -name CMakeLists.txt)

# Without its files each process would compile all that it imports again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test test-slow lint docs test-gpu bench bench-codec-gpu man clean

demo: $(call ready,)
	$(RUN) stormd.cli demo

test: $(call ready,-dev)
	$(RUN) pytest -m "not gpu and not slow" $(if $(INSTALLED),,-n $(WORKERS) --dist worksteal)

test-slow: $(call ready,-dev)
	$(RUN) pytest -m "(slow or hypothesis) and not gpu" --hypothesis-profile=thorough $(if $(INSTALLED),,-n $(WORKERS) --dist worksteal)

lint: $(call ready,-dev)
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy --strict

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(call ready,-docs)
	$(RUN) mkdocs build --strict

test-gpu: $(call ready,-cuda)
	$(RUN) pytest -m "gpu and not slow" --timeout=180 --durations=10

bench: $(call ready,)
	$(RUN) stormd.cli bench link
	$(RUN) stormd.cli bench codec

bench-codec-gpu: $(call ready,-cuda)
	$(firstword $(RUN)) tests/bench/codec_gpu.py $(PEERS)

man: $(call ready,)
	COLUMNS=80 $(filter-out -m,$(RUN)) deploy/man/render.py >deploy/man/stormd.1

clean:
	rm -rf build $(VENV)

# torch first: what it pins wins. The package is built without isolation, so that its build
# tools are the pinned ones too. Without a C++ compiler Python does what compiled code would.
$(VENV)/.installed: pyproject.toml constraints.txt CMakeLists.txt $(C_SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) scikit-build-core hatch-fancy-pypi-readme cmake ninja
	$(PIP) --no-build-isolation --editable .
	-$(VENV)/bin/python -m storm_client.native
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --no-build-isolation --editable ".[dev]"
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) --no-build-isolation --editable ".[docs]"
	touch $@

$(VENV)/.installed-cuda: $(VENV)/.installed-dev
	$(PIP) --no-build-isolation --editable ".[cuda]"
	touch $@
