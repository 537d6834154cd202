# `make check` is what has to be green before a commit; `.ci/run` runs it all on a clean machine.
.PHONY: check format lint types layers fast test bench site

check: lint types layers fast

format:
	ruff format
	ruff check --fix

lint:
	ruff check
	ruff format --check

types:
	mypy

layers:
	lint-imports

fast:
	pytest tests/unit tests/contract

test:
	pytest

bench:
	python -m benchmarks all --check

site:
	sphinx-build -q -W --keep-going -c docs . site
