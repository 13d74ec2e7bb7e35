# Two commands: `make train` and `make test`. Each sets up all it needs in .venv; nothing is installed elsewhere.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt
HERE := --no-build-isolation --use-pep517 -e

.PHONY: train test test-changed test-long test-browser mutants pins lab bench bench-cpu bench-gpu readme lock clean

train: .venv/run  ## a trained model, from nothing
	$(BIN)/elleci_train --preset elleci-tiny --out runs/elleci-tiny --resume
	@echo 'elleci_train, elleci_generate and the other commands are found in this terminal after: source .venv/bin/activate'

test: .venv/dev   ## every check, on this working tree
	$(BIN)/python .ci/checks.py

test-changed: .venv/dev  ## the checks that reach something that has changed since they last passed
	$(BIN)/python .ci/checks.py --changed

pins: .venv/dev   ## what a change that only moves code leaves as it is: losses, accounts, plans, shards, flags, names
	$(BIN)/python .ci/pins.py

mutants: .venv/dev  ## what the checks are worth: plausible mistakes, planted one by one; about an hour on two cores
	@$(PIP) coverage
	$(BIN)/python .ci/mutants.py --reach
	$(BIN)/python .ci/mutants.py

test-long: .venv/dev  ## every cell, more kills; the newest Transformers on PyPI; three trainings, kept in data/results
	ELLECI_LONG=1 $(BIN)/python .ci/checks.py
	$(BIN)/python benchmarks/train.py tiny --seeds 3

# a browser is looked for, then fetched; where none is to be had, the check says so and is skipped
test-browser: .venv/dev  ## dashboard and planner in JupyterLab, driven in Chromium; ELLECI_SCREENSHOTS=1 renews nbs/images
	@$(PIP) playwright || echo 'playwright could not be installed: the browser test will be skipped'
	@command -v chromium || command -v chromium-browser || command -v google-chrome || $(BIN)/playwright install chromium || echo 'no Chromium to be had (Debian: apt install chromium): the browser test will be skipped'
	for name in 77_browser 80_timeline_browser 81_planner_browser 82_live_browser; do ELLECI_BROWSER=1 $(BIN)/jupyter nbconvert --log-level=ERROR --to markdown --execute --no-input --stdout nbs/tests/$$name.ipynb || exit 1; done

lab: .venv/dev    ## read and run the notebooks; opens on the index
	$(BIN)/jupyter lab --config=.ci/jupyter_server_config.py

bench: .venv/run  ## every technique against one baseline: speed, memory, loss; about half an hour on two cores; Ctrl-C, and again: it goes on
	$(BIN)/elleci_experiments --out runs/experiments
	cp runs/experiments/experiments-*.json data/results/

bench-cpu: .venv/run  ## train elleci-tiny; pack the 1.5B model; decode on this CPU, against transformers; time the account and the scan on this CPU; what was measured goes to data/results
	for benchmark in 'train.py tiny' 'memory.py account' 'cpu.py cpu_scan' 'memory.py packed' 'decode.py decode'; do $(BIN)/python benchmarks/$$benchmark || exit 1; done

bench-gpu: .venv/run  ## everything that is measured on a GPU, in at most nine minutes; goes to data/results
	$(BIN)/python benchmarks/gpu_suite.py

readme: .venv/dev ## each notebook's place in the course (nbs/course.toml), then README.md from nbs/index.ipynb
	$(BIN)/python .ci/course.py
	$(BIN)/python .ci/readme.py

lock: .venv/run   ## renew constraints.txt below its direct requirements
	$(PIP) uv
	$(BIN)/python .ci/lock.py

clean:            ## everything that git does not track
	rm -rf .venv build dist *.egg-info

# torch first and exactly: a range would take a newer build and gigabytes with it (constraints.txt)
.venv/run: setup.py settings.ini constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "elleci needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) setuptools wheel packaging
	$(PIP) torch
	$(PIP) $(HERE) .
	touch $@

# mamba-ssm without its CUDA extension, which `make test` compares the scan with: its setup.py needs torch, setuptools, wheel and packaging at hand
.venv/dev: .venv/run
	$(PIP) $(HERE) '.[dev]'
	@$(PIP) triton || echo 'no Triton for this system: its kernels will not be checked'
	@$(PIP) einops && \
	MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE $(PIP) --no-deps --no-build-isolation mamba-ssm >.venv/mamba-ssm.log 2>&1 || \
	echo 'mamba-ssm could not be installed (.venv/mamba-ssm.log): the comparison with it will be skipped'
	@$(PIP) bitsandbytes torchao pytorch-optimizer || echo 'bitsandbytes, torchao or pytorch-optimizer could not be installed: their bytes will not be measured'
	touch $@
