"""Modules without a rule, and without a batch: what is re-run, and what is refused."""

import pytest
import torch
from layers import ALL_MODES, Calls, check, weigh
from oracle import clipped_sum, distance, length
from torch import nn

from dp_transformers import PerExampleClipper, check_model
from dp_transformers.clipping.errors import UnsupportedModuleError


def weight(*shape):
    return nn.Parameter(torch.randn(*shape or (5,)))


def uses_scale():
    """No rule: a raw parameter, a keyword argument, two outputs."""
    scale = Calls(lambda m, x, *, factor: (x * m.scale.exp() * factor, x.sum(-1, keepdim=True) + m.shift), scale=weight(), shift=weight(3, 1))  # fmt: skip
    return Calls(lambda m, x: sum(m.scale(m.first(x), factor=0.5)), first=nn.Linear(5, 5), scale=scale)


def broadcast():
    """Parameters used without a batch dimension: position embeddings for (1, T), a raw token."""
    token = Calls(lambda m: m.value * 2, value=weight(1, 1, 5))
    call = lambda m, x: x + m.positions(torch.arange(x.shape[1]).unsqueeze(0)) + m.token()  # noqa: E731
    return Calls(call, positions=nn.Embedding(9, 5), token=token)


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("model", [uses_scale, broadcast])
def test_fallback_and_modules_without_a_batch(model, mode):
    check(model(), torch.randn(4, 3, 5), mode)


class Refused:
    class Random(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(5))

        def forward(self, x):
            return torch.dropout(x, 0.5, True) * self.w

    class Control(Random):
        def forward(self, x):
            return x * self.w if x.sum().item() > 0 else -x * self.w

    class State(Random):
        def forward(self, x):
            self.calls = getattr(self, "calls", 0) + 1
            return x * self.w * self.calls

    class Mixing(Random):
        def forward(self, x):
            return (x - x.mean(0)) * self.w

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x):
            return self.linear(x.flatten(0, 1)).view_as(x)


@pytest.mark.parametrize("kind", ["State", "Mixing", "Control"])
def test_what_the_fallback_refuses(kind):
    model = nn.Sequential(nn.Linear(5, 5), getattr(Refused, kind)())
    clipper = PerExampleClipper(model, 1.0, self_check=False)
    x = torch.randn(4, 3, 5)
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(5)), model[0].bias.zero_()
        x[0], x[1] = -5, 9  # the batch decides otherwise than its first example
    with pytest.raises(UnsupportedModuleError, match=rf"'1' \({kind}\).*Ways out: freeze.*register_grad_sampler"):
        clipper.backward(weigh(model(x)))


@pytest.mark.parametrize("mode", ALL_MODES)
def test_fallback_sees_the_random_numbers_that_were_drawn(mode):
    """Dropout inside the owning module: the same mask in forward, norms and sum, and the generator goes on as without
    a clipper."""
    model, x = nn.Sequential(nn.Linear(5, 5), Refused.Random()), torch.randn(4, 3, 5)
    torch.manual_seed(3)
    losses = weigh(model(x))
    after = torch.get_rng_state()
    gradients = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    norms, total = clipped_sum(gradients, 0.5)
    torch.manual_seed(3)
    with PerExampleClipper(model, 0.5, mode=mode, self_check=False) as clipper:
        got = clipper.backward(weigh(model(x)))
    assert torch.equal(torch.get_rng_state(), after)
    torch.testing.assert_close(got.double(), torch.tensor(norms).double(), rtol=1e-5, atol=0)
    assert distance([p.grad for p in model.parameters()], total) <= 1e-5 * length(total)


def branches(m, x):
    """Runs under no vmap, and treats its examples independently."""
    return torch.stack([row * m.w if row.sum().item() > 0 else row.flip(0) * m.w**2 for row in x])


@pytest.mark.parametrize("mode", ALL_MODES)
def test_what_vmap_cannot_run_is_run_one_by_one(mode):
    check(nn.Sequential(nn.Linear(5, 5), Calls(branches, w=weight())), torch.randn(4, 3, 5), mode)


def writes_to_its_input():
    """Zeroes padding in place, as speech encoders do: doing it twice changes nothing."""
    return Calls(lambda m, x: (x[:, -1].zero_(), x * m.w)[1], w=weight())


def writes_to_anothers_input():
    """A sum needs neither of its parts to go back, so plain autograd lets them be overwritten."""

    def call(m, x):
        x = x * 2
        y = torch.tanh(m.adds(x))
        return x.mul_(3) + y

    return Calls(call, adds=Calls(lambda m, x: x + m.w, w=weight()))


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("writes", [writes_to_its_input, writes_to_anothers_input])
def test_modules_that_write_to_inputs(writes, mode):
    check(nn.Sequential(nn.Linear(5, 5), writes()), torch.randn(4, 3, 5), mode)


def test_what_was_overwritten_is_refused_by_name_without_the_check():
    model = nn.Sequential(nn.Linear(5, 5), writes_to_anothers_input())
    with (
        PerExampleClipper(model, 1.0, self_check=False) as clipper,
        pytest.raises(UnsupportedModuleError, match=r"writes in place .* '1.adds' \(Calls\) .*x = x \+ y.*Ways out"),
    ):
        clipper.backward(weigh(model(torch.randn(4, 3, 5))))


class Remembers(nn.Module):
    """Keeps what it saw: in an attribute, in a buffer, in a module that it makes."""

    def __init__(self, dropout, loops):
        super().__init__()
        self.w, self.dropout, self.loops = nn.Parameter(torch.randn(5)), nn.Dropout(dropout), loops
        self.register_buffer("last", None)

    def forward(self, x):
        self.seen, self.last, self.made = x, x.detach(), nn.Identity()
        rows = [row for row in x if self.loops and row.sum().item() < torch.inf]  # which no vmap can run
        return self.dropout(torch.stack(rows) if rows else x) * self.w


@pytest.mark.parametrize(
    ("dropout", "loops"), [(0.0, False), (0.0, True), (0.5, False)], ids=["vmap", "one by one", "masked"]
)
def test_a_re_run_leaves_nothing_behind(dropout, loops):
    model = nn.Sequential(nn.Linear(5, 5), Remembers(dropout, loops))
    with PerExampleClipper(model, 1.0, self_check=False) as clipper:
        before = {**vars(model[1]), **model[1]._buffers, **model[1]._modules}
        clipper.backward(weigh(model(torch.randn(4, 3, 5))))
        after = {**vars(model[1]), **model[1]._buffers, **model[1]._modules}
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in ("seen", "last", "made", "w", "dropout") if name in before)


def test_flattened_batch_is_refused_unless_it_has_settled():
    model, x = Refused.Flat(), torch.randn(4, 3, 5)
    with (
        PerExampleClipper(model, 1.0, self_check=False) as clipper,
        pytest.raises(ValueError, match=r"'linear' .*neither the batch \(4\)"),
    ):
        clipper.backward(weigh(model(x)))
    for mode in ALL_MODES:
        report = check_model(model, {"x": x}, mode=mode)
        assert max(report.norm_error, report.sum_error) <= 1e-5
