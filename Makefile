# make bench   set everything up and measure: all claims on a GPU, or the host claims without one
# make test    set everything up and run every check that needs no GPU
# make lint    lint, types and import layers only
# make clean   remove the virtual environment, runs and caches
#
# ARGS=...     further arguments for pytest, for example ARGS='-m ch06 --quick'
# PYTHON=...   the Python that creates the virtual environment

SHELL       := bash
.SHELLFLAGS := -o pipefail -c

TOO_OLD := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c '$(TOO_OLD)' 2>/dev/null && echo $$p && break; done)
VENV   ?= .venv
BIN    := $(VENV)/bin
GPU    := $(shell nvidia-smi -L 2>/dev/null | grep '^GPU')
NVCC   := $(shell command -v nvcc 2>/dev/null)
# GPU machines are often offline, and their CUDA or Triton includes a disassembler: install none
SASS   := $(if $(GPU),found,$(shell command -v cuobjdump 2>/dev/null))
EXTRAS := dev $(if $(GPU),gpu,cpu) $(if $(NVCC),,toolchain) $(if $(SASS),,sass)
# Without a GPU: the versions that the checks are written for. PyPI's torch brings CUDA libraries of
# several GB; this index has the same version without them, and pip prefers it.
TORCH  := $(if $(GPU),,torch==2.13.0 triton==3.7.1)
INDEX  := https://download.pytorch.org/whl/cpu
SIZE   := $(if $(GPU),0.3 GB to download (several GB if this Python has no torch),0.7 GB to download, 2.5 GB on disk)
REPORT := .aiperf/report
empty  :=
comma  := ,

.PHONY: bench test lint clean

# An INCONCLUSIVE claim says that this machine is too noisy, not that something is wrong: only other
# failures fail the target. JUnit's file has all of them, also of tests without a claim.
bench: $(VENV)/ready
	@rm -f $(REPORT)/junit.xml; status=0; \
	$(BIN)/python -m pytest $(if $(GPU),--gpu,--cpu) --aiperf-report=$(REPORT) \
		--junit-xml=$(REPORT)/junit.xml $(ARGS) || status=$$?; \
	failures=$$(grep -oE '<(failure|error) message="[^"]*' $(REPORT)/junit.xml 2>/dev/null); \
	if [ $$status = 1 ] && ! grep -qv 'message="Failed: INCONCLUSIVE where' <<<"$$failures"; then \
		echo "No claim is wrong; $$(wc -l <<<"$$failures") INCONCLUSIVE on this machine."; \
		status=0; \
	fi; \
	if [ -e $(REPORT)/index.html ]; then \
		echo "Report: $(CURDIR)/$(REPORT)/index.html"; \
		echo "Open this file in a browser (xdg-open $(REPORT)/index.html); to read it on another" \
			"computer, copy this one file."; \
	fi; \
	exit $$status

test: lint
	$(BIN)/python -m pytest -n auto $(ARGS)

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# GPU machines bring their own torch: the environment includes it, so that pip installs no other.
# pip writes hundreds of lines: only large downloads and the installation are shown, and errors.
$(VENV)/ready: pyproject.toml $(wildcard selfcheck/pyproject.toml nightly/pyproject.toml)
	@$(or $(PYTHON),false) -c '$(TOO_OLD)' || { echo "pytest-aiperf needs Python 3.11 or newer:" \
		"install it, then name it, for example make PYTHON=python3.12" >&2; exit 1; }
	@echo "Setting up $(VENV) with $(PYTHON) and the extras $(strip $(EXTRAS)): about $(SIZE), 2 to 5 minutes"
	@$(PYTHON) -m venv $(if $(GPU),--system-site-packages) $(VENV)
	@index=; $(if $(GPU),,if $(BIN)/python -c \
		'import urllib.request as r; r.urlopen("$(INDEX)/torch/", timeout=10)' 2>/dev/null; \
		then index='--extra-index-url $(INDEX)'; \
		else echo "$(INDEX) cannot be reached: pip may download CUDA libraries with torch"; fi;) \
	$(BIN)/python -m pip install --progress-bar off $$index $(TORCH) --editable \
		'.[$(subst $(empty) $(empty),$(comma),$(strip $(EXTRAS)))]' \
		--editable ./selfcheck --editable ./nightly | sed -unE \
		's/^ *(Downloading [^ ]+ \([0-9.]+ [MG]B\)).*/  \1/p; s/^Installing collected .*/  Installing/p'
	@touch $@

clean:
	rm -rf $(VENV) .aiperf .mypy_cache .ruff_cache .import_linter_cache .hypothesis
