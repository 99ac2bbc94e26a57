# One command each; whatever it needs is installed first, into .venv (once: a stamp makes later calls instant).
#
#   make demo      a model that writes text in low bits; 4-bit checkpoints imported, compiled, tuned, checked and timed here
#   make test      ruff, pyright and the tests that take little time: what to run at each edit (seven or eight minutes on two cores)
#   make test-all  ruff, pyright and all tests: what a change must pass
#   make lint      ruff and pyright alone
#   make gpu-smoke every CUDA program on this machine's NVIDIA GPU, against the exact oracle (minutes)
#   make gpu-test  all tests that need an NVIDIA GPU; PART=2/6: the second of six parts that take about as long
#   make results   results/README.md, its plots, and the generated parts of README.md
#   make static    results/rows/static: what compiled kernels say about their speed, for every GPU architecture (needs nvcc, no GPU)
#   make setup     the environment alone
#
#   PYTHON=python3.12  the interpreter that makes the environment (3.11 or 3.12)
#   VENV=path          another environment, made there if it is not
#   VENV=              (empty) none: use PYTHON as it stands and install nothing
#   JOBS=4             test processes
#   PART=1/6           of gpu-test: which part

VENV = .venv
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do $$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $$p && break; done)
# Two more than cores: tests wait for processes, time limits and compilers of their own (all tests on two cores: 1,593 s by three, 1,519 by four).
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n > 3 ? 5 : n + 2)))
EXTRAS = compile,draw,checkpoints,transformers,dev

ifneq ($(strip $(VENV)),)
PY := $(VENV)/bin/python
SETUP := $(VENV)/.tilebit-setup
# Bytecode is kept, whatever the surroundings say: without it every process compiles torch and TVM anew, five seconds of a core.
export PYTHONDONTWRITEBYTECODE :=
else
# Nothing is installed, so the linked tree stands in for the package. The safe path keeps the checkout's own tilebit/ folder,
# which is the door alone, from being imported in its place.
PY = $(or $(PYTHON),python3)
SETUP := links
export PYTHONPATH := $(CURDIR)/build/tree:$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
export PYTHONSAFEPATH := 1
endif

.PHONY: demo test test-all lint gpu-smoke gpu-test results static setup links
.DEFAULT_GOAL := test

setup: $(SETUP)

ifneq ($(strip $(VENV)),)
$(SETUP): pyproject.toml constraints.txt
	@test -n "$(strip $(PYTHON))" || { echo "make: no Python 3.11 or 3.12 found (tried python3, python3.12, python3.11); install one or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if v in ((3, 11), (3, 12)) else f"make: PYTHON is {sys.version.split()[0]}; accepted: 3.11 or 3.12; name one: make PYTHON=python3.12")'
	@echo "setup: installing into $(VENV) (once; a few minutes where torch comes with CUDA)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt setuptools wheel
	@$(PY) -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[$(EXTRAS)]'
	@touch $@
endif

# The folders under their import name, for pyright and for running without an installation. Links are renewed at each call: files come and go.
links:
	@mkdir -p build/tree/tilebit
	@find build/tree -xtype l -delete
	@ln -sfn $(addprefix ../../../,$(filter-out %/__pycache__,$(wildcard tilebit/*)) layouts schedules tiles autotune) build/tree/tilebit/

demo: $(SETUP)
	@$(PY) -m tilebit.command.demo

lint: $(SETUP) links
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check --quiet .
	@$(PY) -m pyright --pythonpath $(PY)

# pyright keeps one core: it checks while tests run, and says what it found after them.
define tests
@start=$$(date +%s); mkdir -p build; \
$(PY) -m ruff check . && $(PY) -m ruff format --check --quiet . || exit 1; \
$(PY) -m pyright --pythonpath $(PY) > build/pyright.log 2>&1 & lint=$$!; \
$(PY) -m pytest -q -n $(JOBS) --dist worksteal $(SELECTED); tests=$$?; \
wait $$lint; lint=$$?; cat build/pyright.log; \
test $$tests = 0 && test $$lint = 0 && \
echo "make $@: ruff, pyright and pytest passed in $$(( $$(date +%s) - start )) s"
endef

test: SELECTED = -m "not slow"
test: $(SETUP) links
	$(tests)

test-all: $(SETUP) links
	$(tests)

gpu-smoke: $(SETUP)
	@$(PY) -m pytest -q -m gpu tests/tiles/test_gpu_smoke.py

gpu-test: $(SETUP) links
	@$(PY) -m pytest -q -m gpu $(if $(PART),--part $(PART))

results: $(SETUP)
	@$(PY) -m results.report.render

static: $(SETUP)
	@$(PY) -m results.measure.static.report
