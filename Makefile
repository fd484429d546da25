# Every target does its own set-up: a .venv made by pip with the pinned versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
CODE := src tests benchmarks examples packaging
export CUBLAS_WORKSPACE_CONFIG = :4096:8
export PYTHONPATH = tests:examples  # simulated worlds, for benchmarks too

OUT ?= bench-real
JOBS ?= 1
SMALL = $(if $(CASES),--cases $(CASES))
REAL = --data "$(DATA)" -o "$(OUT)"
CURVES ?= hearts-mirrored fundus-0 polyps-0
EXTRAS ?= core dicom adapt

.PHONY: demo test test-whole test-portable test-all test-versions check bench bench-real bench-question source-models clean help

help:  ## What the targets do
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /	/' | expand -t 16

demo: $(VENV)/.adapt  ## fit and predict on embedded phantom hearts; leaves demo-report/demo.html
	$(BIN)/casewise demo -o demo-report

test: $(VENV)/.dev  ## The fast tests, under five minutes on two cores
	$(BIN)/python -m pytest -m "not whole and not slow and not bench" -n 2 --dist worksteal

test-whole: $(VENV)/.dev  ## Tests of commands, pages, services and whole chains, as long again
	$(BIN)/python -m pytest -m "whole and not slow and not bench" -n 2 --dist worksteal

# Two runs at a time, each in one process: small kernels of other processors, and one or two threads.
test-portable: $(VENV)/.dev  ## The tests whose numbers come from torch, as other processors and thread counts compute them
	printf '%s\n' 'default 1' 'avx2 1' 'default 2' 'avx2 2' | xargs -P 2 -L 1 sh -c \
	  'ATEN_CPU_CAPABILITY=$$0 OMP_NUM_THREADS=$$1 $(BIN)/python -m pytest -p no:xdist -m "not slow and not bench and not versions" \
	  tests/adapt tests/contracts/test_objectives_contract.py tests/backbones tests/test_guard.py \
	  && echo "passed: $$0 kernels, $$1 threads"'

test-all: $(VENV)/.dev test-portable test-versions  ## All tests, the slow simulations and other versions of nnU-Net too
	$(BIN)/python -m pytest -m "not bench and not versions" -n 2 --dist worksteal

test-versions: $(VENV)/.dev  ## The nnU-Net backbone with other versions of nnU-Net
	$(BIN)/python -m pytest -m versions -rs tests/backbones

# The last line counts code lines, commands, options and prose, asks for one name per thing, and for the form of
# docstrings of public names.
check: $(VENV)/.dev  ## Format, lint, types, size, names and docstrings
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	$(BIN)/python -m pytest -p no:xdist -k "not examples_run" tests/test_size.py tests/test_architecture.py tests/test_public_names.py tests/cli/test_command_table.py

bench: $(VENV)/.dev  ## Speed, as ratios within one run
	@for script in benchmarks/speed_*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

bench-real: bench-question  ## Real domain shifts, most of a day on one core, JOBS=2 for two; CASES=5 for a small run: make bench-real DATA=../shared/data [OUT=bench-real]
	$(BIN)/python benchmarks/real.py $(REAL) $(SMALL) --jobs $(JOBS) $(SHIFTS) $(if $(ARMS),--arms $(ARMS))
	$(BIN)/python benchmarks/real_paper.py -o "$(OUT)" > "$(OUT)/pages/4-paper.md"
	$(BIN)/python benchmarks/real_tables.py -o "$(OUT)" > "$(OUT)/pages/5-gradients.md"
	@echo "every table: $(OUT)/pages"

bench-question: $(VENV)/.dev  ## Its first half: what to do with a few labelled cases; SHIFTS="polyps-0 driving" for some of the shifts
	@test -d "$(DATA)" || { echo "say where the data lie: make bench-real DATA=FOLDER (see benchmarks/README.md)"; exit 2; }
	@mkdir -p "$(OUT)/pages"
	$(BIN)/python benchmarks/real_question.py $(REAL) $(SMALL) --jobs $(JOBS) $(SHIFTS) > "$(OUT)/pages/0-question.md"
	$(if $(SHIFTS),,for shift in $(CURVES); do $(BIN)/python benchmarks/real_curve.py $$shift $(REAL) --jobs $(JOBS) \
	  --picture "$(OUT)/curve-$$shift.svg" || exit 1; done > "$(OUT)/pages/1-curve.md")
	@echo "tables of the question: $(OUT)/pages"

source-models: $(VENV)/.adapt  ## Train the embedded source model again (deterministic)
	$(BIN)/python benchmarks/source_models.py

docs: $(VENV)/.dev  ## The documentation as a site, in site/index.html
	$(PIP) -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

package: $(VENV)/.dev  ## Wheel and sdist in dist/, installed by extra in empty environments [EXTRAS="core dicom adapt"]
	packaging/check_install.sh $(BIN)/python $(EXTRAS)

clean:  ## Remove what the targets made
	rm -rf $(VENV) demo-report out build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.adapt: $(BIN)/pip pyproject.toml constraints.txt
	$(PIP) torch -e ".[adapt]"
	@touch $@

$(VENV)/.dev: $(BIN)/pip pyproject.toml constraints.txt
	$(PIP) torch -e ".[all,dev]"
	@touch $@ $(VENV)/.adapt
