# Two commands on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check --constraint requirements-test.lock

# The instruction sets of the CPU kernels that the machine can run besides its own, which is AVX2 if it has no AVX-512.
VARIANTS := $(shell grep -qs avx512_vnni /proc/cpuinfo && echo avx2) portable

# The hundreds of processes that tests start find what one of them has compiled.
unexport PYTHONDONTWRITEBYTECODE

# Test processes: one more than there are processors, as some tests wait.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)

.PHONY: demo test test-all test-kernels lint lock wheels clean

demo: .venv/installed
	$(BIN)/quantkit demo

# A file's tests stay together: what they share is made once. A worker that crashes ends the run, which fails.
test: MARKERS := -m "not slow"
test test-all: .venv/installed-test
	$(BIN)/pytest $(MARKERS) --numprocesses $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# The tests of the CPU kernels, once for each instruction set that is not the machine's own.
test-kernels: .venv/installed-test
	for variant in $(VARIANTS); do \
	    QUANTKIT_CPU=$$variant $(BIN)/pytest -m "cpu_kernels and not compiles" --numprocesses $(WORKERS) --maxprocesses 8 --dist loadfile || exit 1; \
	done

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/release/check_style.py
	rm -rf .venv/wheel build
	$(BIN)/pip install --quiet --no-deps --target .venv/wheel .
	cd .venv/wheel && MYPYPATH=. ../bin/mypy --config-file ../../pyproject.toml --cache-dir ../mypy -p quantkit

# All packages for users, in dist/: the source archive and the wheels.
wheels: .venv/installed-wheels
	$(BIN)/python scripts/release/build_wheels.py

# Pins the newest packages of the tests, for all Pythons and platforms, except those whose version the build of torch
# selects, and so TORCH.
lock:
	$(PYTHON) -m venv .venv/lock
	.venv/lock/bin/pip install --quiet --disable-pip-version-check uv
	.venv/lock/bin/uv pip compile --quiet --universal --python-version 3.11 --extra test --extra wheels pyproject.toml \
	    --no-emit-index-url --no-annotate --no-header | \
	    grep -vE '^(torch|triton|setuptools)==|^(cuda|nvidia)-' > requirements-test.lock

clean:
	rm -rf .venv build dist *.egg-info

# The CPU kernels are compiled while packages are installed.
.venv/installed: pyproject.toml requirements-test.lock
	$(PYTHON) -m venv .venv
	$(INSTALL) --no-deps --editable .
	$(BIN)/python -c "from quantkit.kernels.library import compile_ahead; compile_ahead().join()" &
	$(INSTALL) "$(TORCH)" quantkit
	touch $@

.venv/installed-test: .venv/installed
	$(INSTALL) "$(TORCH)" "quantkit[test]"
	touch $@

.venv/installed-wheels: .venv/installed
	$(INSTALL) "$(TORCH)" "quantkit[wheels]"
	touch $@
