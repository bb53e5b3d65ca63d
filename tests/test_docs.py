"""docs/extending.md: every block runs, and what each example claims is so. docs/architecture.md: its lists are those
of the code."""

import doctest
import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import get_args

import dp_accounting as dp
import numpy as np
import pytest
import torch
from layers import ALL_MODES, check
from scipy import stats
from test_resume import Classifier, build
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, default_data_collator

import dp_transformers
from dp_transformers import DPTrainer, Mechanism, PerExampleClipper, clipping
from dp_transformers.accounting import PrivacyAccountant
from dp_transformers.clipping.errors import SelfCheckError
from dp_transformers.clipping.layer_rule import layer_rule
from dp_transformers.clipping.modes import MODES
from dp_transformers.clipping.terms import Outer, Term
from dp_transformers.ledger import LEDGER_NAME

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text()
MAP = (ROOT / "docs" / "architecture.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
LONGEST = 20


def blocks(text):
    return re.findall(r"```python\n(.*?)```", text, re.S)


@pytest.fixture(scope="module")
def page():
    """The names that the page defines, after all its blocks have run; what each training spent."""
    torch.manual_seed(0)
    module, spent = ModuleType("extending"), []
    sys.modules["extending"] = module  # checkpoints of the Trainer pickle the mechanism
    common, *examples = blocks(PAGE)
    exec(compile(common, "docs/extending.md", "exec"), vars(module))
    train = module.train
    module.train = lambda model, mechanism: spent.append(train(model, mechanism))
    for example in examples:
        exec(compile(example, "docs/extending.md", "exec"), vars(module))
    module.train, module.spent = train, spent
    yield module
    del sys.modules["extending"]


def test_each_example_is_short_and_trains(page):
    assert list(SECTIONS) == ["A layer", "A clipping function", "A sampling scheme", "A noise mechanism"]
    for heading, text in SECTIONS.items():
        (code,) = blocks(text)
        lines = [line for line in code.splitlines() if line.strip()]
        assert len(lines) <= LONGEST, f"{heading}: {len(lines)} lines"
        assert "What makes it private" in text and "In the library" in text
    assert len(page.spent) == 4 and all(s.private and s.verified and s.steps == 10 for s in page.spent)
    kinds = [(s.mechanism.sampling.kind, s.mechanism.clipping.kind, s.mechanism.noise.kind) for s in page.spent]
    assert kinds == [
        ("poisson", "flat", "independent"),
        ("poisson", "auto_s", "independent"),
        ("truncated_poisson", "flat", "independent"),
        ("poisson", "flat", "falling"),
    ]
    for spent in page.spent:
        assert Mechanism.from_dict(spent.mechanism.to_dict()) == spent.mechanism


# ---- the map ----


@pytest.mark.parametrize("package", ["dp_transformers", "dp_transformers.clipping"])
def test_the_map_has_the_layers_of_the_import_contracts(package):
    (shown,) = re.findall(rf"<!-- layers: {package} -->\n```text\n(.*?)```\n\n(?=\|)(.*?)\n\n", MAP, re.S)
    rows = [set(line.split(" | ")) for line in shown[0].splitlines()]
    contracts = re.findall(r"^layers = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    layers = contracts[package != "dp_transformers"]
    assert rows == [set(line.replace("dp_transformers.", "").split(" | ")) for line in re.findall(r'"(.*)",', layers)]
    described = {
        name for first in re.findall(r"^\| (`[^|]*) \|", shown[1], re.M) for name in re.findall(r"`(\w+)`", first)
    }
    assert described == set().union(*rows), "each room is described, and no other"
    folder = ROOT.joinpath(*package.split("."))
    assert described == {
        path.stem for path in folder.iterdir() if path.stem[0] not in "_." and path.suffix in ("", ".py")
    }


@pytest.mark.parametrize(
    ("table", "names"),
    [("terms", [t.__name__ for t in get_args(Term)]), ("modes", list(MODES))],
    ids=["terms", "modes"],
)
def test_the_map_has_every_term_and_mode(table, names):
    (shown,) = re.findall(rf"<!-- table: {table} -->\n(.*?)\n\n", MAP, re.S)
    assert sorted(re.findall(r"^\| `(\w+)` \|", shown, re.M)) == sorted(names)


def test_the_glossary_is_sorted_and_in_whole_sentences():
    (glossary,) = re.findall(r"^## Glossary\n.*?\|---\|---\|\n(.*)", MAP, re.M | re.S)
    entries = [line.strip("| ").split(" | ") for line in glossary.splitlines()]
    words = [word.lower() for word, _ in entries]
    assert words == sorted(words) and all(meaning.endswith(".") for _, meaning in entries)


@pytest.mark.parametrize(
    "page", [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name
)
def test_files_and_pages_that_are_named_exist(page):
    text = page.read_text()
    named = re.findall(r"`([\w/]+\.py)`", text)
    assert all((ROOT / name).exists() or (ROOT / "dp_transformers" / name).exists() for name in named), named
    linked = [link.partition("#")[0] for link in re.findall(r"\]\((?!http)([^)]+)\)", text)]
    assert all((page.parent / link).exists() for link in linked), linked


def test_the_blocks_of_the_readme_run(tmp_path, monkeypatch):
    """From top to bottom, with data and a small model of what each of them is about."""
    monkeypatch.chdir(tmp_path)
    config = BertConfig(vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    data = TensorDataset(torch.randn(60, 3), torch.arange(60) % 2)
    train = [{"input_ids": [i % 30, 1, 2], "attention_mask": [1, 1, 1], "labels": i % 2} for i in range(1100)]
    names = {
        "model": BertForSequenceClassification(config),
        "train": train,
        "test": train[:8],
        "collator": default_data_collator,
        "torch": torch,
    }
    trainer, loop, clipper, mechanism = blocks((ROOT / "README.md").read_text())
    exec(compile(trainer, "README.md", "exec"), names)
    spent = names["trainer"].privacy_spent()
    assert 0 < spent.epsilon <= 8 and spent.verified
    model = nn.Linear(3, 2)
    names |= {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": DataLoader(data, batch_size=30),
    }
    exec(compile(loop, "README.md", "exec"), names)
    spent = names["engine"].privacy_spent(1e-6)
    assert 7.9 < spent.epsilon <= 8 and spent.steps == 20, (
        "the loop takes as many steps as the noise is calibrated for"
    )
    names["engine"].detach()
    model.zero_grad()
    names["x"], names["y"] = data.tensors
    exec(compile(clipper, "README.md", "exec"), names)
    assert names["norms"].shape == (60,) and model.weight.grad.norm() > 0
    exec(compile(mechanism, "README.md", "exec"), names)


# ---- the layer ----


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("shape", [(4, 3), (4, 6, 3), (4, 2, 5, 3)], ids=str)
def test_the_layer_is_exact(page, shape, mode):
    layer = page.Sine(3, 5)
    with PerExampleClipper(nn.Sequential(layer), 1.0) as clipper:
        assert not clipper.owners[0].is_rerun, "it has its rule"
    check(nn.Sequential(layer, nn.Linear(5, 2)), torch.randn(shape), mode)
    check(nn.Sequential(page.Sine(3, 3), tied := page.Sine(3, 3), tied), torch.randn(shape), mode)


def test_a_wrong_rule_is_caught(page):
    class Wrong(page.Sine):
        def forward(self, x):
            return super().forward(x)

    @layer_rule(Wrong)
    def wrong(layer, activations, backprops):
        return {layer.weight: Outer(backprops[:, None], activations[0][:, None])}  # without the slope

    with pytest.raises(SelfCheckError, match="clipping is not exact"):
        page.train(nn.Sequential(Wrong(3, 8), nn.Linear(8, 2)), Mechanism(**page.parts))


# ---- the clipping function ----


def test_the_clipping_function_keeps_to_its_sensitivity(page):
    largest = torch.finfo(torch.float32).max
    norms_b = torch.cat([torch.tensor([0.0, 1e-38, largest]), torch.logspace(-12, 12, 1001)])
    for bound, gamma in ((1.0, 0.01), (0.3, 1e-4), (7.0, 2.0)):
        coefficients_b = page.AutomaticClipping(bound, gamma).coefficients(norms_b)
        assert bool(((coefficients_b >= 0) & coefficients_b.isfinite()).all())
        assert float((coefficients_b * norms_b).max()) <= bound * (1 + 1e-6)


def test_an_example_changes_the_clipped_sum_by_the_sensitivity_at_most(page):
    clipping = page.AutomaticClipping(0.7)
    model, x, y = nn.Linear(3, 2), torch.randn(20, 3) * torch.logspace(-4, 4, 20)[:, None], torch.arange(20) % 2

    def clipped_sum(rows):
        model.zero_grad()
        losses = nn.functional.cross_entropy(model(x[rows]), y[rows], reduction="none")
        norms_b = clipper.backward(losses)
        return torch.cat([p.grad.flatten() for p in model.parameters()]).double(), norms_b

    with PerExampleClipper(model, clipping) as clipper:
        total, norms_b = clipped_sum(torch.arange(20))
        changes_b = torch.stack([(total - clipped_sum(torch.arange(20) != i)[0]).norm() for i in range(20)])
    assert norms_b.min() < 1e-2 < 1e2 < norms_b.max()
    assert float(changes_b.max()) <= clipping.sensitivity * (1 + 1e-5)
    expected_b = 0.7 * norms_b / (norms_b + clipping.gamma)
    assert torch.allclose(changes_b.float(), expected_b, rtol=1e-3, atol=1e-6)


# ---- the sampling ----


def test_the_sampling_draws_as_its_event_says(page):
    n, q, largest, count = 30, 0.3, 11, 20_000
    sampling = page.TruncatedPoisson(n, n * q, largest)
    draws = list(itertools.islice(sampling.draws(np.random.default_rng(1), 0), count))
    assert all(
        len(set(draw.tolist())) == len(draw) and (len(draw) == 0 or 0 <= draw.min() <= draw.max() < n)
        for draw in draws
    )
    expected = stats.binom.pmf(np.arange(largest + 1), n, q)
    expected[largest] = stats.binom.sf(largest - 1, n, q)
    seen = np.bincount([len(draw) for draw in draws], minlength=largest + 1)
    assert (
        len(seen) == largest + 1
        and stats.chisquare(seen[2:], count * expected[2:] * seen[2:].sum() / (count * expected[2:].sum())).pvalue
        > 1e-3
    )
    rate = float(expected @ np.arange(largest + 1)) / n
    taken = np.zeros((count, n))
    for row, draw in zip(taken, draws, strict=True):
        row[draw] = 1
    assert np.abs(taken.mean(0) - rate).max() < 4.5 * (rate * (1 - rate) / count) ** 0.5
    correlation = np.corrcoef(taken[:-1, 0], taken[1:, 0])[0, 1]
    assert abs(correlation) < 4.5 / count**0.5, "steps are independent"


def test_the_sampling_costs_what_dp_accounting_says(page):
    spent = page.spent[2]
    accountant = dp.pld.PLDAccountant(dp.NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(dp.dp_event.TruncatedSubsampledGaussianDpEvent(60, 0.2, 20, 1.0), 10)
    assert spent.epsilon == pytest.approx(accountant.get_epsilon(1e-3), rel=1e-9)
    assert spent.epsilon > Mechanism(**page.parts).epsilon(1e-3), (
        "whoever pushes others out of a draw is seen in what they do not add"
    )
    with pytest.raises(ValueError, match="no bound"):
        spent.mechanism.epsilon(1e-3, accountant="rdp")


# ---- the noise ----


def test_the_noise_has_the_deviation_that_is_accounted_for(page):
    noise = page.FallingNoise(2.0, half_life=5)
    accountant = PrivacyAccountant()
    for step in range(10):
        accountant.step(noise_multiplier=2.0 * 0.5 ** (step / 5), sample_rate=0.2)
    assert page.spent[3].epsilon == pytest.approx(accountant.epsilon(1e-3), rel=1e-9)
    source, shapes = noise.source(None), [(300, 200), (7,), (40_001,)]
    for std in (0.5, 3.0):
        first, second = ([torch.zeros(shape) for shape in shapes] for _ in range(2))
        source.add_(first, std)
        source.add_(second, std)
        numbers, others = (torch.cat([x.flatten() for x in grads]) / std for grads in (first, second))
        assert stats.kstest(numbers.numpy(), "norm").pvalue > 1e-4
        for a, b in ((numbers, others), (numbers[1:], numbers[:-1])):
            assert abs(float((a * b).mean())) < 4.5 / len(a) ** 0.5, "steps and coordinates are independent"


# ---- in the Trainer ----


@pytest.mark.parametrize("part", ["clipping", "noise"])  # a truncated draw: tests/test_mechanism_in_loops.py
def test_each_part_trains_in_the_trainer(page, tmp_path, part):
    own = {"clipping": page.AutomaticClipping(0.5), "noise": page.FallingNoise(2.0, 5)}
    mechanism = Mechanism(**{**page.parts, "sampling": page.PoissonSampling(40, 8), "steps": 6, part: own[part]})
    options = {
        "target_epsilon": None,
        "mechanism": mechanism,
        "accountant": "pld",
        "expected_batch_size": None,
        "max_steps": -1,
    }
    trainer = build(DPTrainer, tmp_path, self_check=True, logging_strategy="no", model=Classifier(), **options)
    before = [p.clone() for p in trainer.model.parameters()]
    trainer.train()
    begin, *steps = [json.loads(line) for line in (tmp_path / LEDGER_NAME).read_text().splitlines()]
    assert Mechanism.from_dict(begin["mechanism"]) == mechanism and len(steps) == 6
    assert all(not torch.equal(p, q) for p, q in zip(before, trainer.model.parameters(), strict=True))


def test_each_part_is_calibrated(page):
    for change in ({"noise": page.FallingNoise(2.0, 5)}, {"clipping": page.AutomaticClipping(0.5)}):
        mechanism = Mechanism(**{**page.parts, "steps": 3, **change})
        calibrated = mechanism.calibrated(target_epsilon=3.0, target_delta=1e-3, accountant="rdp")
        assert 2.9 < calibrated.epsilon(1e-3, accountant="rdp") <= 3.0
        assert replace(calibrated, noise=mechanism.noise) == mechanism


# ---- docstrings ----


@pytest.mark.parametrize("name", sorted({*dp_transformers.__all__, *clipping.__all__}))
def test_every_public_name_has_an_example_that_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    public = getattr(dp_transformers if name in dp_transformers.__all__ else clipping, name)
    (found,) = doctest.DocTestFinder(recurse=False).find(public, name, globs={})
    assert found.examples, f"{name} has no example"
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(found, out=said.append)
    assert not said, "".join(said)
