# make bench   set everything up and measure: all claims on a GPU, or the host claims without one
# make test    set everything up and run every check that needs no GPU
# make attack  run the dishonest arms, tests and records that must be caught; print their counts
# make lint    lint, types and import layers only
# make docs    build the documentation into docs/_build/html
# make clean   remove the virtual environment, runs and caches
#
# ARGS=...     further arguments for pytest, for example ARGS='-m ch06 --quick'
# PYTHON=...   the Python that creates the virtual environment
# VENV=...     the folder of the virtual environment, instead of .venv

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
SILENCE_S := 10

# Images of containers set it: each of the thousands of pytest runs that tests start would compile the
# plugin anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help bench test attack lint docs clean same-python

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

# An undecided claim shows that this machine is too noisy, not that something is wrong: only other
# failures fail the target. JUnit's file has all of them, also of tests without a claim.
bench: $(VENV)/ready
	@rm -f $(REPORT)/junit.xml; status=0; before=$$(stat -c %i:%y $(REPORT)/index.html 2>/dev/null); \
	$(BIN)/python -m pytest $(if $(GPU),--gpu) --cpu --aiperf-report=$(REPORT) \
		--junit-xml=$(REPORT)/junit.xml $(ARGS) || status=$$?; \
	failures=$$(grep -oE '<(failure|error) message="[^"]*' $(REPORT)/junit.xml 2>/dev/null); \
	if [ $$status = 1 ] && ! grep -qv 'message="undecided: ' <<<"$$failures"; then \
		echo "No claim is wrong; this machine is too noisy to decide $$(wc -l <<<"$$failures")."; \
		status=0; \
	fi; \
	if [ "$$(stat -c %i:%y $(REPORT)/index.html 2>/dev/null)" != "$$before" ]; then \
		echo "Report: $(CURDIR)/$(REPORT)/index.html"; \
		echo "Open this file in a browser (xdg-open $(REPORT)/index.html); to read it on another" \
			"computer, copy this one file."; \
	fi; \
	exit $$status

# On cores that other workers keep busy, OpenMP's threads would wait for each other by spinning: arms
# on the CPU took three times the CPU time.
test attack: export OMP_WAIT_POLICY := passive

# Some tests measure times while other workers load the machine: what fails is run again, alone.
test: lint
	$(BIN)/python -m pytest -n auto $(ARGS) || { [ $$? = 1 ] && echo "Again, one at a time:" && \
		$(BIN)/python -m pytest --last-failed --last-failed-no-failures=none $(ARGS); }

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

attack: $(VENV)/ready
	$(BIN)/python -m pytest -n auto tests/cheats tests/plugin/test_consistency.py $(ARGS)

# Every broken link or reference and every record of changed code is an error.
docs: $(VENV)/ready
	$(BIN)/python -m sphinx --nitpicky --fail-on-warning --keep-going --quiet docs docs/_build/html
	@echo "Documentation: $(CURDIR)/docs/_build/html/index.html"

# An environment that exists keeps its Python: refuse a command line that asks for another one.
same-python:
ifeq ($(origin PYTHON),command line)
	@[ ! -x $(BIN)/python ] || { code='import sys; print(*sys.version_info[:3], sep=".")'; \
		there=$$($(BIN)/python -c "$$code"); given=$$($(PYTHON) -c "$$code"); \
		[ "$$there" = "$$given" ] || { echo "$(VENV) has Python $$there, PYTHON=$(PYTHON) is" \
			"$${given:-not a Python}: run make clean first, or name another folder: VENV=$(VENV)2" >&2; \
			exit 1; }; }
endif

# GPU machines bring their own torch: the environment includes it, so that pip installs no other.
# pip writes hundreds of lines: only large downloads and the installation are shown, and errors. It
# installs for a minute or more without a word: then a line says every few seconds that it goes on.
$(VENV)/ready: pyproject.toml $(wildcard selfcheck/pyproject.toml nightly/pyproject.toml) | same-python
	@$(or $(PYTHON),false) -c '$(TOO_OLD)' || { echo "pytest-aiperf needs Python 3.11 or newer:" \
		"install it, then name it, for example make PYTHON=python3.12" >&2; exit 1; }
	@echo "Setting up $(VENV) with $(PYTHON) and the extras $(strip $(EXTRAS)): about $(SIZE), 2 to 5 minutes"
	@$(PYTHON) -m venv $(if $(GPU),--system-site-packages) $(VENV)
	@index=; $(if $(GPU),,if $(BIN)/python -c \
		'import urllib.request as r; r.urlopen("$(INDEX)/torch/", timeout=10)' 2>/dev/null; \
		then index='--extra-index-url $(INDEX)'; \
		else echo "$(INDEX) cannot be reached: torch from PyPI brings 3 GB of CUDA libraries"; fi;) \
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off $$index $(TORCH) --editable \
		'.[$(subst $(empty) $(empty),$(comma),$(strip $(EXTRAS)))]' \
		--editable ./selfcheck --editable ./nightly | sed -unE \
		's/^ *(Downloading [^ ]+ \([0-9.]+ [MG]B\)).*/  \1/p; s/^Installing collected .*/  Installing/p' | \
	while IFS= read -r -t $(SILENCE_S) line || [ $$? -gt 128 ]; do \
		echo "$${line:-  still at it after $$SECONDS s}"; done
	@touch $@

clean:
	rm -rf $(VENV) .aiperf docs/_build .mypy_cache .ruff_cache .import_linter_cache .hypothesis \
		.pytest_cache
