.PHONY: test power lint format bench

test:
	python -m pytest -n 2 --dist loadfile --whole-tables

power:
	python tests/planted_bugs.py

lint:
	ruff check .
	ruff format --check .
	lint-imports
	pyrefly check

format:
	ruff check --fix .
	ruff format .

bench:
	mkdir -p outputs/benchmarks
	for name in throughput trainer trl memory layers end_to_end precision scaling overhead startup noise contract; do \
		python -m benchmarks.$$name --quick --json outputs/benchmarks/$$name.json || exit 1; \
	done
	python -m benchmarks.report outputs/benchmarks/*.json --output outputs/benchmarks/RESULTS.md
