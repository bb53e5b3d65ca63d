"""Training without noise takes the steps that it took when tests/trajectories.json was written, and both loops take
the same.

On the processor and with the versions that the file names, all trainable parameters must be the same bit for bit after
each step. Elsewhere kernels round otherwise, so bits are not compared there: how far the parameters moved in the end
must be the same, in eight projections, to 1e-4 of the largest. tests/trajectories.py makes the runs, and says how to
write the file anew.
"""

import itertools
import json

import numpy as np
import pytest
import torch
import trajectories
from trajectories import CELLS, CELLS_OF_RANKS, FOLLOW, MODES, RANKS, TASKS, name_of, pin, run

PINNED = json.loads(trajectories.PINS.read_text())
SAME_MACHINE = PINNED["fingerprint"] == trajectories.fingerprint()
TOLERANCE = 1e-4  # of projections, on other machines

pytestmark = pytest.mark.filterwarnings("ignore:dp_seed")


@pytest.fixture(scope="module")
def ranks():
    """Pins of all cells of several processes, from one launch."""
    return trajectories.pins_of_ranks()


def check(name, seen):
    """The projections anywhere, the bits of each step on the machine of the pins."""
    pinned = PINNED["trajectories"][name]
    off = np.abs(np.subtract(seen["moved"], pinned["moved"])).max() / np.abs(pinned["moved"]).max()
    assert off <= TOLERANCE, f"{name}: projections of the movement are off by {off:.1e} of the largest"
    if SAME_MACHINE:
        other = [step for step, (a, b) in enumerate(zip(seen["sha256"], pinned["sha256"], strict=True), 1) if a != b]
        assert not other, f"{name}: other bits after steps {other}, though projections agree to {off:.1e}"


def test_every_cell_has_a_pin():
    assert list(PINNED["trajectories"]) == [name_of(cell) for cell in CELLS] + [
        name_of(cell, RANKS) for cell in CELLS_OF_RANKS
    ]


@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_trajectory_is_the_pinned_one(cell):
    check(name_of(cell), pin(run(*cell)))


@pytest.mark.parametrize("cell", CELLS_OF_RANKS, ids=name_of)
def test_trajectory_of_ranks_is_the_pinned_one(ranks, cell):
    """Two gloo processes, which end with the same parameters."""
    name = name_of(cell, RANKS)
    check(name, ranks[name])


@pytest.mark.parametrize("task", TASKS)
def test_some_examples_are_clipped_and_some_are_not(task):
    """In every trajectory, as the loop that is told the norms sees it."""
    norms = torch.cat(run("PrivacyEngine", "ghost", task).norms)
    clipped = (norms > TASKS[task].bound).float().mean()
    assert 0.2 < clipped < 0.8


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("mode", MODES)
def test_both_loops_take_the_same_steps(mode, task):
    """Bit for bit, but where the loop divides the losses by a batch size of 3 in their mean and the clipper multiplies
    by it again.

    So in ghost and fast_gradient, which are handed the losses of the examples, for all models; in book_keeping and
    per_sample for physical batches of 2 (and 1), and for those of 3 by the sum of the losses. By their mean those
    agree to 1e-6.
    """
    by_trainer, by_engine = run("DPTrainer", mode, task).points, run("PrivacyEngine", mode, task).points
    if mode in FOLLOW and TASKS[task].physical == 3:
        for a, b in zip(by_trainer, by_engine, strict=True):
            assert (a - b).norm() <= 1e-6 * a.norm()
        by_engine = trajectories.by_engine(TASKS[task], mode, "sum").points
    assert len(by_trainer) == len(by_engine) == trajectories.STEPS + 1
    assert all(torch.equal(a, b) for a, b in zip(by_trainer, by_engine, strict=True))
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(by_trainer))
