"""Opacus's examples, written anew: each trains in all three ways, private ones spend the same, and the page tells how
many lines change."""

import math
from pathlib import Path

import pytest
import torch

import dp_transformers
from benchmarks.opacus_examples.__main__ import CONTENDERS, EXAMPLES, example, lines_changed

opacus = pytest.importorskip("opacus")


PAGE = Path(__file__).parents[1] / "docs" / "from-opacus.md"


@pytest.mark.filterwarnings("ignore")  # of Opacus
@pytest.mark.parametrize("name", EXAMPLES)
def test_all_three_train_and_spend_the_same(name, monkeypatch):
    its, epochs = example(name), 2
    for engine_class in (dp_transformers.PrivacyEngine, opacus.PrivacyEngine):  # theirs takes long to calibrate by PRV
        monkeypatch.setitem(engine_class.__init__.__kwdefaults__, "accountant", "rdp")
    monkeypatch.setattr(its, "BATCH_SIZE", 16)
    torch.manual_seed(0)
    data, test = its.rows(64), its.rows(16)
    engines = {}
    for contender in CONTENDERS:
        weights = []
        for model, engine in getattr(its, contender)(data, epochs):
            assert math.isfinite(its.outcome(model, test))
            weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
            engines[contender] = engine
        before, after = weights
        assert torch.isfinite(after).all() and not torch.equal(before, after)
    ours, theirs = engines["private"], engines["opacus"]
    (sigma, rate, steps), (their_sigma, their_rate, their_steps) = *ours.history, *theirs.accountant.history
    assert (rate, steps) == (their_rate, their_steps) == (0.25, 8)
    assert sigma == pytest.approx(their_sigma, rel=0.01)
    assert ours.get_epsilon(its.DELTA) == pytest.approx(theirs.get_epsilon(its.DELTA), rel=0.01)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_page_has_the_lines(name):
    its = example(name)
    (line,) = (line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} |"))
    _, from_plain, from_opacus, *_ = (cell.strip() for cell in line.strip("|").split("|"))
    private, opacus = (lines_changed(its.plain, getattr(its, contender)) for contender in ("private", "opacus"))
    assert from_plain == f"{private}, {opacus}"
    assert from_opacus == str(lines_changed(its.opacus, its.private))
