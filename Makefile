# A contributor's day: make setup, make check, make test. A newcomer's minute: make demo.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INIT := src/sandlot/drivers/native/bin/sandlot-init
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup packages demo test learn check hostile hostile-controls faults kernels soak compat ci format clean
help:
	@echo "make demo    set up, then train an agent in real sandboxes (about 5 minutes)"
	@echo "make test    set up, then run the tests"
	@echo "make setup   make .venv and install everything into it"
	@echo "make check   format, lint, types, C warnings, layers"
	@echo "make packages as root: the system's packages that some tests need (they are skipped without)"
	@echo "make learn   small models that must learn, or must not, in a minute or two"
	@echo "make hostile attacks on real boxes; make hostile-controls: the same, one protection removed"
	@echo "make faults  kill -9 of server and boxes a thousand times: nothing may be lost or left"
	@echo "make compat  other frameworks' own tests of our sandboxes, each in an environment of its own"
	@echo "make ci      check, test, then the slow suites in short: what continuous integration runs"

setup: $(VENV)/.installed $(INIT)

$(VENV)/.installed: pyproject.toml constraints.txt hatch_build.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11"; echo; echo "hint: install a newer one and run \`make setup PYTHON=python3.12\`"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "error: $(PYTHON) has no venv module"; echo; echo "hint: \`apt install python3-venv\`"; exit 1; }
	@command -v gcc >/dev/null || \
	  { echo "error: there is no gcc to build sandlot-init with"; echo; echo "hint: \`apt install gcc libc6-dev\`"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): torch and transformers take a minute or two"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(INIT): $(wildcard init/*.c init/*.h init/Makefile)
	@$(MAKE) -s -C init

# What tests use and no Python package brings: a registry and its tools, a small image, ids for an ordinary user.
PACKAGES := busybox-static docker-registry iproute2 libcap2-bin mmdebstrap openssl skopeo uidmap
packages:
	@dpkg -s $(PACKAGES) >/dev/null 2>&1 || \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(PACKAGES) >/dev/null; }

demo: setup
	$(BIN)/sandlot train recipes/find/demo.toml

# Two at a time, each file by one of them; with a machine to itself, in about five minutes on two processors.
JOBS ?= 2
test: setup
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=10

# Small models that learn on this machine's processors, and, where rewards are shuffled, do not; runs that are ended and go on.
learn: setup
	$(BIN)/python -m pytest -q --durations=5 tests/learn

# ruff, strict types over src, C warnings as errors, and the table of who may import whom.
check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/make_sync.py --check
	@$(MAKE) -s -C init OUT=build/sandlot-init -B
	$(BIN)/python -m pytest -q tests/test_layers.py

format:
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# As whoever runs it: try it as root and as an ordinary user, whose boxes are made differently.
hostile: setup
	$(BIN)/python -m pytest -q -m 'not control' tests/hostile

hostile-controls: setup
	$(BIN)/python -m pytest -q -m control tests/hostile

# About half an hour; what ran is in the output, with the seed.
faults: setup
	SANDLOT_FAULT_ROUNDS=1000 $(BIN)/python -m pytest -q -s tests/faults

# The same on other kernels, in QEMU guests: Debian's packages for kernel and root file system; as root, about an hour.
kernels: setup
	$(BIN)/python tests/kernels/run.py

# Twenty thousand sandboxes, two hundred thousand commands.
soak: setup
	SANDLOT_SOAK_BOXES=20000 $(BIN)/python -m pytest -q -s tests/soak

# A foreign client judges, as it is: pinned, in an environment that holds it, sandlot, and what tests need.
COMPAT := build/compat
compat: $(COMPAT)/inspect/.installed $(INIT)
	$(COMPAT)/inspect/venv/bin/mypy --config-file tests/compat/inspect/mypy.ini
	$(COMPAT)/inspect/venv/bin/python -m pytest -q --durations=5 tests/compat/inspect

$(COMPAT)/%/.installed: tests/compat/%/requirements.txt pyproject.toml constraints.txt hatch_build.py
	@mkdir -p $(@D)
	@test -x $(@D)/venv/bin/python || $(PYTHON) -m venv $(@D)/venv
	@echo "installing into $(@D)/venv"
	@$(@D)/venv/bin/python -m pip install --quiet --constraint constraints.txt --requirement $< --editable '.[serve]'
	@touch $@

ci: check test learn hostile hostile-controls compat
	SANDLOT_FAULT_ROUNDS=20 $(BIN)/python -m pytest -q -s tests/faults
	SANDLOT_SOAK_BOXES=400 $(BIN)/python -m pytest -q -s tests/soak
	@echo "left out here: recipes/find/demo.toml in full (make demo), bench/ (python bench/box.py), the hostile suite as"
	@echo "an ordinary user (run make hostile as one), other kernels (make kernels), a thousand kills (make faults; 20 here),"
	@echo "twenty thousand sandboxes (make soak; 400 here)"

clean:
	rm -rf build dist init/build $(INIT)
