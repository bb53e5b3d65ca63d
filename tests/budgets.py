"""A network with weights of every kind that a budget of memory decides over, and what was decided."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

BATCH, WORDS = 5, 11


class Net(nn.Module):
    """Weights whose instances are smaller, and larger, than factors; a tied table; a recurrence; a convolution."""

    def __init__(self, width=24):
        super().__init__()
        self.table = nn.Embedding(WORDS, width)
        self.wide, self.norm = nn.Linear(width, 3 * width), nn.LayerNorm(3 * width)
        self.recurrent = nn.LSTM(3 * width, width, batch_first=True)
        self.convolution = nn.Conv1d(width, width, 3, padding=1)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        y = self.recurrent(self.norm(self.wide(self.table(x)).relu()))[0]
        return self.head(self.convolution(y.transpose(1, 2)).transpose(1, 2))


def losses_of(model, batch):
    return cross_entropy(model(batch["x"]).transpose(1, 2), batch["x"], reduction="none").mean(1)


def example_batch(positions, seed=0):
    return {"x": torch.randint(WORDS, (BATCH, positions), generator=torch.Generator().manual_seed(seed))}


def plan_of(clipper):
    """What would be kept of the forward pass that has just run, by name."""
    engine = clipper.engine
    plan = engine.plan(engine.forward, engine.groups)
    names = {p: name for name, p in clipper.model.named_parameters()}
    return plan.one_pass, {names[p] for p, is_kept in plan.instances.items() if is_kept}
