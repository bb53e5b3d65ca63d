"""benchmarks/accuracy.py: a sweep goes on where it was stopped, and the tables of the pages are those of its results."""

import json
import math

import numpy as np
import pytest
import torch

from benchmarks import accuracy, definitions, glosses, mechanisms, persons
from benchmarks.pages import with_table
from dp_transformers import compute_epsilon


def row(epsilon, seed, score, trained="head"):
    return {"trained": trained, "epsilon": epsilon, "seed": seed, "test_accuracy": score, "noise_multiplier": 1.5, "majority": 0.5}  # fmt: skip


@pytest.fixture
def asked(monkeypatch):
    """Runs that cost nothing, and the list of those that were asked for."""
    asked = []

    def run(epsilon, seed, threads):
        asked.append((epsilon, seed))
        return row(epsilon, seed, 0.7 + seed / 100)

    monkeypatch.setattr(accuracy, "RUNS", {"head": run, "lora": run})
    return asked


def test_a_sweep_goes_on_where_it_was_stopped(asked, tmp_path, capsys):
    options = ["--results", str(tmp_path / "runs.jsonl"), "--epsilons", "2", "inf"]
    accuracy.main([*options, "--trained", "head", "--seeds", "1"])
    assert asked == [(2.0, 1), (math.inf, 1)]
    accuracy.main([*options, "--trained", "head", "--seeds", "1", "5", "3"])
    assert asked[2:] == [(2.0, 5), (math.inf, 5), (2.0, 3), (math.inf, 3)]
    assert len([json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]) == 6
    assert "| 2 | 1.50 | not measured | 73.0% (71.0 to 75.0, 3 seeds); 100.0% kept |" in capsys.readouterr().out
    accuracy.main([*options, "--trained", "lora", "--seeds", "1"])
    assert asked[6:] == [(2.0, 1), (math.inf, 1)], "what is trained makes another run"


def test_the_head_is_trained_as_private_as_it_says(monkeypatch):
    y = torch.arange(3000) % 2
    x = 0.1 * torch.randn(3000, 4) + y[:, None] - 0.5  # far apart
    monkeypatch.setattr(accuracy, "split", lambda seed: [(x[:2500], y[:2500]), (x[2500:], y[2500:])])
    monkeypatch.setattr(accuracy, "BATCH", 500)
    private, open_ended = (accuracy.run_head(epsilon, 1, 1) for epsilon in (2.0, math.inf))
    assert private["test_accuracy"] > 0.95 and open_ended["test_accuracy"] > 0.99
    spent = compute_epsilon(private["noise_multiplier"], 500 / 2500, private["steps"], accuracy.DELTA)
    assert 1.98 < spent <= 2 and private["steps"] == open_ended["steps"] == 15
    assert open_ended["noise_multiplier"] == 0


def test_the_page_has_the_table_of_the_mechanisms():
    text, rows = mechanisms.PAGE.read_text(), accuracy.read(mechanisms.RESULTS)
    assert with_table(text, "mechanisms", mechanisms.table(rows)) == text
    assert {row["setting"] for row in rows} == set(mechanisms.SETTINGS)


def test_the_page_has_the_table_of_the_persons():
    text, rows = persons.PAGE.read_text(), accuracy.read(persons.RESULTS)
    assert with_table(text, "persons", persons.table(rows)) == text
    assert {(row["data"], row["setting"]) for row in rows} == {(d, s) for d in persons.DATA for s in persons.NAMES}


def test_persons_are_trained_as_private_as_it_says(monkeypatch):
    y = torch.arange(900) % 2
    rows = (y[:, None] - 0.5 + 0.1 * torch.randn(900, 3), y, np.arange(900) // 3)  # far apart
    settings = {"persons": (2, 1.0, 0.5), "rows": (2, 1.0, 0.5), "group": (0, 1.0, 0.5), "none": (0, 1e6, 0.5)}
    data = persons.Data(lambda: rows, persons.linear, epsilon=8.0, expected_rows=60, steps=8, settings=settings)
    monkeypatch.setitem(persons.DATA, "toy", data)
    found = {setting: persons.run("toy", 1, setting) for setting in settings}
    assert all(row["test_accuracy"] > 0.9 for row in found.values())
    assert all(7.9 < found[s]["epsilon_of_a_person"] <= 8 for s in ("persons", "rows", "group"))
    assert [found[s]["rows_of_a_person"] for s in ("persons", "rows", "group")] == [2, 2, 3]


@pytest.mark.parametrize("benchmark", [definitions, glosses])
def test_the_page_has_the_table_of_its_texts(benchmark):
    text, rows = benchmark.PAGE.read_text(), accuracy.read(benchmark.RESULTS)
    assert rows and with_table(text, benchmark.RESULTS.stem, benchmark.table(rows)) == text


def test_glosses_are_definitions_with_their_classes(tmp_path):
    lines = [
        "  1 licence | of words",
        '00001740 05 n 01 dog 0 000 | barks; "a dog barked"  ',
        "00002 28 n 01 day 0 000 | 24 h",
    ]
    (tmp_path / "data.noun").write_text("\n".join(lines))
    glosses.write_csv(tmp_path / "data.noun", tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text().split() == ["text,label", "barks,2", "24", "h,25"]
    glosses.write_csv(tmp_path / "data.noun", tmp_path / "out.csv", named=True)
    assert (tmp_path / "out.csv").read_text().split() == ["text,label", "barks,animal", "24", "h,time"]
    trained, tested = definitions.split(tmp_path / "data.noun", seed=1)
    assert not trained, "what is tested is held out first"
    assert {(row["prompt"], row["text"]) for row in tested} == {("dog (animal):", " barks"), ("day (time):", " 24 h")}


@pytest.mark.parametrize("page", accuracy.PAGES, ids=lambda page: page.name)
def test_pages_have_the_table_of_the_results(page):
    text = page.read_text()
    assert with_table(text, "accuracy", accuracy.table(accuracy.read(accuracy.RESULTS))) == text
