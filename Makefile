# Everything a person or CI runs. Needs Python >= 3.11 and its pip; all else lands in .venv.
PYTHON ?= $(shell python3.11 -c 'import sys; print(sys.executable)' 2>/dev/null || echo python3)
BIN := .venv/bin
# What `make train` needs, and what all else does.
DEMO := .venv/.demo
INSTALLED := .venv/.installed
SCRIPTS := $(wildcard benchmarks/*.py configs/*.py docs/*.py) hatch_build.py

.DEFAULT_GOAL := help
.PHONY: job acceptance help train test test-quick sweeps hosts hosts-oldest libraries-oldest test-published dist check nightly format-check lint types format bench docs shape torture torture-resume torture-ranks search standin gpu gpu-rehearsal mutants clean
# One pip at a time, and pytest's closing line stays the last one of `make check`.
.NOTPARALLEL:

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*  ## /\1\t/' | expand -t 17

# One thread: these tensors are too small to share, and on a busy machine threads that wait for
# each other take many times as long.
train: $(DEMO)  ## train the digits example on a device too small for its batch
	OMP_NUM_THREADS=1 $(BIN)/automicro train configs/digits.yaml

# What needs the trainers of others has a target of its own: importing them takes seconds.
HOSTS := tests/integrations automicro/integrations

# Worlds of processes and their files stay together in one worker.
# AUTOMICRO_SEED, as `make nightly` sets it, is what property tests draw by.
DRAWS := $(if $(AUTOMICRO_SEED),--hypothesis-seed=$(AUTOMICRO_SEED))
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8 $(DRAWS)

test: $(INSTALLED)  ## run the tests and the doctests
	@echo "about 3,100 tests, in three to five minutes on two idle cores (make test-quick: the core of them)"
	$(PYTEST) --dist loadfile $(addprefix --ignore ,$(HOSTS))

# What most changes would break, of what is fast: no processes, no compiler, no libraries of others.
QUICK := $(addprefix tests/,$(addsuffix .py,$(addprefix test_,\
	architecture durations microbatcher) \
	$(addprefix cli/test_,command_line config) \
	$(addprefix memory/test_,budget oom) policy/test_policy batch/test_rows loss/test_weighting \
	$(addprefix transaction/test_,transaction gradients) checkpoints/test_checkpoints \
	events/test_events loggers/test_loggers $(addprefix trainer/test_,training loop progress)))

test-quick: $(INSTALLED)  ## run the core of the tests, in less than a minute
	@echo "the core of the tests, in less than a minute on two idle cores"
	$(PYTEST) -q $(QUICK)

# A few of what make torture, search and so on run whole.
sweeps: $(INSTALLED)  ## run samples of the torture, the search, the kills and the walks of collectives
	$(PYTEST) --dist loadfile -q -m 'sweep and not slow and not gpu and not standin' tests --ignore tests/integrations

hosts: $(INSTALLED)  ## run the integrations inside the trainers of others, the newest that are supported
	$(PYTEST) --dist loadfile -q -m 'not slow and not gpu and not standin' $(HOSTS)

hosts-oldest: $(INSTALLED)  ## the same with the oldest, in an environment of its own
	@echo "downloads the oldest supported hosts: four minutes on two idle cores"
	$(BIN)/python -m tests.oldest hosts -n auto --maxprocesses 8 --dist loadfile

libraries-oldest: $(INSTALLED)  ## test what stands on torch and torchmetrics with the oldest of them
	@echo "downloads the oldest supported torch: four minutes on two idle cores"
	$(BIN)/python -m tests.oldest libraries -n auto --maxprocesses 8 --dist loadfile

# Some gigabytes are downloaded and go again: no cache may stand in for the index.
test-published: $(INSTALLED)  ## build sdist and wheel, install the newest torch with it, and run both
	@echo "downloads the newest torch: 5 minutes on two idle cores, more on a slow line"
	$(BIN)/python -m pytest -q -s -m slow tests/packaging

dist: $(INSTALLED)  ## build what an index gets; REPOSITORY=https://… is where its links lead
	@test -n "$(REPOSITORY)" || { echo "make dist needs the address that links in the README and on the index lead to: make dist REPOSITORY=https://HOST/OWNER/automicro" >&2; exit 2; }
	rm -rf dist
	AUTOMICRO_REPOSITORY="$(REPOSITORY)" $(BIN)/python -m hatchling build

check: format-check lint types docs standin sweeps hosts test  ## everything CI runs: format, lint, types, tests

# What takes longer than CI has: before a release, and each night where there are nights.
nightly: $(INSTALLED)  ## run what CI has no time for, with a seed of today; hours
	$(BIN)/python -m benchmarks.nightly

format-check: $(INSTALLED)
	$(BIN)/ruff format --check .

lint: $(INSTALLED)  ## look for mistakes in code, and for prose that is hard to read
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -q tests/test_architecture.py -k prose

types: $(INSTALLED)  ## check the types
	$(BIN)/mypy automicro tests $(SCRIPTS)

format: $(INSTALLED)  ## format the code and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED)  ## measure the overhead against loops written by hand
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.trainer_overhead
	$(BIN)/python -m benchmarks.distributed_overhead
	$(BIN)/python -m benchmarks.start_up

# Strict: a broken link, or a name in the reference that is not there, fails.
docs: $(INSTALLED)  ## build the site into build/site, in half a minute
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q

# Their slow tests have targets of their own, below.
OWN_TARGETS := packaging acceptance torture real_memory trainer/resume ranks search standin gpu

job: $(INSTALLED)  ## run the jobs in configs/ to their ends, and all else in tests/ that is slow
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow tests $(addprefix --ignore tests/,$(OWN_TARGETS))

acceptance: $(INSTALLED)  ## judge the whole tables of checks and families, with counts
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/acceptance -q -s -m 'slow or sweep'

torture: $(INSTALLED)  ## run out of memory at every operation of a step, slow ones included
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/torture tests/real_memory -q -s -m 'not gpu'

torture-resume: $(INSTALLED)  ## kill a run at two hundred points, and resume it bit for bit
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/trainer/resume -q -s -m 'not gpu'

torture-ranks: $(INSTALLED)  ## run out of memory on any rank at random points, and all slow cases
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/ranks -q -s -m slow

search: $(INSTALLED)  ## judge two thousand random combinations of what people write, with counts
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/oracle -q -s -m slow $(DRAWS)

# A run of its own: the device stays for the life of a process.
standin: $(INSTALLED)  ## test the simulated device, and automicro on it; needs a C++ compiler
	OMP_NUM_THREADS=1 $(PYTEST) --dist loadfile -q -p tests.standin.plugin -m 'standin or gpu' tests/standin tests/gpu

gpu: $(INSTALLED)  ## run all that needs a GPU and write a dated report
	$(BIN)/python -m benchmarks.gpu_report

# All of `make gpu`, and so the tests of tests/gpu, where there is no GPU.
gpu-rehearsal: $(INSTALLED)  ## run all of `make gpu` on the simulated device
	@echo "all of make gpu on a simulated device, in 3 minutes on two idle cores"
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.gpu_report --standin

shape: $(INSTALLED)  ## print what the package measures, beside its budgets and goals
	$(BIN)/python -m tests.test_budgets

mutants: $(INSTALLED)  ## judge whether the tests still kill the mistakes that they killed before
	@echo "a quarter of an hour on two idle cores; up to two hours where killers are gone"
	$(BIN)/python -m benchmarks.mutants --compare benchmarks/results/mutants.json --progress build/mutants

clean:  ## remove the environment and every cache
	rm -rf .venv .venv-hosts .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist

# The stamps are written last, so that an interrupted install is taken up again.
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

$(DEMO): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("automicro needs Python >= 3.11, found " + sys.version.split()[0] + ": run make PYTHON=/path/to/python3.11")'
	@test -x $(BIN)/python || { echo "making .venv with $(PYTHON)"; $(PYTHON) -m venv --clear .venv; }
	@echo "installing PyTorch into .venv: the largest download, minutes on a slow line"
	@$(PIP) torch
	@echo "installing automicro and the digits (scikit-learn)"
	@$(PIP) -e '.[demo]'
	@touch $@

$(INSTALLED): $(DEMO)
	@echo "installing what the tests need: linters, other trainers, loggers; a minute or a few"
	@$(PIP) -e '.[dev]'
	@touch $@
