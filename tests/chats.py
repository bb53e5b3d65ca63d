"""A tokenizer of words with a chat template, a tiny model that reads it, and rows in the formats of TRL."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from datasets import Dataset
from models import VOCABULARY
from oracle import clipped_sum, distance, length, trainable
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from dp_transformers import DPTrainingArguments
from dp_transformers.mechanism.sampling import DrawSampler

SPECIAL = ["<pad>", "<end>", "<user>", "<assistant>", "<unknown>"]
WORDS = [f"w{i}" for i in range(VOCABULARY - len(SPECIAL))]
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<assistant> {% generation %}{{ message.content }} <end>{% endgeneration %} "
    "{% else %}<user> {{ message.content }} <end> {% endif %}{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def tokenizer() -> hf.PreTrainedTokenizerFast:
    core = Tokenizer(WordLevel({word: i for i, word in enumerate([*SPECIAL, *WORDS])}, unk_token="<unknown>"))
    core.pre_tokenizer = WhitespaceSplit()
    made = hf.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    )
    made.chat_template = TEMPLATE
    return made


def model(kind: type = hf.LlamaForCausalLM, seed: int = 0, **changes):
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}  # fmt: skip
    extra = {"num_labels": 1} if kind is hf.LlamaForSequenceClassification else {}
    return kind(hf.LlamaConfig(**{**sizes, "pad_token_id": 0, "eos_token_id": 1, **extra, **changes}))


def words(length: int, start: int) -> str:
    return " ".join(WORDS[(start * 7 + 3 * i) % len(WORDS)] for i in range(length))


LENGTHS = (3, 9, 5, 12, 7, 4, 8, 6)


def _said(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def rows(kind: str, lengths=LENGTHS) -> Dataset:
    """Rows of several lengths: text, chat, prompt-completion, preference, chat-preference."""
    made = []
    for i, n in enumerate(lengths):
        prompt, answer, other = words(2 + i % 3, i), words(n, i + 20), words(14 - n, i + 40)
        question, reply = _said("user", prompt), _said("assistant", answer)
        made.append(
            {
                "text": {"text": f"{prompt} {answer}"},
                "chat": {"messages": [question, reply, _said("user", other), _said("assistant", prompt)]},
                "prompt-completion": {"prompt": f"{prompt} ", "completion": answer},
                "chat-completion": {"prompt": [question], "completion": [reply]},
                "preference": {"prompt": f"{prompt} ", "chosen": answer, "rejected": other},
                "chat-preference": {"prompt": [question], "chosen": [reply], "rejected": [_said("assistant", other)]},
            }[kind]
        )
    return Dataset.from_list(made)


COMMON = {"max_steps": 1, "learning_rate": 0.0, "use_cpu": True, "bf16": False, "disable_tqdm": True, "report_to": "none",
          "save_strategy": "no", "activation_checkpointing": False, "optim": "sgd", "lr_scheduler_type": "constant"}  # fmt: skip


def arguments_of(cls, folder, **changes):
    """Of one step on a part of the rows, without noise where they are private."""
    private = {"noise_multiplier": 0.0, "target_delta": 1e-3, "expected_batch_size": 6, "per_device_train_batch_size": 3, "max_grad_norm": 0.5,
               "dp_seed": 3, "self_check": False}  # fmt: skip
    return cls(str(folder), **{**COMMON, **(private if issubclass(cls, DPTrainingArguments) else {}), **changes})


class Sums(hf.TrainerCallback):
    """What the optimizer is given in each step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append([p.grad.clone() for p in trainable(model)])


class StopAt(hf.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == self.step


def one_at_a_time(plain, trained, indices, bound):
    """The clipped sum of the rows' gradients, of the loss that TRL's own trainer computes for a batch of that row."""
    gradients = []
    for i in indices:
        batch = plain.data_collator([plain.train_dataset[i]])
        loss = plain.compute_loss(trained, batch)
        found = torch.autograd.grad(loss, trainable(trained), allow_unused=True)
        gradients.append(
            [torch.zeros_like(p) if g is None else g for p, g in zip(trainable(trained), found, strict=True)]
        )
    return clipped_sum(gradients, bound)


def trained(trainer, sums):
    """Train, and return the drawn rows of each step."""
    drawn, draw = [], DrawSampler.draw

    def noted(sampler):
        drawn.append(draw(sampler))
        return drawn[-1]

    trainer.add_callback(sums)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DrawSampler, "draw", noted)
        trainer.train()
    return [list(found.indices) for found in drawn][: len(sums.steps)]


def assert_exact(private, plain):
    """The first step's sum is that of one row at a time, of which some are clipped."""
    sums, bound = Sums(), private.args.max_grad_norm
    indices = trained(private, sums)[0]
    assert len(indices) > 3
    norms, total = one_at_a_time(plain, plain.model.train(), indices, bound)
    assert max(norms) > bound
    found = [g * private.args.expected_batch_size for g in sums.steps[0]]
    assert distance(found, total) <= 1e-5 * length(total)


FOR_NEIGHBOURS = {"max_steps": 3, "max_grad_norm": 0.1, "expected_batch_size": 4, "self_check": False}


def assert_neighbours(make, row=3):
    """Without one row the sum moves by C at most where it was drawn, and not at all elsewhere. ``make`` builds the
    trainer with FOR_NEIGHBOURS; without noise all else is the same."""

    def sums_of(out):
        trainer, sums = make(), Sums()
        draw, drawn = DrawSampler.draw, []

        def with_or_without(sampler):
            found = draw(sampler)
            drawn.append(found.indices)
            return type(found)(found.number, [i for i in found.indices if i != out], found.starts_pass, found.step)

        trainer.add_callback(sums)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DrawSampler, "draw", with_or_without)
            trainer.train()
        return drawn, sums.steps

    (drawn, whole), (again, others) = sums_of(None), sums_of(row)
    size, bound = FOR_NEIGHBOURS["expected_batch_size"], FOR_NEIGHBOURS["max_grad_norm"]
    assert drawn == again and any(row in indices for indices in drawn)
    for indices, a, b in zip(drawn, whole, others, strict=False):
        moved = distance(a, b) * size / bound
        assert moved <= (1 + 1e-5 if row in indices else 1e-5)
        assert moved > 0.1 or row not in indices
