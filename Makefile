# make bench   set everything up and measure: all claims where there is a GPU, else the host claims
# make test    set everything up and run every check that needs no GPU

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
GPU    := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -c '^GPU')
NVCC   := $(shell command -v nvcc 2>/dev/null)
EXTRAS := $(if $(filter-out 0,$(GPU)),gpu,cpu)$(if $(NVCC),,$(comma)toolchain)
comma  := ,

.PHONY: bench test lint clean

bench: $(VENV)/ready
	$(BIN)/python -m pytest $(if $(filter-out 0,$(GPU)),--gpu,--cpu) $(ARGS)

test: $(VENV)/ready lint
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# GPU images bring their own torch: the environment sees it, and pip then installs none.
$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(if $(filter-out 0,$(GPU)),--system-site-packages) $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS),dev]'
	touch $@

clean:
	rm -rf $(VENV) .aiperf .mypy_cache .ruff_cache .import_linter_cache
