# One command per task; each sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: help demo demo-rl demo-multimodal test test-extended test-torch-versions lint docs bench bench-balance clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 24

$(STAMP): pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt torch 'setuptools>=77'
	$(PY) -m pip install --quiet --no-compile --no-build-isolation --disable-pip-version-check -c constraints.txt -e '.[dev,docs,plot,examples]'
	touch $@

demo: $(STAMP)  ## train a small Qwen2 three ways on 2 CPU ranks and compare them (runs/demo)
	$(VENV)/bin/odc bench demo --out runs/demo

demo-rl: $(STAMP)  ## reinforcement learning (GRPO) three ways on 2 CPU ranks, compared (runs/rl)
	$(VENV)/bin/odc bench demo-rl --out runs/rl

demo-multimodal: $(STAMP)  ## train a tiny Qwen2.5-Omni four ways on 2 CPU ranks and compare them (runs/multimodal)
	$(VENV)/bin/odc bench multimodal --out runs/multimodal

# Hundreds of interpreters are started: each would compile all of odc, should the environment forbid to keep that.
SHARED_TESTS = env --default-signal=INT PYTHONDONTWRITEBYTECODE= $(PY) tests/supervising.py tests/sharing.py

test: $(STAMP)  ## the tests, in three processes
	$(SHARED_TESTS)

test-extended: $(STAMP)  ## all tests and all combinations (about twice as long)
	$(SHARED_TESTS) -m "extended or not extended"

TORCH_VERSIONS ?= 2.9.1 2.10.0 2.11.0 2.12.1 2.13.0 2.14.1

test-torch-versions:  ## the FSDP tests under each supported torch, 5 to 7 GB each (TORCH_VERSIONS="2.10.0 2.12.1")
	PYTHON=$(PYTHON) tests/torch_versions.sh $(TORCH_VERSIONS)

lint: $(STAMP)  ## ruff, then mypy --strict on the package
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy -p odc

docs: $(STAMP)  ## the documents as a site, with the reference (build/docs/index.html); a warning is an error
	$(PY) -m sphinx --quiet --fail-on-warning --keep-going -b html docs build/docs

bench: $(STAMP)  ## bandwidth of the primitives against gloo and plain copies (runs/primitives.json)
	mkdir -p runs
	$(VENV)/bin/odc bench primitives --json runs/primitives.json

bench-balance: $(STAMP)  ## the paper's Tables 4 and 6; quality of partitions, post-balancing (runs/*.json; about 12 minutes)
	$(VENV)/bin/odc bench tables --json runs/tables.json
	$(VENV)/bin/odc bench partition-quality --json runs/partition_quality.json
	$(VENV)/bin/odc bench post-balance --json runs/post_balance.json

clean:  ## remove everything the other targets made
	rm -rf $(VENV) .venv-torch build runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find -P . -name __pycache__ -type d -prune -exec rm -rf {} +
