"""Each mode reads every kind of term that rules give: norms and clipped sums against one example at a time, with weights,
in groups, of no example, of one, and beside one that is not finite. Rules themselves are tested in one mode."""

import copy

import pytest
import torch
from layers import ALL_MODES, Calls, D, Norm, weigh
from models import Net, net_losses
from oracle import clipped_sum, distance, length, per_example_gradients, trainable
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.pytorch_utils import Conv1D

from dp_transformers import PerExampleClipper
from dp_transformers.clipping.modes import MODES
from dp_transformers.mechanism.clipping_functions import FlatClipping, PerLayerClipping


class ReadsNumbers(Norm):
    """No rule, and nothing that vmap can run."""

    def forward(self, x):
        assert int(x.isnan().sum()) >= 0
        return super().forward(x)


class Experts(nn.Module):
    """Tokens of all examples go to two of four experts."""

    def __init__(self):
        super().__init__()
        self.first, self.router = nn.Linear(D, D), nn.Linear(D, 4)
        self.experts = MixtralExperts(MixtralConfig(num_local_experts=4, hidden_size=D, intermediate_size=4))
        for p in self.experts.parameters():
            nn.init.normal_(p, std=0.5)

    def forward(self, x):
        tokens = self.first(x).tanh().flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(2, -1)
        return self.experts(tokens, index, weights).view_as(x)


def floats(*shape):
    return lambda batch: torch.randn(batch, *shape)


def ids(*shape, most=7):
    return lambda batch: torch.randint(0, most, (batch, *shape))


def alone(layer, *shape):
    return lambda: nn.Sequential(copy.deepcopy(layer)), floats(*shape)


def two(layer, *shape):
    """Behind a layer that has a gradient of its own."""
    return lambda: nn.Sequential(nn.Linear(shape[-1], shape[-1]), nn.Tanh(), copy.deepcopy(layer)), floats(*shape)


KINDS = {  # how a model is made, and how many rows it is given
    "one position": two(nn.Linear(D, 3), D),
    "factors": two(nn.Linear(D, 30), 3, D),
    "instances": two(nn.Linear(D, 3), 40, D),
    "transposed": two(Conv1D(3, D), 4, D),
    "rows": (lambda: nn.Sequential(nn.Embedding(7, D, padding_idx=2), nn.Linear(D, 2)), ids(5)),
    "rows of positions": (lambda: nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(40, 2)), ids(10, most=3)),
    "cancelling uses": (lambda: Calls(lambda m, x: m.layer(x) + 0.5 * m.layer(-x), layer=nn.Linear(D, 3, bias=False)), floats(5, D)),
    "scales": two(nn.LayerNorm(D), 3, D),
    "no dimension": (lambda: Calls(lambda m, x: m.layer(x * m.t) * m.t.exp(), layer=nn.Linear(D, D), t=nn.Parameter(torch.tensor(0.7))), floats(4, D)),
    "groups of channels": alone(nn.GroupNorm(2, 4), 4, 3, 3),
    "one slope": alone(nn.PReLU(), D),
    "patches by ghost": alone(nn.Conv2d(24, 20, 3), 24, 4, 4),
    "patches by instance": alone(nn.Conv1d(4, 6, 3), 4, 8),
    "patches that do not overlap": alone(nn.Conv2d(3, 4, 2, stride=2), 3, 6, 6),
    "channels in groups": alone(nn.Conv2d(4, 8, 3, groups=4, padding="same", padding_mode="reflect"), 4, 6, 6),
    "patches transposed": alone(nn.ConvTranspose1d(4, 6, 3), 4, 5),
    "bags": (lambda: nn.EmbeddingBag(7, 5), ids(3)),
    "largest of bags": (lambda: nn.EmbeddingBag(7, 5, mode="max"), ids(3)),
    "steps": (lambda: Calls(lambda m, x: m.layer(x)[0], layer=nn.LSTM(D, 4, 2, batch_first=True, bidirectional=True)), floats(5, D)),
    "one step": (lambda: Calls(lambda m, x: m.layer(x), layer=nn.GRUCell(D, 4)), floats(D)),
    "heads": (lambda: Calls(lambda m, x: m.layer(x, x, x.tanh())[0], layer=nn.MultiheadAttention(D, 2, batch_first=True, add_bias_kv=True)), floats(4, D)),
    "no rule": two(Norm(), 3, D),
    "no rule and no vmap": two(ReadsNumbers(), 3, D),
    "experts": (Experts, floats(6, D)),
    "tied": (Net, ids(9, most=5)),
}  # fmt: skip


@pytest.mark.table(of=3)
@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_norms_and_sums_are_those_of_one_example_at_a_time(kind, mode):
    make, draw = KINDS[kind]
    torch.manual_seed(0)
    model, x = make(), draw(5)
    parameters = trainable(model)
    labels = torch.randint(0, 50, x.shape)

    def losses(rows):
        return net_losses(model)(rows) if kind == "tied" else weigh(model(rows["input_ids"]))

    def rows(which=slice(None)):
        return {"input_ids": x[which], "labels": labels[which]}

    gradients = per_example_gradients(model, losses, rows())
    bound = sorted(map(length, gradients))[2]
    weights = [1.0, 0.5, 1.0, 0.0, 1.0]
    functions = [FlatClipping(bound)] + [PerLayerClipping(FlatClipping(bound))] * MODES[mode].one_pass
    names = [name for name, _ in model.named_parameters()]
    for function in functions:
        with PerExampleClipper(model, function, mode=mode) as clipper:

            def clipped(losses, weights=None, unit_ids=None, clipper=clipper):
                model.zero_grad()
                norms = clipper.backward(losses, weights, unit_ids=unit_ids)
                return norms, [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]

            def expected(those, weights=None, function=function, gradients=gradients):
                total = [torch.zeros_like(p) for p in parameters]
                for group in function.groups({name: p.numel() for name, p in model.named_parameters()}):
                    own = [names.index(name) for name in group.names]
                    parts = [[gradients[i][k] for k in own] for i in those]
                    for k, part in zip(own, clipped_sum(parts, group.clipping.sensitivity, weights)[1], strict=True):
                        total[k] = part
                return torch.tensor([length(gradients[i]) for i in those]), total

            for those in ([*range(5)], [3]):
                found, wanted = clipped(losses(rows(those))), expected(those)
                torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=0)
                assert distance(found[1], wanted[1]) <= 1e-5 * length(wanted[1])
            found, wanted = clipped(losses(rows()), torch.tensor(weights)), expected(range(5), weights)
            assert distance(found[1], wanted[1]) <= 1e-5 * length(wanted[1])
            units = [[1], [3], [0, 2, 4]]  # in ascending order of their ids
            joint = [[sum(parts) for parts in zip(*(gradients[i] for i in unit), strict=True)] for unit in units]
            found = clipped(losses(rows()), torch.tensor([1.0, 0.5, 1.0]), torch.tensor([7, -2, 7, 3, 7]))
            wanted = expected(range(3), [1.0, 0.5, 1.0], gradients=joint)
            torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=0)
            assert distance(found[1], wanted[1]) <= 1e-5 * length(wanted[1])
            found = clipped(losses(rows()), None, torch.tensor([5, 1, 4, 2, 3]))  # one row each
            torch.testing.assert_close(found[0], expected([1, 3, 4, 2, 0])[0], rtol=1e-5, atol=0)
            norms, total = clipped(losses(rows(slice(0, 0))))
            assert norms.shape == (0,) and length(total) == 0
            others, (kept, wanted) = [0, 1, 3, 4], expected([0, 1, 3, 4])
            bad = [losses(rows()) * torch.tensor([1, 1, number, 1, 1]) for number in (float("nan"),)]
            if x.is_floating_point() and not any(isinstance(m, nn.EmbeddingBag) for m in model.modules()):
                spoilt = x.clone()
                spoilt[2].view(-1)[0] = float("nan")
                bad.append(weigh(model(spoilt)))
            for each in bad[::-1][:1]:
                norms, total = clipped(each)
                assert not norms[2].isfinite()
                torch.testing.assert_close(norms[others], kept, rtol=1e-5, atol=0)
                assert distance(total, wanted) <= 1e-5 * length(wanted)
