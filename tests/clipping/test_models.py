"""Every architecture of docs/models.md against one example at a time; the table is written from what is measured here.

``python -m pytest tests/clipping/test_models.py --write-tables`` writes docs/models.md.
"""

import pytest
import torch
import transformers as hf
from oracle import clipped_sum, distance, errors, per_example_gradients, trainable
from zoo import ALWAYS_UNTIED, LABELS, ZOO, batch_for, build, losses_function

from dp_transformers import PerExampleClipper
from dp_transformers.clipping import precision
from dp_transformers.clipping.modes import MODES
from dp_transformers.losses.heads import find_per_example_loss

CELLS = [
    (name, variant)
    for name in ZOO
    for variant in ("full", "tied", "lora")
    if variant != "tied" or name not in ALWAYS_UNTIED
]


@pytest.mark.table(of=30)
@pytest.mark.parametrize(("name", "variant"), CELLS)
def test_exact_in_every_mode(name, variant, model_table):
    model = build(name, tied=variant == "tied", lora=variant == "lora")
    batch, losses_of = batch_for(name), losses_function(model)
    oracle = per_example_gradients(model, losses_of, batch)
    worst, owners = 0.0, []
    for mode in sorted(MODES):
        norm_error, sum_error, owners = errors(model, mode, batch, losses_of, oracle)
        worst = max(worst, norm_error, sum_error)
        assert norm_error <= 1e-5, mode
        assert sum_error <= 1e-5, mode
    model_table.add(name, variant, worst, owners)


HEADS = {
    "token classification": (hf.BertForTokenClassification, {"num_labels": LABELS}),
    "question answering": (hf.BertForQuestionAnswering, {}),
    "multiple choice": (hf.BertForMultipleChoice, {}),
}


@pytest.mark.parametrize("head", HEADS)
def test_heads_are_exact_in_every_mode(head):
    model_class, options = HEADS[head]
    model = model_class(hf.BertConfig(**ZOO["BERT"][2], **options)).train()
    loss, batch = find_per_example_loss(model), batch_for("BERT")
    inputs = {k: batch[k] for k in ("input_ids", "attention_mask")}
    labels = {
        "token classification": {"labels": batch["labels"].clamp(max=LABELS - 1)},
        "question answering": {
            "start_positions": torch.randint(0, 9, (5,)),
            "end_positions": torch.randint(0, 9, (5,)),
        },
        "multiple choice": {"labels": torch.randint(0, 3, (5,))},
    }[head]
    if head == "multiple choice":  # (B, choices, T), which the model flattens
        inputs = {k: torch.stack([batch_for("BERT", seed=seed)[k] for seed in range(3)], 1) for k in inputs}

    def losses_of(rows):
        given = [rows[name] for name in labels]
        return loss(model(**{k: rows[k] for k in inputs}), given[0] if len(given) == 1 else tuple(given))

    for mode in sorted(MODES):
        norm_error, sum_error, _ = errors(model, mode, inputs | labels, losses_of)
        assert max(norm_error, sum_error) <= 1e-5, mode


@pytest.mark.table(of=30)
@pytest.mark.parametrize("name", ZOO)
def test_bf16_autocast(name, monkeypatch):
    """Norms within 2% of those of one example at a time under autocast, and taking an example out never moves the sum
    by more than C: 50 adversarial batches of BERT and Llama, 16 of each other model."""
    each = 25 if name in ("BERT", "Llama") else 8
    model = build(name)
    losses_of = losses_function(model)

    def in_bf16(batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return losses_of(batch)

    def summed(clipper, losses, weights=None):
        model.zero_grad()
        norms_b = clipper.backward(losses, weights)
        return norms_b, [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trainable(model)]

    batch = batch_for(name)
    norms, _ = clipped_sum(per_example_gradients(model, in_bf16, batch), 1.0)
    norms = torch.tensor(norms)
    with PerExampleClipper(model, 1.0) as clipper:
        got, _ = summed(clipper, in_bf16(batch))
    assert ((got - norms).abs() <= 2e-2 * norms).all()

    for mode, seeds in (("book_keeping", range(each)), ("ghost", range(each, 2 * each))):
        with PerExampleClipper(model, 1.0, mode=mode) as clipper:
            for seed in seeds:
                monkeypatch.setattr(precision, "_cpu_multiplies_bf16", lambda seed=seed: seed % 4 < 2)
                batch, scale, weights = batch_for(name, seed=seed, size=4), torch.ones(4), torch.ones(4)
                if seed % 2:  # all examples equal: the sum is as long as it can be
                    batch = {k: v[:1].expand_as(v) for k, v in batch.items()}
                scale[seed % 4] = 1e3  # an outlier
                norms_b, _ = summed(clipper, in_bf16(batch) * scale)
                scale /= float(norms_b.quantile(0.3)) * 0.99 or 1.0  # most are clipped
                _, whole = summed(clipper, in_bf16(batch) * scale)
                weights[(seed // 4) % 4] = 0
                moved = distance(whole, summed(clipper, in_bf16(batch) * scale, weights)[1])
                assert moved <= clipper.max_grad_norm * (1 + 1e-5), (seed, mode)


def test_table_is_current(model_table, request):
    if not request.config.getoption("--write-tables"):
        assert not model_table.stale(), "docs/models.md is not current: run again with --write-tables"
