.PHONY: test lint format bench

test:
	python -m pytest

lint:
	ruff check .
	ruff format --check .
	lint-imports

format:
	ruff check --fix .
	ruff format .

bench:
	python -m benchmarks.throughput --quick
