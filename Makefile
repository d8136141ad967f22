# make bench   set everything up and measure: all claims on a GPU, or the host claims without one
# make test    set everything up and run every check that needs no GPU
# make lint    lint, types and import layers only
# make clean   remove the virtual environment, runs and caches
#
# ARGS=...     further arguments for pytest, for example ARGS='-m ch06 --quick'
# PYTHON=...   the Python that creates the virtual environment

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
GPU    := $(shell nvidia-smi -L 2>/dev/null | grep '^GPU')
NVCC   := $(shell command -v nvcc 2>/dev/null)
# GPU machines are often offline, and their CUDA or Triton includes a disassembler: install none
SASS   := $(if $(GPU),found,$(shell command -v cuobjdump 2>/dev/null))
EXTRAS := dev $(if $(GPU),gpu,cpu) $(if $(NVCC),,toolchain) $(if $(SASS),,sass)
empty  :=
comma  := ,

.PHONY: bench test lint clean

bench: $(VENV)/ready
	$(BIN)/python -m pytest $(if $(GPU),--gpu,--cpu) $(ARGS)

test: lint
	$(BIN)/python -m pytest -n auto $(ARGS)

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# GPU machines bring their own torch: the environment includes it, so that pip installs no other.
$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(if $(GPU),--system-site-packages) $(VENV)
	$(BIN)/python -m pip install --quiet --editable \
		'.[$(subst $(empty) $(empty),$(comma),$(strip $(EXTRAS)))]' \
		--editable ./selfcheck --editable ./nightly
	touch $@

clean:
	rm -rf $(VENV) .aiperf .mypy_cache .ruff_cache .import_linter_cache .hypothesis
