# Short names for what scripts/ does; nothing needs make.
.PHONY: help setup demo test test-all lint types format benchmarks wheel ci

help:
	@echo "make setup | demo | test | test-all | lint | types | format | benchmarks | wheel | ci"

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

types: setup
	.venv/bin/mypy

format: setup
	.venv/bin/ruff check --fix .

benchmarks:
	@echo "One command each, after scripts/setup:"
	@for file in $$(grep -l "__main__" benchmarks/[a-z]*.py); do echo "    .venv/bin/python -m benchmarks.$$(basename "$$file" .py) --help"; done

wheel: setup
	.venv/bin/pip wheel --no-deps --wheel-dir dist .

ci:
	.ci/run
