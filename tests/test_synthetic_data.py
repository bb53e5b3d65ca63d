"""Synthetic tables: the schema's codes, rows that are held to it, what is said of them, and the recipe to its report."""

import json
import random
import sys

import fine_tuning
import numpy as np
import pandas as pd
import pytest
import synthetic_data
import tables
import torch

from dp_transformers.reports.certificate import disagreements, read

SPECS = {
    "sex": {"type": "category", "values": ["f", "m"], "missing": True},
    "job": {"type": "category", "values": ["cook", "smith", "other"]},
    "age": {"type": "integer", "min": 18, "max": 99},
    "visits": {"type": "integer", "edges": [0, 1, 2, 5, 20], "missing": True},
    "income": {"type": "number", "edges": [0, 0.5, 1, 30], "decimals": 1},
    "seen": {"type": "date", "min": "2020-01-01", "max": "2020-12-31", "bins": 12},
}
SCHEMA = tables.Schema.of(SPECS)


def every_code(schema, times=5):
    """Every code of every column at least so many times, in no order."""
    draw = np.random.default_rng(0)
    most = times * max(schema.sizes)
    return np.stack([draw.permutation(np.arange(most) % size) for size in schema.sizes], 1)


def test_codes_and_values_belong_to_each_other():
    codes = every_code(SCHEMA, 40)
    rows = SCHEMA.decode(codes, np.random.default_rng(0))
    again, kept, moved = SCHEMA.encode(rows)
    assert kept.all() and (again == codes).all()
    assert sum(count for of in moved.values() for count in of.values()) == 0
    assert set(rows.sex) == {"f", "m", ""} and set(rows.visits) == {*map(str, range(21)), ""}
    ages, incomes = rows.age.astype(int), rows.income.astype(float)
    assert (ages.min(), ages.max()) == (18, 99) and 0 <= incomes.min() < 0.2 and 29 < incomes.max() <= 30
    assert "2020-01-01" <= rows.seen.min() < "2020-02" and "2020-11-30" < rows.seen.max() <= "2020-12-31"


@pytest.mark.parametrize(
    ("column", "value", "becomes"),
    [
        ("sex", "", ""), ("sex", "x", None), ("job", "baker", "other"), ("job", "", None),
        ("age", "17", "18 19 20"), ("age", "1e9", "97 98 99"), ("age", "old", None), ("age", "", None), ("age", "30.0", "28 29 30"),
        ("visits", "", ""), ("visits", "4", "2 3 4"), ("visits", "7", " ".join(map(str, range(5, 21)))),
        ("income", "-3", "0.0 0.1 0.2 0.3 0.4"), ("income", "0.4999", "0.5 0.6 0.7 0.8 0.9"),
        ("seen", "2020-01-01T23:10", " ".join(f"2020-01-{day:02}" for day in range(1, 31))),
        ("seen", "2031-01-01", " ".join(f"2020-12-{day:02}" for day in range(2, 32))), ("seen", "soon", None),
    ],
)  # fmt: skip
def test_values_outside_of_the_schema(column, value, becomes):
    row = {"sex": "f", "job": "cook", "age": "20", "visits": "0", "income": "0.5", "seen": "2020-05-05"}
    codes, kept, moved = SCHEMA.encode(pd.DataFrame([row | {column: value}]))
    written = set(SCHEMA.decode(codes.repeat(600, 0), np.random.default_rng(0))[column])
    assert written == (set() if becomes is None else set(becomes.split(" ")))
    assert kept[0] == (becomes is not None)
    counts = {(name, what): n for name, of in moved.items() for what, n in of.items() if n}
    is_other, is_clipped = value == "baker", value in ("17", "1e9", "-3", "2031-01-01")
    what = "left out" if becomes is None else "called other" * is_other or "clipped" * is_clipped
    assert counts == ({(column, what): 1} if what else {})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"type": "text"}, "has the type 'text'"),
        ({"type": "category", "min": 3}, "a category has no ['min']"),
        ({"type": "category"}, "needs values"),
        ({"type": "category", "values": ["1", 1.0]}, "values must differ"),
        ({"type": "integer", "min": 3}, "needs edges, or min and max"),
        ({"type": "integer", "min": 3, "max": 2}, "has no values"),
        ({"type": "integer", "edges": [1, "x"]}, "needs edges, or min and max"),
        ({"type": "date", "edges": ["2020-01-01", "2019-01-01", "2021-01-01"]}, "edges must increase"),
    ],
)
def test_a_schema_that_describes_no_table(spec, message):
    with pytest.raises(ValueError) as refused:
        tables.Schema.of({"x": spec})
    assert message in str(refused.value) and "column 'x'" in str(refused.value)


def test_a_model_without_training_writes_within_the_schema():
    torch.manual_seed(0)
    args = synthetic_data.ModelArguments(hidden_size=16, num_layers=1)
    model = synthetic_data.build_model(args, SCHEMA)
    torch.nn.init.normal_(model.lm_head.weight, std=3.0)  # no leaning to any column
    free = synthetic_data.write(model, SCHEMA, 70, 32, held=False)
    assert not ((free >= 0) & (free < SCHEMA.sizes)).all(1).any()
    codes = synthetic_data.write(model, SCHEMA, 70, 32)
    assert codes.shape == (70, len(SPECS)) and ((codes >= 0) & (codes < SCHEMA.sizes)).all()
    assert SCHEMA.encode(SCHEMA.decode(codes, np.random.default_rng(0)))[1].all()


def test_distances_of_known_tables():
    schema = tables.Schema.of({"a": SPECS["job"], "b": {"type": "integer", "min": 0, "max": 4, "missing": True}})
    x = np.array([[0, 0], [0, 4], [1, 2], [2, 5]])
    assert tables.marginals(x, x[:2], schema) == {"a": 0.5, "b": 0.5}
    assert tables.pairs(x, np.array([[0, 4], [0, 0], [1, 5], [2, 2]]), schema) == [0.5]
    far = tables.nearest(np.array([[0, 0], [1, 3], [2, 4]]), x, schema)
    np.testing.assert_allclose(far, [0, 0.125, 0.5])


def test_a_classifier_finds_what_there_is():
    schema, draw = tables.Schema.of(dict.fromkeys("abc", SPECS["job"])), np.random.default_rng(0)
    x = draw.integers(0, 3, (2000, 3))
    both, alone = x.copy(), x.copy()
    both[:, 2] = (x[:, 0] + x[:, 1]) % 3
    tokens = both + schema.first_tokens
    assert tables.accuracy(tokens[:1000, :2], both[:1000, 2], tokens[1000:, :2], both[1000:, 2]) > 0.9
    assert tables.told_apart(both[:1000], both[1000:], schema) < 0.56
    assert tables.told_apart(both, alone, schema) > 0.75


@pytest.fixture(scope="module")
def clinic(tmp_path_factory):
    """120 persons with one to four rows, in which the job follows from the sex; a missing value, and one too many."""
    folder, draw = tmp_path_factory.mktemp("clinic"), random.Random(0)
    rows = []
    for person in range(120):
        sex = draw.choice("fm")
        for _ in range(draw.randint(1, 4)):
            seen = f"2020-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}"
            rows.append(
                [
                    f"p{person}",
                    sex,
                    "cook" if sex == "f" else "smith",
                    draw.randint(18, 99),
                    draw.choice(["", 0, 1, 30]),
                    0.7,
                    seen,
                ]
            )
    table = pd.DataFrame(rows, columns=["patient", *SPECS])
    table.to_csv(folder / "table.csv", index=False)
    (folder / "schema.json").write_text(json.dumps(SPECS))
    return folder


@pytest.fixture
def call(monkeypatch, capsys):
    def call(*flags):
        monkeypatch.setattr(sys, "argv", ["synthetic_data", *map(str, flags)])
        try:
            return fine_tuning.run(synthetic_data.main)
        except SystemExit:
            return capsys.readouterr().err

    return call


def test_the_recipe_with_owners(clinic, tmp_path, call, capsys):
    out = tmp_path / "out"
    flags = ["--train_file", clinic / "table.csv", "--schema", clinic / "schema.json", "--privacy_unit_column", "patient",
             "--target_column", "job", "--output_dir", out, "--expected_batch_size", 30, "--max_steps", 3, "--target_delta", 1e-3,
             "--hidden_size", 16, "--num_layers", 1, "--num_rows", 90, "--use_cpu"]  # fmt: skip
    report = call(*flags)
    said = capsys.readouterr().out
    written = pd.read_csv(out / "synthetic.csv", dtype=str, keep_default_na=False)
    assert list(written) == list(SPECS) and len(written) == 90 and SCHEMA.encode(written)[1].all()
    figures = json.loads((out / "privacy_report.json").read_text())["real rows"]
    assert figures["valid"] == 1 and figures["values moved"]["visits"]["clipped"] > 0
    assert "100.0%" in said and "stays with you" in said and "visits: " in said and "clipped" in said
    certificate = json.loads((out / "privacy.json").read_text())
    assert certificate["unit"].startswith("one person") and report["num_examples"] == 96, (
        "a fifth of the persons is held out"
    )
    assert not disagreements(out, read(out)) and "real rows" not in certificate
    ties = json.loads((out / "synthetic.json").read_text())
    assert ties["rows"] == 90 and set(ties["sha256"]) == {
        "synthetic.csv",
        "schema.json",
        "model.safetensors",
        "privacy.json",
    }
    again = call(*flags, "--num_rows", 200)
    assert again["steps"] == 3 and len(pd.read_csv(out / "synthetic.csv")) == 200, "more rows cost nothing"
    (tmp_path / "other.json").write_text(json.dumps({name: SPECS[name] for name in ("sex", "job")}))
    started = [
        *flags,
        "--schema",
        tmp_path / "other.json",
        "--output_dir",
        tmp_path / "o",
        "--model_name_or_path",
        out,
    ]
    assert "is for another schema" in call(*started)


def test_a_draft_has_to_be_gone_through(clinic, tmp_path, call):
    file, table = tmp_path / "draft.json", ["--train_file", clinic / "table.csv", "--use_cpu", "--target_delta", 1e-3]
    assert "--draft_schema FILE" in call(*table, "--output_dir", tmp_path / "o")
    call(*table, "--draft_schema", file, "--privacy_unit_column", "patient")
    drafted = json.loads(file.read_text())
    assert "patient" not in drafted and drafted["visits"]["missing"] and drafted["seen"]["type"] == "date"
    assert "the schema is a draft" in call(*table, "--schema", file, "--output_dir", tmp_path / "o")
    del drafted[tables.UNREVIEWED]
    assert (
        tables.Schema.of(drafted).encode(pd.read_csv(clinic / "table.csv", dtype=str, keep_default_na=False))[1].all()
    )
    assert not (tmp_path / "o").exists()
