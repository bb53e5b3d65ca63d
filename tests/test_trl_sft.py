"""DPSFTTrainer against TRL's SFTTrainer on one row at a time."""

import subprocess
import sys

import pytest
import torch
import transformers as hf
import trl
from chats import FOR_NEIGHBOURS, arguments_of, assert_exact, assert_neighbours, model, rows, tokenizer
from datasets import Dataset
from models import VOCABULARY
from oracle import trainable
from peft import LoraConfig
from PIL import Image
from trl import SFTConfig, SFTTrainer

from dp_transformers import DPSFTConfig, DPSFTTrainer, DPTrainerMixin
from dp_transformers.trainer.refused import refuse_other_trainers
from dp_transformers.trl.sft import one_image_each

pytestmark = [pytest.mark.filterwarnings("ignore:dp_seed"), pytest.mark.halved]
MODES = ["book_keeping", "ghost", "fast_gradient", "per_sample"]


def arguments(folder, cls=DPSFTConfig, **changes):
    return arguments_of(cls, folder, **changes)


FORMATS = {
    "text": {},
    "chat": {},
    "prompt-completion": {},
    "chat-completion": {},
    "completion_only_loss=False": {"completion_only_loss": False},
    "assistant_only_loss": {"assistant_only_loss": True},
    "dft": {"loss_type": "dft", "max_grad_norm": 0.002},  # the gradient of a token is times its probability
    "truncated": {"max_length": 9},
}
DATA = {"completion_only_loss=False": "prompt-completion", "assistant_only_loss": "chat", "dft": "chat-completion", "truncated": "text"}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_one_row_at_a_time(tmp_path, name):
    data, changes = rows(DATA.get(name, name)), FORMATS[name]
    private, plain = (
        cls(model(), arguments(tmp_path, config, **changes), train_dataset=data, processing_class=tokenizer())
        for cls, config in ((DPSFTTrainer, DPSFTConfig), (SFTTrainer, SFTConfig))
    )
    assert_exact(private, plain)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_one_row_at_a_time(tmp_path, mode, lora):
    made = []
    for cls, config, changes in (
        (DPSFTTrainer, DPSFTConfig, {"clipping_mode": mode, "self_check": True}),
        (SFTTrainer, SFTConfig, {}),
    ):
        peft_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False) if lora else None
        args = arguments(tmp_path / cls.__name__, config, seed=7, max_grad_norm=0.2, **changes)
        made.append(cls(model(), args, train_dataset=rows("chat-completion"), processing_class=tokenizer(), peft_config=peft_config))  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(*(trainable(t.model) for t in made), strict=True))
    assert_exact(*made)


@pytest.mark.parametrize(("data", "lora"), [("text", False), ("chat-completion", True)])
def test_neighbours_differ_by_one_row(tmp_path, data, lora):
    peft_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False) if lora else None
    assert_neighbours(
        lambda: DPSFTTrainer(
            model(),
            arguments(tmp_path, seed=7, **FOR_NEIGHBOURS),
            train_dataset=rows(data),
            processing_class=tokenizer(),
            peft_config=peft_config,
        )
    )


def test_the_defaults_are_those_of_trl(tmp_path):
    """But for the privacy parameters, and what the private arguments set themselves."""
    private = DPSFTConfig(
        str(tmp_path), target_epsilon=8.0, target_delta=1e-6, expected_batch_size=8, use_cpu=True, activation_checkpointing=False,
    )  # fmt: skip
    plain = SFTConfig(str(tmp_path), use_cpu=True, activation_checkpointing=False)
    different = {name for name in vars(plain) if getattr(private, name) != getattr(plain, name)}
    assert different <= {"_n_gpu", "distributed_state", "run_name", "logging_dir"}, different
    assert (private.learning_rate, private.max_length, private.bf16) == (2e-5, 1024, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packing": True}, "packing=True.*joins several examples in one row.*set packing=False"),
        ({"padding_free": True, "max_length": None}, "padding_free=True.*set padding_free=False"),
        ({"eval_packing": True}, "eval_packing=True.*leave it None"),
        ({"router_aux_loss_coef": 0.1}, "router_aux_loss_coef=0.1.*all tokens of the batch.*router_aux_loss_coef=0.0"),
        ({"use_liger_kernel": True}, "use_liger_kernel=True.*no loss per example"),
        ({"activation_offloading": True}, "activation_offloading=True.*gradient_checkpointing"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
    ],
)
def test_settings_that_join_or_compare_rows_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **changes)


def mixtral():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    more = {"vocab_size": VOCABULARY, "intermediate_size": 16, "num_local_experts": 2, "pad_token_id": 0}
    return hf.MixtralForCausalLM(hf.MixtralConfig(**sizes, **more))


def test_a_model_whose_router_is_trained_on_the_batch_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"MixtralForCausalLM has a part for its router.*router_aux_loss_coef=0.0"):
        DPSFTTrainer(mixtral(), arguments(tmp_path), train_dataset=rows("text"), processing_class=tokenizer())
    args = arguments(tmp_path, router_aux_loss_coef=0.0)
    DPSFTTrainer(mixtral(), args, train_dataset=rows("text"), processing_class=tokenizer())


def processor_of_images():
    tok = tokenizer()
    tok.add_special_tokens({"additional_special_tokens": ["<image>"]})
    size = {"height": 8, "width": 8}
    images = hf.CLIPImageProcessorPil(size=size, crop_size=size, do_center_crop=False)
    template = (
        "{% for m in messages %}<{{ m.role }}> {% for c in m.content %}"
        "{% if c.type == 'image' %}<image> {% else %}{{ c.text }} {% endif %}{% endfor %}<end> {% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    settings = {"patch_size": 4, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "full"}
    return hf.LlavaProcessor(images, tok, chat_template=template, **settings)


def llava():
    torch.manual_seed(0)
    widths = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    tok = processor_of_images().tokenizer
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**widths, image_size=8, patch_size=4), text_config=hf.LlamaConfig(vocab_size=len(tok), **widths),
        image_token_index=tok.convert_tokens_to_ids("<image>"), vision_feature_select_strategy="full", vision_feature_layer=-2,
    )  # fmt: skip
    return hf.LlavaForConditionalGeneration(config)


def rows_with_images(count=lambda i: 1):
    made = []
    for i, row in enumerate(rows("chat-completion")):
        numbers = torch.randint(0, 256, (8, 8, 3), generator=torch.Generator().manual_seed(i), dtype=torch.uint8)
        made.append(row | {"images": [Image.fromarray(numbers.numpy())] * count(i)})
    return Dataset.from_list(made)


@pytest.mark.parametrize("tuning", ["language model", "all", "LoRA"])
def test_rows_with_an_image_each_are_exact(tuning, tmp_path):
    peft = LoraConfig(r=4, target_modules=r".*language_model.*(q_proj|v_proj)", init_lora_weights=False)
    kwargs = {"train_dataset": rows_with_images(), "processing_class": processor_of_images()}
    models = [llava(), llava()]
    for each in models if tuning == "language model" else ():
        each.model.vision_tower.requires_grad_(False)
    made = []
    for each, cls in zip(models, (DPSFTConfig, SFTConfig), strict=True):
        torch.manual_seed(1)
        more = {"max_grad_norm": 0.05, "self_check": True} if cls is DPSFTConfig else {}
        trainer = DPSFTTrainer if cls is DPSFTConfig else SFTTrainer
        lora = peft if tuning == "LoRA" else None
        made.append(trainer(each, arguments(tmp_path, cls, seed=7, **more), peft_config=lora, **kwargs))
    assert_exact(*made)


@pytest.mark.parametrize("counts", [[2], [1, 2, 0]], ids=["two", "one, two or none"])
def test_rows_with_another_number_of_images_are_refused(counts, tmp_path):
    trainer = DPSFTTrainer(
        llava(), arguments(tmp_path), train_dataset=rows_with_images(lambda i: counts[i % len(counts)]), processing_class=processor_of_images(),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"has [02] images, and private training needs exactly one"):
        trainer.train()


def test_a_text_with_more_image_tokens_than_another_is_refused():
    def collate(examples):
        return {"input_ids": torch.tensor([[9, 9, 9, 1], [9, 1, 1, 1]])}

    with pytest.raises(ValueError, match="have from 1 to 3 image tokens"):
        one_image_each(collate, 9, [{"image": "one"}] * 2)


def test_a_processor_that_joins_all_images_is_refused():
    def joined(examples):
        return {"input_ids": torch.zeros(len(examples), 4), "pixel_values": torch.zeros(7 * len(examples), 12)}

    with pytest.raises(ValueError, match=r"'pixel_values' of shape \(14, 12\) for 2 rows"):
        one_image_each(joined, 9, [{"image": "one"}] * 2)


@pytest.mark.parametrize("name", ["KTOTrainer", "GRPOTrainer", "RLOOTrainer"])
def test_trainers_that_compare_rows_cannot_be_derived_from(name):
    """Not all of them can be imported everywhere, as they need more than TRL."""
    base = trl.KTOTrainer if name == "KTOTrainer" else type(name, (hf.Trainer,), {"__module__": "trl.trainer"})
    with pytest.raises(TypeError, match=rf"{name} of TRL cannot be made private \(Mine tries to\).*DPDPOTrainer"):
        type("Mine", (DPTrainerMixin, base), {})


def test_without_trl_the_error_names_the_extra():
    code = "import sys; sys.modules['trl'] = None\nimport importlib.util\nfrom dp_transformers import *\nimport dp_transformers\ndp_transformers.DPSFTTrainer"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 'pip install "dp-finetune[trl]"' in found.stderr.splitlines()[-1]


def test_logs_tell_nothing_of_private_batches(tmp_path):
    """Every line has ε; entropy, accuracy and the number of tokens are of the evaluation data alone."""
    args = arguments(tmp_path, target_epsilon=20.0, noise_multiplier=None, dp_seed=None, max_steps=4, logging_steps=1, eval_strategy="steps",
                     eval_steps=2)  # fmt: skip
    trainer = DPSFTTrainer(
        model(), args, train_dataset=rows("chat"), eval_dataset=rows("chat", (4, 6)), processing_class=tokenizer()
    )
    trainer.train()
    lines = trainer.state.log_history
    training, evaluation = [x for x in lines if "loss" in x], [x for x in lines if "eval_loss" in x]
    assert len(training) == 4 and len(evaluation) == 2
    assert all(set(x) == {"loss", "grad_norm", "learning_rate", "epsilon", "epoch", "step"} for x in training)
    for line in evaluation:
        assert {"eval_entropy", "eval_mean_token_accuracy", "epsilon"} <= set(line) and "eval_num_tokens" not in line
    plain = SFTTrainer(trainer.model, arguments(tmp_path, SFTConfig), train_dataset=rows("chat"), eval_dataset=rows("chat", (4, 6)),
                       processing_class=tokenizer())  # fmt: skip
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("name", ["SFT", "DPO", "Reward"])
def test_private_arguments_in_a_trainer_of_trl_name_the_private_one(name):
    trainer = getattr(trl, f"{name}Trainer")
    with pytest.raises(ValueError, match=rf"Make a DP{name}Trainer instead"):
        refuse_other_trainers(trainer.__new__(trainer))
