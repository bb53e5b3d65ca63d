"""benchmarks/accuracy.py: a sweep goes on where it was stopped, and the tables of the pages are those of its results."""

import json
import math

import pytest

from benchmarks import accuracy


def row(epsilon, seed, score, flags=()):
    return {
        "epsilon": epsilon,
        "seed": seed,
        "test_accuracy": score,
        "noise_multiplier": 1.5,
        "majority": 0.5,
        "flags": list(flags),
        "seconds": 1.0,
    }


@pytest.fixture
def recipe(monkeypatch):
    """Runs that cost nothing; the list of those that were asked for."""
    asked = []

    def run(epsilon, seed, flags, threads):
        asked.append((epsilon, seed))
        return row(epsilon, seed, 0.7 + seed / 100, flags)

    monkeypatch.setattr(accuracy, "run", run)
    return asked


def test_a_sweep_goes_on_where_it_was_stopped(recipe, tmp_path, capsys):
    results = tmp_path / "runs.jsonl"
    accuracy.main(["--results", str(results), "--epsilons", "2", "inf", "--seeds", "1"])
    assert recipe == [(2.0, 1), (math.inf, 1)]
    accuracy.main(["--results", str(results), "--epsilons", "2", "inf", "--seeds", "1", "5", "3"])
    assert recipe[2:] == [(2.0, 5), (math.inf, 5), (2.0, 3), (math.inf, 3)]
    assert len([json.loads(line) for line in results.read_text().splitlines()]) == 6
    assert "| 2 | 1.50 | 73.0% | 71.0% to 75.0% | 3 |" in capsys.readouterr().out
    accuracy.main(["--results", str(results), "--epsilons", "2", "--seeds", "1", "--", "--lora_r", "4"])
    assert recipe[6:] == [(2.0, 1)], "runs with other flags are others"


def test_the_table_is_sorted_and_ends_without_privacy():
    lines = accuracy.table([row(math.inf, 1, 0.8), row(8.0, 1, 0.7), row(1.0, 1, 0.6)])
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| 1", "| 8", "| ∞ (not private)"]


def test_the_picture_is_drawn(tmp_path):
    accuracy.draw([row(1.0, 1, 0.6), row(math.inf, 1, 0.8), row(math.inf, 2, 0.9)], tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("page", accuracy.PAGES, ids=lambda page: page.name)
def test_pages_have_the_table_of_the_results(page):
    text = page.read_text()
    assert len(accuracy.PLACE.findall(text)) == 1
    assert accuracy.PLACE.sub(accuracy.in_place(accuracy.read(accuracy.RESULTS, [])), text) == text
