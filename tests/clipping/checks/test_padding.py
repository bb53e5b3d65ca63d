"""Padding that moves gradients, and padding that does not."""

import random

import numpy as np
import pytest
import torch
from models import build
from torch import nn
from transformers import (
    BertConfig,
    BertForMultipleChoice,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForTokenClassification,
    Wav2Vec2Config,
    Wav2Vec2ForSequenceClassification,
)

from dp_transformers import PerExampleClipper
from dp_transformers.clipping.checks.spread_numbers import spread_numbers
from dp_transformers.clipping.errors import SelfCheckError
from dp_transformers.losses.heads import find_per_example_loss


class ReadsNames(nn.Module):
    """A recurrent classifier: of the last position whatever it is, of the last own one, or of packed names."""

    def __init__(self, reads, kind=nn.LSTM):
        super().__init__()
        self.embedding, self.rnn, self.head, self.reads = (
            nn.Embedding(50, 12),
            kind(12, 16, batch_first=True),
            nn.Linear(16, 3),
            reads,
        )

    def forward(self, ids, lengths):
        x = self.embedding(ids)
        if self.reads == "packed":
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.head(self.rnn(packed)[1][0][-1])
        states = self.rnn(x)[0]
        last = torch.full_like(lengths, ids.shape[1]) if self.reads == "last" else lengths
        return self.head(states[torch.arange(len(ids)), last - 1])


class ReadsTexts(nn.Module):
    """Embeddings averaged over all positions, or over those of a mask."""

    def __init__(self, masked):
        super().__init__()
        self.embedding, self.head, self.masked = nn.Embedding(1000, 12), nn.Linear(12, 3), masked

    def forward(self, input_ids, attention_mask):
        x = self.embedding(input_ids)
        mask = attention_mask[..., None].to(x.dtype)
        return self.head((x * mask).sum(1) / mask.sum(1) if self.masked else x.mean(1))


class ReadsSounds(nn.Module):
    """Strided convolutions, and numbers for every frame."""

    def __init__(self, kernel=5, padding=0):
        super().__init__()
        self.conv, self.head = nn.Conv1d(1, 8, kernel, stride=2, padding=padding), nn.Linear(8, 3)

    def forward(self, input_values, scale=None):
        return self.head(torch.tanh(self.conv(input_values[:, None])).transpose(1, 2))


def own_positions(lengths, side="right"):
    positions = torch.arange(max(lengths))
    lengths = torch.tensor(lengths)[:, None]
    return positions < lengths if side == "right" else positions >= max(lengths) - lengths


def padded_ids(side="right", lengths=(5, 9, 12, 7), value=0):
    own_bt = own_positions(lengths, side)
    return {"input_ids": torch.randint(1, 1000, own_bt.shape).where(own_bt, value), "attention_mask": own_bt.long()}


def padding_of(model, args, kwargs, own_bt, loss_function=None, **options):
    with PerExampleClipper(model.train(), 1.0) as clipper:
        return clipper.check_padding(args, kwargs, own_bt, loss_function, **options)


def tiny_wav2vec2(norm):
    config = Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3),
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, feat_extract_norm=norm, classifier_proj_size=8, apply_spec_augment=False, layerdrop=0.0, do_stable_layer_norm=norm == "layer",
    )  # fmt: skip
    return Wav2Vec2ForSequenceClassification(config)


PADDED_BY_OTHERS = {  # model, side, whether others then decide an example's gradient
    "GPT-2": (lambda: build("gpt2", dropout=0.3), "right", False),
    "GPT-2 on the left": (lambda: build("gpt2", dropout=0.3), "left", True),
    "BERT": (lambda: build("bert"), "right", False),
    "BERT on the left": (lambda: build("bert"), "left", True),
    "average over padding": (lambda: ReadsTexts(masked=False), "right", True),
    "average without padding": (lambda: ReadsTexts(masked=True), "right", False),
    "average without padding on the left": (lambda: ReadsTexts(masked=True), "left", False),
    "T5's encoder": (lambda: T5EncoderModel(T5Config(**TINY_T5)), "right", False),
    "T5's encoder on the left": (
        lambda: T5EncoderModel(T5Config(**TINY_T5)),
        "left",
        False,
    ),  # its positions are relative
}
TINY_T5 = {
    "vocab_size": 1000,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 16,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", PADDED_BY_OTHERS)
def test_padding_to_each_others_length(case, dtype, caplog):
    make, side, is_refused = PADDED_BY_OTHERS[case]
    batch = padded_ids(side)
    if not is_refused:
        assert padding_of(make().to(dtype), (), batch, batch["attention_mask"]) <= 1e-5
        return
    with pytest.raises(SelfCheckError, match=f"padded on the {side} to the length of a longer one"):
        padding_of(make().to(dtype), (), batch, batch["attention_mask"])
    assert "could not be checked" not in caplog.text


@pytest.mark.parametrize("kind", [nn.LSTM, nn.RNN])
@pytest.mark.parametrize("reads", ["last", "last own", "packed"])
def test_padding_of_recurrent_models(reads, kind):
    """From tuples, as a plain loop has them; what is read at the last position is that of padding."""
    if reads == "packed" and kind is nn.RNN:
        return  # its states come as a tensor
    lengths = [3, 9, 7, 5]
    own_bt = own_positions(lengths)
    args = (torch.randint(1, 50, own_bt.shape) * own_bt, torch.tensor(lengths))
    if reads != "last":
        assert padding_of(ReadsNames(reads, kind), args, {}, own_bt) <= 1e-5
        return
    with pytest.raises(SelfCheckError, match=r"padded on the right.*pack_padded_sequence"):
        padding_of(ReadsNames(reads, kind), args, {}, own_bt)


@pytest.mark.parametrize("reads_last", [True, False])
def test_padding_of_positions_that_come_first(reads_last):
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(5, 8), nn.Linear(8, 3)

        def forward(self, x):
            states = self.head(self.rnn(x)[0])
            return states[-1:] if reads_last else states

    own_bt = own_positions([3, 9, 7, 5])
    x = torch.randn(9, 4, 5) * own_bt.T[..., None]
    with PerExampleClipper(Reads(), 1.0, batch_first=False) as clipper:
        if not reads_last:
            assert clipper.check_padding((x,), {}, own_bt) <= 1e-5
            return
        with pytest.raises(SelfCheckError, match="padded on the right"):
            clipper.check_padding((x,), {}, own_bt)


def test_lengths_stay_true():
    """Also those that say how long the padded rows are, and those whose name does not tell."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(1, 2)

        def forward(self, x, n):
            seen.append((n.tolist(), x.shape[1]))
            return self.head(x.cumsum(1)[torch.arange(len(x)), n.clamp(1, x.shape[1]) - 1][:, None])

    seen, lengths, x = [], [3, 9, 7, 5], torch.randn(4, 9)
    own_bt = own_positions(lengths)
    model = Counts()
    assert padding_of(model, (x * own_bt, torch.tensor(lengths)), {}, own_bt) <= 1e-5
    assert ([7], 7) in seen and ([7], 9) in seen and ([9], 7) not in seen
    model = Counts()
    with pytest.raises(SelfCheckError, match="padded on the right"):
        padding_of(model, (torch.randn(4, 9), torch.full((4,), 9)), {}, own_bt)
    assert ([7], 7) in seen and ([9], 9) in seen and ([9], 7) not in seen


@pytest.mark.parametrize(("norm", "is_refused"), [("group", True), ("layer", False)])
def test_padding_of_sounds(norm, is_refused):
    """A norm over all frames of a sound, padding included, is what the base models of wav2vec2 have."""
    own_bt = own_positions([301, 420, 640, 500])
    batch = {"input_values": torch.randn(own_bt.shape) * own_bt, "attention_mask": own_bt.long()}
    if not is_refused:
        assert padding_of(tiny_wav2vec2(norm), (), batch, own_bt) <= 1e-4
        return
    with pytest.raises(SelfCheckError, match="padded on the right"):
        padding_of(tiny_wav2vec2(norm), (), batch, own_bt)


def test_padding_of_frames_that_convolutions_make():
    own_bt = own_positions([9, 20, 13, 14])
    x = torch.randn(own_bt.shape) * own_bt
    assert padding_of(ReadsSounds(), (x,), {}, own_bt) <= 1e-5
    with pytest.raises(SelfCheckError, match="padded on the right"):
        padding_of(ReadsSounds(padding=2), (x + 3,), {}, own_bt)  # the convolution's own zeros are not the padding
    with pytest.raises(
        SelfCheckError, match="an example with 4 positions of its own, padded to 20, cannot be computed without"
    ):
        padding_of(ReadsSounds(kernel=8), (x,), {}, own_positions([4, 20, 2, 20]))
    with pytest.raises(SelfCheckError, match="an example with 2 positions"):
        padding_of(ReadsSounds(kernel=8), (x,), {}, own_positions([9, 20, 2, 20]), row=2)


def test_padding_inside():
    """Positions that are nobody's between those that are, and a model that looks at them or not."""
    own_bt = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1]]).bool()
    x = torch.randn(2, 6, 1)
    assert padding_of(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 2)), (x,), {}, own_bt) <= 1e-5
    with pytest.raises(SelfCheckError, match="padded inside to the length of a longer one"):
        padding_of(Cumulated(), (x,), {}, own_bt)


class Cumulated(nn.Linear):
    def __init__(self):
        super().__init__(1, 4)

    def forward(self, x):
        return super().forward(x).cumsum(1)


@pytest.mark.parametrize("choices", [2, 3])
def test_padding_of_choices(choices):
    lengths = torch.tensor([[5, 3, 1], [2, 1, 1], [1, 2, 2]])[..., :choices]
    mask = (torch.arange(lengths.max()) < lengths[..., None]).long()
    if choices == 3:  # as many as positions
        mask = mask[1:, :, :3].flip(0)
        mask[0, 0, 2] = 1
    ids = torch.randint(1, 1000, mask.shape) * mask
    model = BertForMultipleChoice(
        BertConfig(vocab_size=1000, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    )
    batch = {"input_ids": ids, "attention_mask": mask}
    assert padding_of(model, (), batch, mask) <= 1e-5
    batch = {name: x.flip(-1) for name, x in batch.items()}
    with pytest.raises(SelfCheckError, match="padded on the left"):
        padding_of(model, (), batch, mask.flip(-1))


def test_padding_of_an_encoder_whose_targets_are_as_long():
    """They have a length of their own."""
    model, batch = T5ForConditionalGeneration(T5Config(**TINY_T5)), padded_ids()
    batch["labels"] = torch.randint(1, 1000, (4, 12))
    loss = find_per_example_loss(model)

    def losses_of(labels, **rows):
        return loss(model(**rows, labels=labels), labels)

    assert padding_of(model, (), batch, batch["attention_mask"], losses_of) <= 1e-5


def test_padding_of_labels_that_an_encoder_decoder_predicts_for_its_inputs():
    """They are as long as the inputs, and are cut with them."""
    model, batch = UMT5ForTokenClassification(UMT5Config(**TINY_T5, num_labels=3)), padded_ids()
    batch["labels"] = torch.randint(0, 3, (4, 12)).masked_fill(batch["attention_mask"] == 0, -100)
    loss = find_per_example_loss(model)

    def losses_of(labels, **rows):
        return loss(model(**rows), labels)

    assert padding_of(model, (), batch, batch["attention_mask"], losses_of) <= 1e-5


def test_padding_is_looked_at_on_synthetic_content():
    """No number of an example's own decides, and where nothing is padded nothing is computed."""
    seen, batch = [], padded_ids()
    model = ReadsTexts(masked=True)

    def note(module, args, kwargs):
        if torch.is_grad_enabled():  # not where it is only looked how many words there are
            seen.append(kwargs["input_ids"])

    model.register_forward_pre_hook(note, with_kwargs=True)
    with PerExampleClipper(model, 1.0, self_check=False) as clipper:
        state = torch.get_rng_state()
        clipper.check_padding((), batch, batch["attention_mask"])
        assert torch.equal(torch.get_rng_state(), state) and model.training
        assert {len(x[0]) for x in seen} == {9, 12}
        assert all((x[0, :9] != batch["input_ids"][1, :9]).any() for x in seen)
        assert all((x[0, 9:] == 0).all() for x in seen)
        seen.clear()
        full = {name: x[2:3] for name, x in batch.items()}
        assert clipper.check_padding((), full, full["attention_mask"]) == 0 and not seen


def scaled_by_length(x):
    return x * (1 + 8 / x.shape[1])


def noise_by_length(x):
    return x + torch.zeros_like(x).uniform_(-0.9, 0.9) / x.shape[1]


def normal_noise_by_length(x):
    return x + torch.randn_like(x) / x.shape[1]


def dropout_by_length(x):
    return nn.functional.dropout(x, 1 / x.shape[1])


def dropout_and_noise(x):
    """Neither depends on the length."""
    return nn.functional.dropout(x, 0.4) * torch.empty_like(x).uniform_(0.5, 1.5) + 0.1 * torch.randn_like(x)


def permuted(x):
    """Numbers that are not known to be the same for every length, and do depend on it."""
    return x[..., torch.randperm(x.shape[-1])] + 0.1 * torch.randint(3, x.shape)


def masked_by_numpy(x):
    return x * torch.from_numpy(np.random.rand(x.shape[1]) < 0.7)[:, None]


IN_TRAINING = {  # what is done with embeddings, and whether padding then changes a gradient
    scaled_by_length: True,
    noise_by_length: True,
    normal_noise_by_length: True,
    dropout_by_length: True,
    dropout_and_noise: False,
    permuted: False,
    masked_by_numpy: False,
}


@pytest.mark.parametrize("make", [lambda: build("bert"), lambda: ReadsTexts(masked=True)])
@pytest.mark.parametrize("change", IN_TRAINING)
def test_what_padding_does_in_training_alone(change, make):
    model, batch = make(), padded_ids()
    embedding = next(m for m in model.modules() if isinstance(m, nn.Embedding) and m.num_embeddings == 1000)
    embedding.register_forward_hook(lambda module, args, x: change(x) if module.training else x)
    if not IN_TRAINING[change]:
        assert padding_of(model, (), batch, batch["attention_mask"]) <= 1e-5
        return
    with pytest.raises(SelfCheckError, match="padded on the right to the length of a longer one"):
        padding_of(model, (), batch, batch["attention_mask"])


@pytest.mark.parametrize("known", [True, False])
def test_random_numbers_that_do_not_depend_on_lengths(known):
    x = torch.ones(7, 3, requires_grad=True)
    attention = nn.functional.scaled_dot_product_attention
    by_row = torch.vmap(lambda row: nn.functional.dropout(row, 0.5), randomness="different")
    lstm = nn.LSTM(3, 4, 2, dropout=0.5)
    with spread_numbers({7}) as draws_no_others:
        kept = [torch.native_dropout(x, 0.5, True)[0] / 4, nn.functional.dropout(x, 0.5), by_row(x)]
        given = torch.tensor([0.0, 0.5, 1.0])
        by_probability = [
            torch.bernoulli(given),
            torch.empty(3).bernoulli_(given),
            torch.empty(2).bernoulli_(),
            torch.bernoulli(x, 0.3),
        ]
        drawn = [torch.rand(7, 3), torch.rand_like(x), torch.randn(7, 4), torch.empty(3).uniform_(2, 4)]
        drawn += [torch.empty(3).normal_(1, 2), torch.empty(3).exponential_(), torch.randn_like(x)]
        same = [torch.rand(3, 7), torch.randn(7), torch.rand(2, 8), torch.randn(5)]
        spread = torch.rand(1000)
        attention(x[None], x[None], x[None], dropout_p=0.5).sum().backward()
        states = lstm(x[:1].expand(1, 5, 3))[0]
        if not known:
            torch.randperm(5)
        assert draws_no_others() == known
    assert all((each == 0.5).all() for each in kept)  # the probability of being kept is seen
    for each, expected in zip(
        by_probability, [given**2, given**2, torch.full((2,), 0.25), torch.full((7, 3), 0.09)], strict=True
    ):
        torch.testing.assert_close(each, expected)
    assert all((each[..., 0] != each[..., 1]).all() for each in drawn)
    assert 0 < spread.min() < 0.002 and 0.998 < spread.max() < 1 and abs(spread.mean() - 0.5) < 0.002
    assert all(each.unique().numel() == 1 for each in same) and torch.equal(states[0, 0], states[0, 4])
    with spread_numbers({7}) as draws_no_others:
        (random.random if known else np.random.rand)()
        assert not draws_no_others()
