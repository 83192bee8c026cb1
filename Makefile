# Two commands on a fresh machine: `make demo` and `make test`. Both create .venv and install what they need.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
DEMO_FLAGS ?=

# The stamps hold what was installed with, so that another torch or interpreter installs again.
KEY := $(PYTHON) $(TORCH)
BASE := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test lint types tests clean FORCE

help:
	@echo "make demo   train the embedded vision-language model and show accuracy before and after (one to five minutes)"
	@echo "make test   lint, types, tests"
	@echo "Another torch: make demo TORCH=torch    Another interpreter: make demo PYTHON=python3.12"

ifneq ($(KEY),$(shell cat $(BASE) 2>/dev/null))
$(BASE): FORCE
endif
FORCE:

$(BASE): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@echo '$(KEY)' > $@

$(DEV): $(BASE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

demo: $(BASE)
	$(BIN)/vgr-trl demo $(DEMO_FLAGS)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/mypy

tests: $(DEV)
	@scripts/install_chromium.sh
	$(BIN)/python -m pytest -n 2

test: lint types tests

clean:
	rm -rf $(VENV)

# The page of `vgr-trl report` from its sources; needs Node.js 20 and npm, which neither users nor tests need.
.PHONY: report-page
report-page:
	cd report_page && npm ci --no-fund --no-audit && npm run build

# TRL's own tests of GRPOTrainer against DAPOTrainer; by hand, with a git copy of TRL.
HARNESS ?= ../shared/trlcompat
.PHONY: trl-tests
trl-tests: $(DEV)
	PYTHON=$(abspath $(BIN))/python TRAINER_UNDER_TEST=vgr_trl:DAPOTrainer CONFIG_UNDER_TEST=vgr_trl:DAPOConfig \
	  $(HARNESS)/run.sh --all

# Training steps with a real vLLM on a CPU, in an environment of its own; by hand.
VLLM := .venv-vllm
.PHONY: vllm-tests
vllm-tests: $(VLLM)/.installed
	PYTHONPATH=tests/with_vllm/site $(VLLM)/bin/python -m pytest tests/with_vllm

$(VLLM)/.installed: pyproject.toml tests/with_vllm/requirements.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet "$(TORCH)"
	$(VLLM)/bin/python -m pip install --quiet -r tests/with_vllm/requirements.txt
	$(VLLM)/bin/python -m pip uninstall --quiet -y torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@
