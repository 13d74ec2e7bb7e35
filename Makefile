# Two commands: `make train` and `make test`. Each sets up all it needs in .venv; nothing is installed elsewhere.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt

.PHONY: train test test-long lab bench readme clean

train: .venv/run  ## a trained model, from nothing
	$(BIN)/elleci_train --preset elleci-tiny --out runs/elleci-tiny --resume

test: .venv/dev   ## every check, on this working tree
	$(BIN)/python .ci/checks.py

test-long: .venv/dev  ## what takes longer: more kills; three trainings, kept in data/results
	ELLECI_LONG=1 $(BIN)/python .ci/checks.py
	$(BIN)/python benchmarks/tiny.py --seeds 3

lab: .venv/dev    ## read and run the notebooks
	$(BIN)/jupyter lab --notebook-dir=nbs

bench: .venv/run  ## train elleci-tiny, and with several state sizes; time the account; what was measured goes to data/results
	$(BIN)/python benchmarks/tiny.py
	$(BIN)/python benchmarks/d_state.py
	$(BIN)/python benchmarks/account.py

readme: .venv/dev ## README.md from nbs/index.ipynb
	$(BIN)/python .ci/readme.py

clean:            ## everything that git does not track
	rm -rf .venv build dist *.egg-info

# torch first and exactly: a range would take a newer build and gigabytes with it (constraints.txt)
.venv/run: setup.py settings.ini constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "elleci needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) -e .
	touch $@

.venv/dev: .venv/run
	$(PIP) -e '.[dev]'
	touch $@
