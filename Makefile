# Short names for what scripts/ does; nothing needs make.
.PHONY: help setup demo test test-all lint types format benchmarks docs wheel ci

help:
	@echo "make setup        install everything into .venv"
	@echo "make demo         a swarm on this machine and one node alone, 2 to 3 minutes"
	@echo "make test         lint, types and the quick tests"
	@echo "make test-all     every test"
	@echo "make lint         ruff, and plain words"
	@echo "make types        mypy"
	@echo "make format       ruff's layout, and its safe corrections"
	@echo "make benchmarks   list the benchmarks"
	@echo "make docs         build the documents as a site into build/site"
	@echo "make wheel        build the wheel into dist/"
	@echo "make ci           what CI runs"

setup:
	scripts/setup

demo:
	scripts/demo

test:
	scripts/test

test-all:
	scripts/test --all

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	scripts/plain-words

types: setup
	.venv/bin/mypy

format: setup
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

benchmarks:
	@echo "One command each, after scripts/setup:"
	@grep -l "__main__" benchmarks/*/[a-z]*.py | sed 's,/,.,g; s,\(.*\).py,    .venv/bin/python -m \1 --help,'

docs:
	scripts/site

wheel: setup
	.venv/bin/pip wheel --no-deps --wheel-dir dist .

ci:
	.ci/run
