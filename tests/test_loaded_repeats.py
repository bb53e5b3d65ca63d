"""Two indices behind which one stored row stands, seen when both are loaded, whatever class the data set has."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from layers import Calls
from neighbours import At, Task, points, train
from torch import nn

from dp_transformers.data.stored_rows import refuse_rows_loaded_from_one

pytestmark = pytest.mark.filterwarnings("ignore:dp_seed")
REFUSED = "are one stored row"
SIZE = 12
X, Y = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(0)), torch.arange(SIZE) % 3
BASE = points(SIZE)


@dataclasses.dataclass
class Point:
    x: torch.Tensor
    label: int


POINTS = [Point(x, int(y)) for x, y in zip(X, Y, strict=True)]
PAIRS = [(x, int(y)) for x, y in zip(X, Y, strict=True)]
NESTED = [("a", (x,)) for x in X]
NUMBERS = X.numpy()
STORED = {
    "dict": lambda i: BASE[i],
    "new dict of the same tensors": lambda i: dict(BASE[i]),
    "views": lambda i: {"x": X[i], "labels": Y[i]},
    "tuple of views": lambda i: (X[i], Y[i]),
    "one tensor": lambda i: X[i],
    "arrays": lambda i: {"x": NUMBERS[i]},
    "objects": lambda i: POINTS[i],
    "tuple of a tensor and a number": lambda i: PAIRS[i],
    "tuple in a tuple": lambda i: NESTED[i],
}
PROTOTYPES, MASK = X[:2], torch.ones(6)
OWN = {
    "copies": lambda i: {"x": X[0].clone(), "labels": Y[0].clone()},
    "equal text and a mask for all": lambda i: {"text": "a", "mask": MASK},
    "a prototype with a number": lambda i: (PROTOTYPES[i % 2], i % 2),
    "an image for all with its own words": lambda i: {"image": MASK, "ids": X[i]},
    "numbers and words": lambda i: 7,
    "constants": lambda i: (0, "b"),
    "constants in a tuple": lambda i: ("a", (0, None)),
    "none": lambda i: None,
    "scalars": lambda i: {"x": np.float32(1), "y": 2},
    "empty": lambda i: {"x": torch.zeros(0)},
}


def draw(read, numbers, copies=1):
    data = At(read, numbers)
    refuse_rows_loaded_from_one(range(len(data)), [data[i] for i in range(len(data))], copies)


@pytest.mark.parametrize("stored", STORED)
def test_a_stored_row_that_comes_again_is_named(stored):
    draw(STORED[stored], range(SIZE))
    draw(STORED[stored], [3, 1, 3], copies=2)
    with pytest.raises(ValueError, match=rf"rows 1 and 5 .*{REFUSED} \(2 of this draw are\)"):
        draw(STORED[stored], [0, 4, 2, 3, 5, 4])
    with pytest.raises(ValueError, match=REFUSED):
        draw(STORED[stored], [3, 1, 3, 3], copies=2)


@pytest.mark.parametrize("own", OWN)
def test_equal_rows_and_what_rows_share_beside_something_else_are_no_proof(own):
    draw(OWN[own], range(SIZE))


def test_rows_that_a_cache_made_one_are_refused_and_a_copy_is_the_way_out():
    @functools.cache
    def tokens(text):
        return {"ids": [ord(c) for c in text]}

    with pytest.raises(ValueError, match="let the data set return a copy of each"):
        draw(lambda i: tokens("ab"[i % 2]), range(3))
    draw(lambda i: dict(tokens("ab"[i % 2])), range(3))


def losses(outputs, labels):
    return F.cross_entropy(outputs, labels, reduction="none")


def test_groups_of_rows_may_come_as_often_as_they_are_counted_for():
    task = Task(
        lambda: Calls(lambda m, x: m.layer(x), layer=nn.Linear(6, 3)),
        At(STORED["dict"], [*range(SIZE), 4]),
        loss=losses,
        bound=0.3,
    )
    task.arguments = {"max_examples_per_person": 2}
    train("trainer", task)
