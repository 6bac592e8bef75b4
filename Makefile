# Everything here only calls `python -m ...`; see README.md.
# EXP=<experiment>  ARGS="<hydra overrides>"  VENV=<folder of the virtual environment>
SHELL  := /bin/bash
EXP    ?= demo
ARGS   ?=
VENV   ?= .venv
PYTHON ?= python3.11
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.eagle3-$(shell sha256sum requirements.lock 2>/dev/null | cut -c1-16)
RUN     = $(PY) -m $(1) experiment=$(EXP) $(ARGS)

.PHONY: help setup check test respond extract plan verify train export eval parity tune sweep demo clean
help:      ## this list
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 12

setup: $(STAMP)  ## the virtual environment with pinned packages, and this project in it
	@$(PY) -P -c "import eagle3, pathlib, sys; sys.exit(pathlib.Path(eagle3.__file__).parents[1] != pathlib.Path.cwd())" \
	  || $(PY) -m pip install -q --no-deps --no-build-isolation --editable .

$(STAMP): requirements.lock
	$(shell command -v $(PYTHON) || echo python3) -m venv $(VENV)
	$(PY) -m pip install -q --upgrade "pip>=26" "setuptools>=68" wheel
	$(PY) -m pip install --no-deps -r requirements.lock
	touch $@

check: setup     ## ruff and mypy
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

test: check      ## everything CI runs
	$(PY) -m pytest -m "not slow and not gpu" $(ARGS)

respond: setup   ## the target answers the prompts of EXP
	$(call RUN,extraction.respond)

extract: setup   ## capture hidden states into a store
	$(call RUN,extraction.extract)

plan: setup      ## what the store of EXP will take, before anything runs
	$(call RUN,extraction.plan)

verify: setup    ## check the store of EXP
	$(call RUN,extraction.verify)

train: setup     ## train a drafter on the store
	$(call RUN,training.train)

export: setup    ## write the drafter for SGLang and for speculators
	$(call RUN,training.export)

eval: setup      ## plain and EAGLE-3 server on held-out prompts; writes the report
	$(call RUN,eval.live)

parity: setup    ## does the server draft what was trained? captures eval's answers and compares
	$(call RUN,extraction.extract) extract.of_eval=true
	$(call RUN,eval.parity)

tune: setup      ## which speculative settings serve the drafter of EXP fastest; the command to launch
	$(call RUN,eval.tune)

sweep: setup     ## Hydra multirun over training, for example ARGS="optimizer.lr=1e-3,3e-3"
	$(PY) -m training.train --multirun experiment=$(EXP) \
	  'train_dir=$${runs_dir}/$${run_name}/sweep/$${hydra:job.num}' $(ARGS)

demo: setup      ## the whole road on SmolLM2-135M, no GPU needed
	$(PY) -m demo.model
	$(MAKE) respond extract train export eval EXP=demo

clean:           ## remove run folders
	rm -rf runs
