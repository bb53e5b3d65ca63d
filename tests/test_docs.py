"""The pages of docs/ and the README: their blocks run, and what they claim of the code, name or quote is so."""

import ast
import copy
import doctest
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import get_args

import chats
import dp_accounting as dp
import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers as hf
import typer
from datasets import Dataset
from layers import ALL_MODES, check
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser, default_data_collator

import dp_transformers
from dp_transformers import Mechanism, PerExampleClipper, clipping
from dp_transformers.cli.main import app
from dp_transformers.cli.train import recipes
from dp_transformers.clipping.modes import MODES
from dp_transformers.clipping.terms import Term
from dp_transformers.mechanism.accounting.events import phases_epsilon

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text()
MAP = "\n".join((ROOT / "docs" / name).read_text() for name in ("architecture.md", "inside-clipping.md"))
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
        ("poisson", "smooth", "independent"),
        ("my_truncated_poisson", "flat", "independent"),
        ("poisson", "flat", "falling"),
    ]
    for spent in page.spent:
        assert Mechanism.from_dict(spent.mechanism.to_dict()) == spent.mechanism


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
    rooms = {name.partition(".")[0] for name in set().union(*rows)}
    assert described == rooms, "each room is described, and no other"
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


@pytest.mark.parametrize(
    "page", [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name
)
def test_files_and_pages_that_are_named_exist(page):
    text = page.read_text()
    named = re.findall(r"`([\w/]+\.py)`", text)
    assert all((ROOT / name).exists() or (ROOT / "dp_transformers" / name).exists() for name in named), named
    linked = [link.partition("#")[0] for link in re.findall(r"\]\((?!http)([^)]+)\)", text)]
    assert all((page.parent / link).exists() for link in linked), linked


class Net(nn.Linear):
    """What a page calls the reader's own model."""

    def __init__(self):
        super().__init__(3, 2)


def of_the_trainer():
    """A classifier, data for it, and a collator."""
    config = BertConfig(vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    train = [{"input_ids": [i % 30, 1, 2], "attention_mask": [1, 1, 1], "labels": i % 2} for i in range(1100)]
    model = BertForSequenceClassification(config)
    return {"model": model, "train": train, "test": train[:8], "collator": default_data_collator}


def of_a_loop(num_outputs=2, positions=()):
    """A model of one layer, its optimizer, and data in a DataLoader."""
    x, y = torch.randn(60, *positions, 3), torch.randint(num_outputs, (60, *positions))
    model, dataset = nn.Linear(3, num_outputs), TensorDataset(x, y)
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(dataset, batch_size=30)
    names = {"model": model, "optimizer": optimizer, "loader": loader, "data_loader": loader, "x": x, "y": y}
    return {**names, "dataset": TensorDataset(torch.randn(1100, 3), torch.arange(1100) % 2)}


def of_a_generator(names):
    """A generator for the discriminator that the block before has made private."""
    generator = nn.Linear(4, 3)
    return {
        "engine": names["privacy_engine"],
        "discriminator": names["model"],
        "generator": generator,
        "generator_optimizer": torch.optim.SGD(generator.parameters(), lr=0.1),
        "generator_loss": torch.Tensor.mean,
        "z": torch.randn(5, 4),
    }


def of_public_rows():
    return dict(zip(("public_x", "public_y"), next(iter(of_a_loop()["data_loader"])), strict=True))


def of_a_draw():
    """A private loop after its backward pass on one batch of a draw."""
    names = of_a_loop()
    engine = dp_transformers.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=names["model"], optimizer=names["optimizer"], data_loader=names["loader"], noise_multiplier=1.0,
        max_grad_norm=1.0,
    )  # fmt: skip
    x, y = next(iter(loader))
    nn.functional.cross_entropy(model(x), y).backward()
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    return {"engine": engine, "optimizer": optimizer, "lr_scheduler": scheduler, "completed_steps": 0}


def of_shards():
    """A model of two layers, and a batch."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model.layers = list(model)
    return {"model": model, "x": torch.randn(5, 3), "y": torch.arange(5) % 2, "noise_multiplier": 1.0}


def of_trl():
    """A tiny language model, its tokenizer, chats and preferences."""
    lengths = [2 + i % 5 for i in range(300)]
    names = {"model": chats.model(), "tokenizer": chats.tokenizer()}
    return {**names, "chats": chats.rows("chat-completion", lengths), "preferences": chats.rows("preference", lengths)}


def of_notes():
    """Notes of patients and a tiny language model; long notes; questions about them, as run_qa prepares them."""
    words, tokenizer = [chats.words(4 + i % 9, i) for i in range(90)], chats.tokenizer()
    patients = [f"p{i % 40}" for i in range(90)]
    notes = Dataset.from_dict({**tokenizer(words, padding=True), "patient_id": patients})

    def prepare_train_features(batch):
        made = tokenizer(batch["question"], batch["context"], max_length=9, stride=2, truncation="only_second",
                         return_overflowing_tokens=True, padding="max_length", return_token_type_ids=False)  # fmt: skip
        made.pop("overflow_to_sample_mapping")
        return {**made, "start_positions": [3] * len(made["input_ids"]), "end_positions": [4] * len(made["input_ids"])}

    return {
        "model": chats.model(), "notes": notes.map(lambda row: {"labels": row["input_ids"]}), "collator": default_data_collator,
        "documents": Dataset.from_dict({k: v for k, v in tokenizer(words).items() if k in ("input_ids", "attention_mask")}),
        "questions": Dataset.from_dict({"question": ["w1 w2"] * 90, "context": words, "patient_id": patients}),
        "prepare_train_features": prepare_train_features, "qa_model": chats.model(hf.LlamaForQuestionAnswering),
    }  # fmt: skip


def of_owned_rows():
    loop = of_a_loop()
    return {"net": loop["model"], "optimizer": loop["optimizer"], "loader": loop["loader"], "owners": [i % 40 for i in range(len(loop["loader"].dataset))]}  # fmt: skip


def of_rounds():
    return {"server": nn.Linear(3, 2), "copy": copy, "json": json, "Path": Path, **of_a_loop()}


def of_triplets():
    return {"encoder": nn.Linear(3, 4), "triplets": DataLoader(list(torch.randn(60, 4, 3)), batch_size=20)}


# for each block of a page, what a reader has before it
PREPARED = {
    "README.md": [of_the_trainer, of_a_loop],
    "docs/quick-start.md": [of_the_trainer, dict, of_a_loop],
    "docs/before-you-train.md": [dict, dict],
    "docs/auditing.md": [dict],
    "docs/everyday.md": [
        lambda: {**of_a_loop(), "PrivacyEngine": dp_transformers.PrivacyEngine},
        of_a_loop,
        of_rounds,
        of_triplets,
        of_a_loop,
        of_trl,
    ],
    "docs/how-it-works.md": [dict, dict],
    "docs/persons.md": [of_notes, of_notes, dict, of_notes, of_notes, of_notes, of_owned_rows],
    "docs/from-opacus.md": [
        of_a_loop,
        of_a_generator,
        of_public_rows,
        lambda: of_a_loop(5, positions=(7,)),
        of_a_loop,
    ],
    "docs/scaling.md": [of_shards],
    "docs/trl.md": [of_trl, of_trl],
    "docs/huggingface-scripts.md": [of_a_draw],
}
NOT_RUN = re.compile(r"<!-- not run: .* -->\n```python\n.*?```", re.S)


@pytest.fixture
def one_process_group():
    """The process group of a machine with one process, for blocks about several."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("page", PREPARED)
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    """From top to bottom, each with what a reader has at that point."""
    monkeypatch.chdir(tmp_path)
    names = {"torch": torch, "nn": nn, "F": nn.functional, "cross_entropy": nn.functional.cross_entropy, "Net": Net}
    found = blocks(NOT_RUN.sub("", (ROOT / page).read_text()))
    assert len(found) == len(PREPARED[page]), "each block is prepared"
    for block, prepare in zip(found, PREPARED[page], strict=True):
        names |= prepare(names) if prepare is of_a_generator else prepare()
        exec(compile(block, page, "exec"), names)
        for name, target in (("trainer", 8), ("engine", 8)):
            if f"{name} = " in block and "target_epsilon" in block:
                spent = names[name].privacy_spent(*([1e-6] if name == "engine" else []))
                assert 0 < spent.epsilon <= target and spent.verified and spent.private


def test_every_page_with_blocks_is_run():
    pages = {str(path.relative_to(ROOT)) for path in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]}
    assert {page for page in pages if blocks((ROOT / page).read_text())} == {*PREPARED, "docs/extending.md"}
    left_out = [block for page in pages for block in NOT_RUN.findall((ROOT / page).read_text())]
    assert len(left_out) == 2, "tensor parallelism and 4 bits alone"
    for block in left_out:
        compile(*blocks(block), "not run", "exec")


def test_the_site_builds_without_warnings(tmp_path):
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages <= {path.stem for path in (tmp_path / "site").glob("*.html")}
    home = (tmp_path / "site" / "index.html").read_text()
    loaded = re.findall(r"<(?:script|link|img)[^>]* (?:src|href)=\"?([^\" >]+)", home)
    assert loaded and not [address for address in loaded if "//" in address], "nothing is loaded from elsewhere"
    shown = (tmp_path / "site" / "api.html").read_text()
    assert all(f"{name}</span>" in shown for name in dp_transformers.__all__)


def messages():
    """Every text of the package that may be a message, with "…" for what is filled in."""
    for path in (ROOT / "dp_transformers").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_page_of_errors_quotes_messages():
    rows = re.findall(r"^\| `(.*?)` \|", (ROOT / "docs" / "errors.md").read_text(), re.M)
    assert len(rows) > 35
    said = list(messages())
    wrong = [row for row in rows if not any(all(part.strip() in text for part in row.split("…")) for text in said)]
    assert not wrong


def test_commands_have_the_flags_that_pages_give_them():
    known = typer.main.get_command(app).commands

    def of_recipe(name):
        recipe = importlib.import_module(name if name in recipes() else "text_classification")
        names = ("DataArguments", "ModelArguments", "Arguments")
        classes = [getattr(recipe, name) for name in names if hasattr(recipe, name)]
        return {"--config", *HfArgumentParser(classes)._option_string_actions}

    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    typed = [line for page in pages for line in re.findall(r"dp-transformers ([a-z]+\b[^`\n#]*)", page.read_text())]
    typed = [line for line in typed if line.split()[0] in known or "--" in line]  # not "dp-transformers on PyPI"
    assert {line.split()[0] for line in typed} == {*known}
    for line in typed:
        name, *words = line.split()
        flags = {flag for parameter in known[name].params for flag in parameter.opts}
        flags |= of_recipe(words[0]) if name == "train" else set()
        assert {word for word in words if word.startswith("--")} <= flags, line


def test_the_page_of_the_interface_has_every_public_name():
    shown = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    assert sorted(name.rpartition(".")[2] for name in shown) == sorted(dp_transformers.__all__)


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("shape", [(4, 3), (4, 6, 3), (4, 2, 5, 3)], ids=str)
def test_the_layer_is_exact(page, shape, mode):
    layer = page.Sine(3, 5)
    with PerExampleClipper(nn.Sequential(layer), 1.0) as clipper:
        assert clipper.owners[0].has_rule, "it has its rule"
    check(nn.Sequential(layer, nn.Linear(5, 2)), torch.randn(shape), mode)
    check(nn.Sequential(page.Sine(3, 3), tied := page.Sine(3, 3), tied), torch.randn(shape), mode)


def test_the_clipping_function_keeps_to_its_sensitivity(page):
    largest = torch.finfo(torch.float32).max
    norms_b = torch.cat([torch.tensor([0.0, 1e-38, largest]), torch.logspace(-12, 12, 1001)])
    for bound in (1.0, 0.3, 7.0):
        coefficients_b = page.SmoothClipping(bound).coefficients(norms_b)
        assert bool(((coefficients_b >= 0) & coefficients_b.isfinite()).all())
        assert float((coefficients_b * norms_b).max()) <= bound * (1 + 1e-6)


def test_an_example_changes_the_clipped_sum_by_the_sensitivity_at_most(page):
    clipping = page.SmoothClipping(0.7)
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
    expected_b = 0.7 * norms_b / norms_b.hypot(torch.tensor(0.7))
    assert torch.allclose(changes_b.float(), expected_b, rtol=1e-3, atol=1e-6)


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
    assert spent.epsilon == pytest.approx(accountant.get_epsilon(1e-3), rel=1e-3)
    assert spent.epsilon > Mechanism(**page.parts).epsilon(1e-3), (
        "whoever pushes others out of a draw is seen in what they do not add"
    )
    with pytest.raises(ValueError, match="no bound"):
        spent.mechanism.epsilon(1e-3, accountant="rdp")


def test_the_noise_has_the_deviation_that_is_accounted_for(page):
    noise = page.FallingNoise(2.0, half_life=5)
    phases = [(2.0 * 0.5 ** (step / 5), 0.2, 1) for step in range(10)]
    assert page.spent[3].epsilon == pytest.approx(phases_epsilon(phases, 1e-3), rel=1e-9)
    source, shapes = noise.source(None), [(300, 200), (7,), (40_001,)]
    for std in (0.5, 3.0):
        first, second = ([torch.zeros(shape) for shape in shapes] for _ in range(2))
        source.add_(first, std)
        source.add_(second, std)
        numbers, others = (torch.cat([x.flatten() for x in grads]) / std for grads in (first, second))
        assert stats.kstest(numbers.numpy(), "norm").pvalue > 1e-4
        for a, b in ((numbers, others), (numbers[1:], numbers[:-1])):
            assert abs(float((a * b).mean())) < 4.5 / len(a) ** 0.5, "steps and coordinates are independent"


@pytest.mark.parametrize("name", sorted({*dp_transformers._WHERE, *clipping.__all__}))
def test_every_public_name_has_an_example_that_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    public = getattr(dp_transformers if name in dp_transformers._WHERE else clipping, name)
    (found,) = doctest.DocTestFinder(recurse=False).find(public, name, globs={})
    assert found.examples, f"{name} has no example"
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(found, out=said.append)
    assert not said, "".join(said)
