"""Examples of different lengths in one tensor, without padding: PackedSequence, and ids with offsets, in both loops."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from dp_transformers import DPTrainer, DPTrainingArguments, PrivacyEngine, check_model
from dp_transformers.clipping.errors import SelfCheckError
from dp_transformers.clipping.ragged import Ragged, packed, unpacked

pytestmark = pytest.mark.filterwarnings("ignore:dp_seed")
LENGTHS = (3, 1, 4, 2, 5, 2, 1, 3)


class Sequences(nn.Module):
    def __init__(self, cls=nn.LSTM, **options):
        super().__init__()
        self.rnn, self.out = cls(4, 5, **options), nn.LazyLinear(2)

    def forward(self, x):
        states = self.rnn(x)[1]
        return self.out((states[0] if isinstance(states, tuple) else states)[-1])


class ByLength(Sequences):
    """It lets the longest sequence of the batch have a say."""

    def forward(self, x):
        return super().forward(x) * len(x.batch_sizes)


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(11, 5), nn.Linear(5, 2)

    def forward(self, text, offsets):
        return self.out(self.bag(text, offsets))


def sequences_collated(*, enforce_sorted):
    def collate(examples):
        if enforce_sorted:
            examples = sorted(examples, key=lambda example: -len(example[0]))
        packed = pack_sequence([x for x, _ in examples], enforce_sorted=enforce_sorted)
        return packed, torch.tensor([y for _, y in examples])

    return collate


def bags_collated(examples):
    lengths = torch.tensor([len(x) for x, _ in examples])
    return (torch.tensor([y for _, y in examples]), torch.cat([x for x, _ in examples]), lengths.cumsum(0) - lengths)


def rows(kind):
    torch.manual_seed(0)
    make = (lambda n: torch.randn(n, 4)) if kind == "sequences" else (lambda n: torch.randint(0, 11, (n,)))
    return [(make(n), i % 2) for i, n in enumerate(LENGTHS)]


def clipped_sum(model, examples, loss_of, bound):
    """The sum of clipped gradients, one example at a time."""
    total = 0
    for example in examples:
        grads = torch.autograd.grad(loss_of(model, [example]), list(model.parameters()))
        flat = torch.cat([g.flatten() for g in grads])
        total = total + flat * min(1.0, bound / float(flat.norm()))
    return total


def trained(model, data, collate, call, **options):
    """The clipped sums of the draws of one pass, and their examples' sums one by one."""
    engine = PrivacyEngine(dp_seed=0)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=torch.utils.data.DataLoader(data, batch_size=4, collate_fn=collate),
        noise_multiplier=1.0,
        max_grad_norm=0.1,
        **options,
    )
    seen = 0
    for batch in loader:
        optimizer.zero_grad()
        logits, labels = call(model, batch)
        F.cross_entropy(logits, labels).backward()
        found = torch.cat([total.flatten() for total in engine.clipped_sums().values()])
        optimizer.step()
        yield batch, found, engine
        seen += 1
    assert seen == 2
    engine.detach()


@pytest.mark.parametrize("enforce_sorted", [False, True])
@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences_in_a_plain_loop(cls, enforce_sorted):
    torch.manual_seed(0)
    model, data, collate = Sequences(cls), rows("sequences"), sequences_collated(enforce_sorted=enforce_sorted)
    model(collate(data)[0])  # so that the lazy layer has its weights
    by_content = {tuple(x.flatten().tolist()): (x, y) for x, y in data}

    def call(model, batch):
        return model(batch[0]), batch[1]

    def loss_of(model, examples):
        x, y = collate(examples)
        return F.cross_entropy(model(x), y)

    for (x, _), found, engine in trained(model, data, collate, call):
        own = unpacked(nn.Identity(), (x,), {})[0][0]
        examples = [by_content[tuple(r[:n].flatten().tolist())] for r, n in zip(own.padded, own.lengths, strict=True)]
        with engine.clipper.engine.suspended():
            expected = clipped_sum(model, examples, loss_of, 0.1)
        if found.any() or len(examples) > 1:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_ids_and_offsets_in_a_plain_loop():
    torch.manual_seed(0)
    model, data = Bags(), rows("bags")

    def call(model, batch):
        return model(batch[1], batch[2]), batch[0]

    def loss_of(model, examples):
        y, x, offsets = bags_collated(examples)
        return F.cross_entropy(model(x, offsets), y)

    for (labels, text, offsets), found, engine in trained(model, data, bags_collated, call):
        examples = list(zip(torch.tensor_split(text, offsets[1:]), labels.tolist(), strict=True))
        with engine.clipper.engine.suspended():
            expected = clipped_sum(model, examples, loss_of, 0.1)
        if found.any() or len(examples) > 1:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_model_that_looks_at_the_longest_sequence_is_refused():
    model, collate = ByLength(), sequences_collated(enforce_sorted=False)
    model(collate(rows("sequences"))[0])
    with pytest.raises(SelfCheckError, match="moved by|not exact"):
        list(trained(model, rows("sequences"), collate, lambda model, batch: (model(batch[0]), batch[1])))


class WithLogits(Bags):
    def forward(self, text, offsets, labels=None):
        return {"logits": super().forward(text, offsets)}


def test_ids_and_offsets_in_dp_trainer(tmp_path):
    def collate(examples):
        labels, text, offsets = bags_collated([(x["text"], x["labels"]) for x in examples])
        return {"text": text, "offsets": offsets, "labels": labels}

    data = [{"text": x, "labels": y} for x, y in rows("bags")]
    arguments = DPTrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        max_steps=2,
        noise_multiplier=1.0,
        max_grad_norm=0.1,
        target_delta=0.1,
        report_to=[],
        remove_unused_columns=False,
        use_cpu=True,
    )
    given = {
        "per_example_loss_func": lambda outputs, labels: F.cross_entropy(outputs["logits"], labels, reduction="none")
    }
    trainer = DPTrainer(model=WithLogits(), args=arguments, train_dataset=data, data_collator=collate, **given)
    assert trainer.train().global_step == 2


def test_opacus_layers_with_packed_input():
    layers = pytest.importorskip("opacus.layers")
    x = pack_sequence([row for row, _ in rows("sequences")[:5]], enforce_sorted=False)
    for cls in (layers.DPLSTM, layers.DPGRU, layers.DPRNN):
        assert check_model(cls(4, 3, bidirectional=True), {"input": x}).norm_error < 1e-4


def test_rows_are_what_they_were():
    x = pack_sequence([row for row, _ in rows("sequences")], enforce_sorted=False)
    (row,), _ = unpacked(nn.Identity(), (x,), {})
    assert isinstance(row, Ragged) and row.lengths.tolist() == list(LENGTHS)
    for given, again in zip(x, packed(row), strict=True):
        assert torch.equal(given, again)
    _, text, offsets = bags_collated(rows("bags"))
    given = unpacked(Bags(), (text,), {"offsets": offsets})
    assert given[0][0].lengths.tolist() == list(LENGTHS)
    (again,), kwargs = packed(given)
    assert torch.equal(again, text) and torch.equal(kwargs["offsets"], offsets)
