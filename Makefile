# One command per task; each sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: help demo test lint bench bench-balance clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16

$(STAMP): pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,plot,examples]'
	touch $@

demo: $(STAMP)  ## train a small Qwen2 three ways on 2 CPU ranks and compare them (runs/demo)
	$(PY) -m odc.bench.demo --out runs/demo

test: $(STAMP)  ## all tests, cheapest layer first
	$(PY) -m pytest tests

lint: $(STAMP)  ## ruff, then mypy --strict on the installed package
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	rm -rf .lint build
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target .lint .
	rm -rf build
	cd .lint && ../$(PY) -m mypy --config-file ../pyproject.toml -p odc

bench: $(STAMP)  ## bandwidth of the primitives against gloo and plain copies (runs/primitives.json)
	mkdir -p runs
	$(VENV)/bin/torchrun --nproc-per-node 2 -m odc.bench.primitives --json runs/primitives.json

bench-balance: $(STAMP)  ## the paper's Tables 4 and 6; speed and quality of partitions (runs/*.json; about 10 minutes)
	$(PY) -m odc.bench.tables --json runs/tables.json
	$(PY) -m odc.bench.partition_speed --json runs/partition_speed.json
	$(PY) -m odc.bench.partition_quality --json runs/partition_quality.json

clean:  ## remove everything the other targets made
	rm -rf $(VENV) .lint build runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
