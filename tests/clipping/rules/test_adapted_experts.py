"""LoRA on the weights of fused experts (peft's ``target_parameters``) against one example at a time."""

import copy

import peft
import pytest
import torch
from oracle import assert_exact_in_modes, clipped_sum, distance, length, per_example_gradients, trainable
from zoo import ZOO, batch_for, build, losses_function

from dp_transformers import PerExampleClipper
from dp_transformers.clipping.modes import MODES

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted(name="Mixtral", targets=EXPERTS, **options):
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["q_proj"], target_parameters=targets, task_type="CAUSAL_LM", **options
    )
    return spread(peft.get_peft_model(build(name), config)).train()


def spread(model):
    """Adapters start where they change nothing, and then half of their gradients are zero."""
    with torch.no_grad():
        for p in trainable(model):
            p.add_(0.1 * torch.randn_like(p))
    return model


def check(model, modes=("book_keeping",), name="Mixtral"):
    owners = assert_exact_in_modes(model, losses_function(model), batch_for(name), modes)
    assert not any(owner.is_rerun for owner in owners)


@pytest.mark.parametrize("targets", [EXPERTS[:1], EXPERTS[1:], EXPERTS[::-1]], ids=["up", "down", "both"])
@pytest.mark.parametrize("name", ["Mixtral", "Mixtral + eager experts", "GPT-OSS"])
def test_by_the_rule_whatever_is_adapted(name, targets):
    check(adapted(name, targets), MODES if name == "Mixtral" else ["book_keeping"], name)


def test_scaled_by_the_root_of_the_rank():
    check(adapted(use_rslora=True), ["book_keeping"])


@pytest.mark.parametrize("mode", ["book_keeping", "ghost"])
@pytest.mark.parametrize("by", ["scaling", "adapter"])
def test_what_is_set_otherwise_before_the_backward_pass_is_refused(by, mode):
    """The rule would take the new scaling for what the forward pass computed."""
    model, batch = adapted(), batch_for("Mixtral")
    model.add_adapter("other", copy.deepcopy(model.peft_config["default"]))
    losses_of = losses_function(model)
    with PerExampleClipper(model, 0.3, mode=mode) as clipper:
        clipper.backward(losses_of(batch))
        if by == "scaling":
            with peft.helpers.rescale_adapter_scale(model, 0.5):
                losses = losses_of(batch)
        else:
            losses = losses_of(batch)
            model.base_model.set_adapter(["default", "other"])
        with pytest.raises(ValueError, match="before the backward pass that was set to"):
            clipper.backward(losses)


def test_beside_adapters_the_other_weight_may_be_trained():
    model = adapted(targets=EXPERTS[:1])
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad or name.endswith("down_proj"))
    check(model)


@pytest.mark.parametrize("self_check", [True, False])
def test_a_weight_that_is_trained_itself_has_no_adapters(self_check):
    model, batch = adapted(), batch_for("Mixtral")
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad or name.endswith("down_proj"))
    with PerExampleClipper(model, 0.3, self_check=self_check), pytest.raises(ValueError, match="'down_proj' of"):
        losses_function(model)(batch)


def test_two_adapters_at_once():
    model = adapted()
    model.add_adapter("other", copy.deepcopy(model.peft_config["default"]))
    model.base_model.set_adapter(["default", "other"])
    check(spread(model), ["book_keeping", "per_sample"])


def test_several_steps_with_weights_too_large_to_be_copied(monkeypatch):
    """Every forward pass of peft writes the experts' weights onto themselves, which is no change."""
    name = "Mixtral"
    model_class, config_class, settings = ZOO[name]
    monkeypatch.setitem(ZOO, name, (model_class, config_class, settings | {"intermediate_size": 600}))
    model = adapted(name)
    assert max(p.numel() for p in model.parameters()) > 2**16
    plain, bound = copy.deepcopy(model), 0.3
    with PerExampleClipper(model, bound) as clipper:
        for step in range(3):
            batch = batch_for(name, seed=step)
            total = clipped_sum(per_example_gradients(plain, losses_function(plain), batch), bound)[1]
            model.zero_grad()
            clipper.backward(losses_function(model)(batch))
            assert distance([p.grad for p in trainable(model)], total) <= 1e-5 * length(total)
            with torch.no_grad():
                for p, other in zip(trainable(model), trainable(plain), strict=True):
                    other.copy_(p.sub_(p.grad))


def test_the_self_check_of_experts_in_bfloat16():
    """It looks at them in float32, where what a forward pass writes onto itself are other numbers."""
    model, batch = adapted().to(torch.bfloat16), batch_for("Mixtral")
    plain, bound = copy.deepcopy(model).float(), 0.3
    with PerExampleClipper(model, bound) as clipper:
        clipper.backward(losses_function(model)(batch))
        assert clipper.checked
    total = clipped_sum(per_example_gradients(plain, losses_function(plain), batch), bound)[1]
    assert distance([p.grad for p in trainable(model)], total) <= 0.1 * length(total)


@pytest.mark.parametrize("how", ["disabled", "merged"])
def test_adapters_that_take_no_part_are_refused(how):
    model, batch = adapted(), batch_for("Mixtral")
    with PerExampleClipper(model, 1.0) as clipper:
        clipper.backward(losses_function(model)(batch))
        if how == "disabled":  # without peft's freezing of what is disabled, which is seen by itself
            for module in model.modules():
                module._disable_adapters = True
        else:
            model.merge_adapter()
        with pytest.raises(ValueError, match="disabled or merged"):
            losses_function(model)(batch)
