"""Physical batches that are filled up to a fixed size: rows of weight 0 add to nothing, in both loops."""

import itertools

import pytest
import torch
from oracle import clipped_sum, distance, length, per_example_gradients
from test_mechanism_in_loops import EXPECTED, LOOPS, Gradients, N, by_engine, by_trainer, mechanism
from test_resume import Classifier, rows
from torch import nn

from dp_transformers.data.draws import LogicalBatches
from dp_transformers.mechanism.clipping_functions import AdaptiveClipping, FlatClipping
from dp_transformers.mechanism.mechanism import Release
from dp_transformers.mechanism.sampling import (
    Draw,
    DrawSampler,
    FixedOrderSampling,
    PoissonSampling,
    RandomAllocationSampling,
    TruncatedPoissonSampling,
)
from dp_transformers.noise.generators import GaussianNoise
from dp_transformers.runtime.randomness import SecretSeeds
from dp_transformers.step.releases import NoisedShare, PrivateLoss

pytestmark = pytest.mark.halved

SIZE, BOUND = 4, 0.4
# whole batches alone, a last one of one row, no example, one example, and a last one of three
DRAWS = [[*range(8)], [*range(20, 29)], [], [7], [*range(33, 40)], [1, 11, 39]]
POISONS = {"nan": float("nan"), "overflow": 1e30, "large": 1e6}  # the second has infinite gradients
ADAPTIVE = AdaptiveClipping(BOUND, quantile=0.5, learning_rate=0.5, count_noise=3.0)


@pytest.fixture
def silent(monkeypatch):
    """Fixed draws and no noise; what was counted and which losses were added up, at each release."""
    counted = {"share": [], "loss": [], "draws": DRAWS}
    monkeypatch.setattr(GaussianNoise, "add_", lambda source, tensors, std: None)
    for kind, cls in (("share", NoisedShare), ("loss", PrivateLoss)):

        def noted(part, *args, kind=kind, release=cls.release):
            counted[kind].append(float(part._sum))
            return release(part, *args)

        monkeypatch.setattr(cls, "release", noted)

    def draw(sampler):
        number = next(sampler._number)
        return Draw(number, counted["draws"][number % len(counted["draws"])])

    monkeypatch.setattr(DrawSampler, "draw", draw)
    return counted


@pytest.fixture
def sizes(monkeypatch):
    """The number of rows of each forward pass."""
    found, forward = [], Classifier.forward

    def noted(model, x):
        found.append(len(x))
        return forward(model, x)

    monkeypatch.setattr(Classifier, "forward", noted)
    return found


def given(**changes):
    changes = {"steps": len(DRAWS), **changes}
    loss = (Release.within("loss", 0.0, 2.0, noise_multiplier=10.0),)
    return mechanism(**{"clipping": FlatClipping(BOUND), "releases": loss, **changes})


def gradients(loop, folder, mechanism, *, fill, mode="book_keeping", by="losses"):
    """What every step stepped with."""
    steps = mechanism.steps
    if loop == "trainer":
        noted = Gradients()
        options = {"per_device_train_batch_size": SIZE, "fill_physical_batches": fill, "clipping_mode": mode}
        by_trainer(folder, mechanism, noted, save_strategy="no", **options).train()
        return noted.seen
    options = {
        "max_physical_batch_size": SIZE,
        "fill_physical_batches": fill,
        "clipping_mode": mode,
        "loss_reduction": {"losses": "none"}.get(by, "mean"),
        "criterion": nn.CrossEntropyLoss() if by == "criterion" else None,
    }
    engine, model, optimizer, *criterion, loader = by_engine(mechanism, **options)
    loss_of, found = criterion[0] if criterion else nn.functional.cross_entropy, []
    for x, y in itertools.chain.from_iterable(itertools.repeat(loader)):
        optimizer.zero_grad()
        if by == "losses":
            engine.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
        else:
            loss_of(model(x), y).backward()
        optimizer.step()
        if loader._step.order.in_hand.last_of_draw:
            found.append(torch.cat([p.grad.flatten().clone() for p in model.parameters()]))
        if len(found) == steps:
            engine.detach()
            return found


def poisoned(monkeypatch, number):
    """Fillers whose input is this number, and whose losses and gradients are what follows from it."""

    original = LogicalBatches._physical_batch

    def filled_up(batches, *rows):
        batch = original(batches, *rows)
        x = batch.rows["x"] if isinstance(batch.rows, dict) else batch.rows[0]
        x[batch.examples :] = number
        return batch

    monkeypatch.setattr(LogicalBatches, "_physical_batch", filled_up)


WAYS = [
    *(("trainer", mode, "losses") for mode in ("book_keeping", "ghost", "fast_gradient", "per_sample")),
    *(("engine", mode, "losses") for mode in ("book_keeping", "ghost", "fast_gradient", "per_sample")),
    ("engine", "ghost", "criterion"),
    ("engine", "book_keeping", "loss"),
    ("engine", "per_sample", "loss"),
]


@pytest.mark.table
@pytest.mark.parametrize(("loop", "mode", "by"), WAYS, ids=["-".join(way) for way in WAYS])
def test_a_filled_training_is_the_same_training(tmp_path, monkeypatch, silent, sizes, loop, mode, by):
    """Gradients, private losses and the count that the bound follows; also where fillers are not finite, or where
    their gradients overflow."""
    which = given(clipping=ADAPTIVE, **({"releases": ()} if by == "loss" else {}))
    plain = gradients(loop, tmp_path / "plain", which, fill=False, mode=mode, by=by)
    losses, shares, least = silent["loss"][:], silent["share"][:], min(sizes)
    assert least == 1 and len(plain) == len(DRAWS) and plain[0].norm() > 0 and not plain[2].any()
    for name, number in {"copy": None, **POISONS}.items():
        for part in (silent["loss"], silent["share"], sizes):
            part.clear()
        if number is not None:
            poisoned(monkeypatch, number)
        filled = gradients(loop, tmp_path / name, which, fill=True, mode=mode, by=by)
        assert set(sizes) == {SIZE}, name
        for ours, theirs in zip(filled, plain, strict=True):
            assert (ours - theirs).norm() <= 1e-5 * theirs.norm(), name
        assert silent["share"] == shares and silent["loss"] == pytest.approx(losses, rel=1e-5), name


@pytest.mark.parametrize("loop", LOOPS)
def test_a_filled_draw_is_the_sum_over_its_examples_one_at_a_time(tmp_path, silent, loop):
    model = Classifier()
    x, y = torch.tensor([row["x"] for row in rows()]), torch.tensor([row["labels"] for row in rows()])
    each = per_example_gradients(
        model, lambda b: nn.functional.cross_entropy(model(b["x"]), b["y"], reduction="none"), {"x": x, "y": y}
    )
    first = gradients(loop, tmp_path, given(), fill=True)[0]
    _, total = clipped_sum([each[i] for i in DRAWS[0]], BOUND)
    assert distance([first * EXPECTED], [torch.cat([g.flatten() for g in total])]) <= 1e-5 * length(total)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("left_out", [0, -1], ids=["the copied example", "another"])
def test_an_example_moves_a_filled_sum_by_the_bound_at_most(tmp_path, silent, loop, left_out):
    """Also the one that fillers are copies of, whose place in the batch then is another's."""
    which, draw, sums = given(clipping=FlatClipping(0.05), steps=1), [3, 17, 30], []  # all are longer
    for indices in (draw, [i for i in draw if i != draw[left_out]]):
        silent["draws"] = [indices]
        sums.append(EXPECTED * gradients(loop, tmp_path / str(len(indices)), which, fill=True)[0])
    assert 0.99 * 0.05 <= (sums[0] - sums[1]).norm() <= 0.05 * (1 + 1e-5)


CAPPED, CYCLE = TruncatedPoissonSampling(N, EXPECTED, 11), FixedOrderSampling(N, EXPECTED)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("sampling", [CAPPED, CYCLE, PoissonSampling(N, 2)], ids=lambda sampling: sampling.kind)
def test_every_step_has_the_same_shapes_where_draws_have_a_largest_size(tmp_path, drawn, sizes, loop, sampling):
    """Otherwise there are as many batches as without filling."""
    if loop == "trainer":
        options = {"per_device_train_batch_size": SIZE, "fill_physical_batches": True, "save_strategy": "no"}
        by_trainer(tmp_path, mechanism(sampling=sampling), **options).train()
        steps = 10
    else:
        options = {"max_physical_batch_size": SIZE, "fill_physical_batches": True}
        engine, model, optimizer, loader = by_engine(
            mechanism(sampling=sampling), batch_size=int(sampling.expected_batch_size), **options
        )
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        engine.detach()
        steps = loader.steps_per_epoch
        if sampling.largest_draw:
            assert len(loader) == len(sizes)
        else:
            with pytest.raises(TypeError, match="random"):
                len(loader)
    assert set(sizes) == {SIZE}
    counts = [len(found.indices) for found in drawn[:steps]]
    if sampling.largest_draw:
        assert len(sizes) == steps * -(-sampling.largest_draw // SIZE)
    else:
        assert len(sizes) == sum(max(loop == "engine", -(-count // SIZE)) for count in counts)


@pytest.mark.parametrize(("world", "size", "batches"), [(1, 4, 3), (2, 4, 2), (2, 6, 1), (3, 1, 4), (1, 100, 1)])
def test_ranks_share_the_largest_draw(world, size, batches):
    sampler = DrawSampler(CAPPED, 5, 1, 0, world)
    assert LogicalBatches(rows(), list, size, fill=True, largest_draw=sampler.largest_draw).batches_per_draw == batches
    assert LogicalBatches(rows(), list, size, largest_draw=sampler.largest_draw).batches_per_draw == 0


@pytest.mark.parametrize(
    "sampling", [PoissonSampling(N, EXPECTED), RandomAllocationSampling(N, N // EXPECTED)], ids=str
)
def test_batches_without_a_size_cannot_be_filled(sampling):
    with pytest.raises(ValueError, match=f"'{sampling.kind}' may have any: give max_physical_batch_size as well"):
        by_engine(mechanism(sampling=sampling), fill_physical_batches=True)


class Texts:
    def __len__(self):
        return 40

    def __getitem__(self, i):
        return {"input_ids": [100 + i] * (1 + i % 7), "label": i % 3}


def padded(examples):
    longest = max(len(example["input_ids"]) for example in examples)
    ids = torch.tensor([e["input_ids"] + [0] * (longest - len(e["input_ids"])) for e in examples])
    for example in examples:  # as some collators do
        example["input_ids"] = None
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "label": torch.tensor([e["label"] for e in examples])}  # fmt: skip


def batches_of(collate, indices, size=SIZE, fill=True):
    return LogicalBatches(Texts(), collate, size, SecretSeeds(1), fill=fill)[Draw(3, indices)].batches


def test_fillers_follow_the_examples_and_lengthen_no_row():
    draw = [5, 6, 12, 0, 3, 9]
    filled, plain = batches_of(padded, draw), batches_of(padded, draw, fill=False)
    assert [(b.size, b.examples, b.fillers) for b in filled] == [(4, 4, 0), (4, 2, 2)]
    for ours, theirs in zip(filled, plain, strict=True):
        for name, x in theirs.rows.items():
            assert torch.equal(ours.rows[name][: theirs.size], x)
            assert torch.equal(ours.rows[name][theirs.size :], x[:1].expand(ours.fillers, *x.shape[1:]))
    assert filled[1].sizes.keys() == plain[1].sizes.keys()
    filler = LogicalBatches(Texts(), padded, SIZE, SecretSeeds(1), fill=True).filler()
    assert (filler.size, filler.examples, len(filler.rows["input_ids"])) == (SIZE, 0, SIZE)
