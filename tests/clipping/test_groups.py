"""Groups of parameters that are clipped by themselves: bounds, noise, and the pass that sums inside each layer's
backward."""

import math
import random

import pytest
import torch
from adversarial import COEFFICIENTS, SIZE, Net, adversarial
from models import SHORT, batch_for, build, losses_function
from oracle import distance, length, per_example_gradients, trainable
from torch import nn
from torch.utils.checkpoint import checkpoint

from dp_transformers import PerExampleClipper
from dp_transformers.clipping.errors import SelfCheckError
from dp_transformers.clipping.gradient_sums import GradientSums
from dp_transformers.clipping.modes import MODES, KeptTerms
from dp_transformers.mechanism.clipping_functions import (
    AutomaticClipping,
    FlatClipping,
    Group,
    GroupedClipping,
    NormalisedClipping,
    PerGroupClipping,
    PerLayerClipping,
    least_noise,
)

ONE_PASS = sorted(name for name, mode in MODES.items() if mode.one_pass)
GROUPINGS = [
    PerLayerClipping(FlatClipping(1.4)),
    PerLayerClipping(AutomaticClipping(1.4)),
    PerGroupClipping((("table", NormalisedClipping(0.7)), ("bias", FlatClipping(0.7)), ("", AutomaticClipping(0.7)))),
]


def groups_of(clipping, model):
    return clipping.groups({name: p.numel() for name, p in model.named_parameters() if p.requires_grad})


def coefficient_of(function, norm):
    """As of one group: in proportion to what the same function has with another bound."""
    other = next(f for f in COEFFICIENTS if type(f) is type(function))
    if isinstance(function, FlatClipping):
        return min(1.0, function.sensitivity / norm)
    return COEFFICIENTS[other](norm) * function.sensitivity / other.sensitivity


def total_noise(scales, sizes):
    return sum(size * scale**2 for size, scale in zip(sizes, scales, strict=True))


def test_the_noise_is_the_least_of_all_that_cover_the_groups():
    generator = random.Random(0)
    for _ in range(50):
        bounds = [10 ** generator.uniform(-2, 2) for _ in range(5)]
        sizes = [round(10 ** generator.uniform(0, 6)) for _ in range(5)]
        scales, together = least_noise(bounds, sizes), math.hypot(*bounds)
        covered = sum((c / s) ** 2 for c, s in zip(bounds, scales, strict=True))
        assert covered == pytest.approx(together**2), "at the multiplier sigma itself"
        least = total_noise(scales, sizes)
        assert least * together**2 == pytest.approx(sum(c * d**0.5 for c, d in zip(bounds, sizes, strict=True)) ** 2)
        others = [
            [1.0] * 5,
            [len(bounds) ** 0.5 * c / together for c in bounds],
        ]  # isotropic; an equal budget for each
        for size in (0.3, 0.01):
            moved = [s * math.exp(generator.gauss(0, size)) for s in scales]
            worth = math.hypot(*(c / s for c, s in zip(bounds, moved, strict=True))) / together
            others.append([s * worth for s in moved])
        for other in others:
            assert math.hypot(*(c / s for c, s in zip(bounds, other, strict=True))) == pytest.approx(together)
            assert total_noise(other, sizes) >= least * (1 - 1e-12)
    assert least_noise([0.5, 0.5, 0.5, 0.5], [7, 7, 7, 7]) == pytest.approx([1.0] * 4), "alike: as if they were one"


class OwnNoise(GroupedClipping):
    """C in each of six groups, with noise for C alone in each: √6 too little."""

    kind = "own noise"
    sensitivity = 0.5

    def groups(self, sizes):
        return [Group([name], FlatClipping(0.5)) for name in sizes]


class Forgotten(OwnNoise):
    def groups(self, sizes):
        return super().groups(sizes)[1:]


class Twice(OwnNoise):
    def groups(self, sizes):
        return [*super().groups(sizes), *super().groups(sizes)]


@pytest.mark.parametrize(
    ("clipping", "message"),
    [
        (OwnNoise(), r"is 0.5, but its groups together have 1.22474,.*too little"),
        (Forgotten(), r"in 0 of its groups: .*each trainable parameter in one of its groups"),
        (Twice(), r"in 2 of its groups: .*each trainable parameter in one of its groups"),
        (PerGroupClipping((("table", FlatClipping(1.0)),)), "'twice.weight' matches none"),
        (PerGroupClipping((("", FlatClipping(1.0)), ("table", FlatClipping(1.0)))), "is left for the expression 'table'"),
    ],
    ids=range(5),
)  # fmt: skip
def test_what_noise_does_not_cover_is_refused(clipping, message):
    model = Net()
    with pytest.raises(ValueError, match=message):
        PerExampleClipper(model, clipping)
    PerExampleClipper(model, 1.0).detach()  # nothing was left on it


@pytest.mark.parametrize("mode", ONE_PASS)
@pytest.mark.parametrize("clipping", GROUPINGS, ids=range(3))
def test_sums_and_sensitivity_in_200_adversarial_batches(clipping, mode):
    """Every group's sum is that of one example at a time; in units of the noise an example moves all groups together
    by the sensitivity at most, and does."""
    torch.manual_seed(0)
    model = Net()
    numbers = {name: k for k, (name, _) in enumerate(model.named_parameters())}
    groups = groups_of(clipping, model)
    bound, longest = clipping.sensitivity, 0.0
    with PerExampleClipper(model, clipping, mode=mode, self_check=False) as clipper:

        def clipped(batch, weights=None):
            model.zero_grad()
            norms = clipper.backward(model(**batch), weights=weights)
            return norms, [p.grad / scale for p, scale in zip(trainable(model), clipper.noise_scales, strict=True)]

        for number in range(200):
            batch = adversarial(number)
            plain = per_example_gradients(model, lambda x: model(**x), {**batch, "scale": torch.ones(SIZE)})
            norms, whole = clipped(batch)
            for group in groups:
                own = [numbers[name] for name in group.names]
                expected = [torch.zeros_like(plain[0][k], dtype=torch.float64) for k in own]
                for scale, gradient in zip(batch["scale"].tolist(), plain, strict=True):
                    part = [gradient[k].double() * scale for k in own]
                    if 0 < (norm := length(part)) < math.inf:
                        coefficient = coefficient_of(group.clipping, norm) / group.noise_scale
                        expected = [x + coefficient * g for x, g in zip(expected, part, strict=True)]
                error = distance([whole[k] for k in own], expected)
                assert error <= 1e-5 * max(group.clipping.sensitivity / group.noise_scale, length(expected)), number
            lengths = torch.tensor([length(g) * abs(s) for g, s in zip(plain, batch["scale"].tolist(), strict=True)])
            torch.testing.assert_close(norms.isfinite(), lengths.isfinite())
            finite = lengths.isfinite() & (lengths > 1e-11)
            torch.testing.assert_close(norms[finite], lengths[finite], rtol=1e-4, atol=0, check_dtype=False)
            without = torch.ones(SIZE)
            without[number % SIZE] = 0
            moved = distance(whole, clipped(batch, without)[1])
            assert moved <= bound * (1 + 1e-5), number
            longest = max(longest, moved)
    assert longest >= 0.98 * bound, "no example came near to the bound"


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("mode", ONE_PASS)
def test_sums_inside_a_backward_of_the_users(mode, reduction):
    torch.manual_seed(0)
    model, batch = Net(), {"ids": torch.randint(0, 7, (SIZE, 3)), "scale": torch.ones(SIZE)}
    clipping = PerLayerClipping(AutomaticClipping(1.4))
    with PerExampleClipper(model, clipping, mode=mode) as clipper:
        clipper.backward(model(**batch))
        expected = [p.grad.clone() for p in trainable(model)]
        clipper.follow(watcher := Watcher(clipper), reduction)
        getattr(model(**batch), reduction)().backward()
        assert watcher.added == 1
        watcher.sums.become_gradients()
        assert distance([p.grad for p in trainable(model)], expected) <= 1e-5 * length(expected)


class Watcher:
    """Follows a clipper, and counts what it adds."""

    def __init__(self, clipper):
        self.clipper, self.sums, self.added = clipper, clipper.empty_sums(), 0

    def before_forward(self, args, kwargs):
        pass

    def after_forward(self, output):
        pass

    def current_batch(self):
        return self

    def add(self, losses, weights=None):
        self.added += 1
        return self.clipper.backward(losses, weights, into=self.sums)


class Deep(nn.Module):
    """Layers one after the other, one of them called twice, one not at all."""

    def __init__(self, checkpoints=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.unused, self.checkpoints, self.gradient_checkpointing = nn.Linear(5, 5), checkpoints, checkpoints
        self.reached = []

    def forward(self, x):
        for k in (0, 1, 2, 1, 3):
            x = x + 0
            if x.requires_grad:
                x.register_hook(lambda grad, k=k: self.reached.append(k))
            run = lambda x, k=k: self.layers[k](x).tanh()  # noqa: E731
            x = checkpoint(run, x, use_reentrant=False) if self.checkpoints else run(x)
        return x.sum((1, 2))


@pytest.mark.parametrize("checkpoints", [False, True])
def test_the_sum_of_a_layer_is_formed_inside_its_backward(checkpoints, monkeypatch):
    """And not before the last call of a layer that is called twice."""
    torch.manual_seed(0)
    model, x = Deep(checkpoints), torch.randn(SIZE, 3, 5)
    names = {p: name for name, p in model.named_parameters()}
    formed, add = [], GradientSums.add
    monkeypatch.setattr(
        GradientSums, "add", lambda sums, p, *a, **k: (formed.append((names[p], list(model.reached))), add(sums, p, *a, **k))[1]
    )  # fmt: skip
    clipping = PerLayerClipping(FlatClipping(0.3))
    with PerExampleClipper(model, clipping, self_check=False) as clipper:
        assert clipper.mode.name == "book_keeping"
        clipper.backward(model(x.requires_grad_()))
    when = dict(formed)
    assert when["layers.3.weight"] == when["layers.3.bias"] == []
    assert when["layers.2.weight"] == [3, 1]
    assert when["layers.1.weight"] == [3, 1, 2], "the second call comes first, and waits for the first one"
    assert when["layers.0.weight"] == [3, 1, 2, 1] or when["layers.0.weight"] == [3, 1, 2, 1, 0]
    assert not any(name.startswith("unused") for name in when)
    gradients = per_example_gradients(model, lambda batch: model(batch["x"]), {"x": x.detach()})
    for k in range(4):
        own = [numbers for numbers, name in enumerate(names.values()) if name.startswith(f"layers.{k}")]
        expected = [torch.zeros_like(gradients[0][n]) for n in own]
        for gradient in gradients:
            part = [gradient[n] for n in own]
            coefficient = min(1.0, 0.3 / 5**0.5 / length(part))
            expected = [e + coefficient * g for e, g in zip(expected, part, strict=True)]
        assert distance([list(names)[n].grad for n in own], expected) <= 1e-5 * length(expected)


def test_nothing_is_kept_of_layers_that_are_done():
    """Book-keeping holds the terms of all layers at the end of backward; by layers, those of one at a time."""
    held = {}
    for clipping in (FlatClipping(0.3), PerLayerClipping(FlatClipping(0.3))):
        torch.manual_seed(0)
        model = Deep()
        with PerExampleClipper(model, clipping, self_check=False) as clipper:
            losses = model(torch.randn(SIZE, 3, 5))
            begin = type(clipper.mode).begin

            def watched(mode, *args, begin=begin, held=held, clipping=clipping):
                made = begin(mode, *args)
                close = made.close

                def counted(parameter, terms):
                    close(parameter, terms)
                    kept = sum(len(group.terms) for group in made._groups)
                    held[clipping.kind] = max(held.get(clipping.kind, 0), kept)

                made.close = counted
                return made

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(clipper.mode), "begin", watched)
                clipper.backward(losses)
    assert held == {"flat": 8, "per_layer": 1}


@pytest.mark.parametrize("mode", sorted(set(MODES) - set(ONE_PASS)))
def test_modes_that_go_back_twice_are_refused(mode):
    with pytest.raises(
        ValueError, match=f"'{mode}' goes back .* coefficients for each example: use clipping_mode='book"
    ):
        PerExampleClipper(Net(), PerLayerClipping(FlatClipping(1.0)), mode=mode)


def test_the_self_check_sees_a_layer_that_is_clipped_by_anothers_norm(monkeypatch):
    model, swapped = build("bert"), KeptTerms._measure

    def wrong(backward, parameter, terms, group):
        return swapped(backward, parameter, terms, backward._groups[0])

    monkeypatch.setattr(KeptTerms, "_measure", wrong)
    clipper = PerExampleClipper(model, PerLayerClipping(FlatClipping(0.9)))
    with pytest.raises(SelfCheckError, match="clipping is not exact"):
        clipper.backward(losses_function(model)(batch_for("bert", SHORT)))
