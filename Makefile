# make bench   set everything up and measure: all claims where there is a GPU, else the host claims
# make test    set everything up and run every check that needs no GPU

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
GPU    := $(shell nvidia-smi -L 2>/dev/null | grep '^GPU')
NVCC   := $(shell command -v nvcc 2>/dev/null)
# GPU images are often offline, and bring a disassembler with CUDA or Triton
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

# GPU images bring their own torch: the environment sees it, and pip then installs no other.
$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(if $(GPU),--system-site-packages) $(VENV)
	$(BIN)/python -m pip install --quiet --editable \
		'.[$(subst $(empty) $(empty),$(comma),$(strip $(EXTRAS)))]'
	touch $@

clean:
	rm -rf $(VENV) .aiperf .mypy_cache .ruff_cache .import_linter_cache .hypothesis
