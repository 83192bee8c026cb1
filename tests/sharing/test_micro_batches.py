"""Prompts are shared within a call, whatever happens between the calls of an optimizer step."""

from types import SimpleNamespace

import pytest
import torch
from support.models.compare import gradients, largest_relative, loss_of, scored, with_head
from support.models.families import build, make_batch
from support.steps import STOCK, assert_same_steps, build_trainer, options, trained
from torch import nn
from trl import GRPOConfig

from vgr_trl.errors import ConfigError
from vgr_trl.sharing import share_prompts, whole_groups


def case(name="qwen2_5_vl"):
    model, batch = with_head(build(name)).double().train(), make_batch(name)
    batch.inputs = {key: value.double() if value.is_floating_point() else value for key, value in batch.inputs.items()}
    return model, batch


def test_gradients_of_a_loss_by_autograd_grad_and_by_two_backward_passes():
    model, batch = case()
    expected = gradients(model, batch)
    names, weights = zip(*((name, each) for name, each in model.named_parameters()), strict=True)
    with share_prompts(model):
        loss = loss_of(model, batch)
        found = torch.autograd.grad(loss, weights, retain_graph=True, materialize_grads=True)
        model.zero_grad()
        loss.backward(retain_graph=True)
        loss.backward()
    assert largest_relative(expected, dict(zip(names, found, strict=True))) < 1e-6
    twice = {name: each.grad / 2 for name, each in model.named_parameters() if each.grad is not None}
    assert largest_relative({name: expected[name] for name in twice}, twice) < 1e-6


def test_weights_that_are_written_between_micro_batches():
    model, batch = case("llama")
    with torch.no_grad(), share_prompts(model):
        scored(model, batch)
        nn.init.ones_(model.model.layers[0].self_attn.k_proj.weight.data)
        shared, _ = scored(model, batch)
    with torch.no_grad():
        assert (scored(model, batch)[0] - shared).abs().max() < 1e-9


@pytest.mark.parametrize("loss", ["dapo", "grpo"])
def test_micro_batches_of_whole_groups_take_trls_steps(loss, vision, image_rows, tmp_path):
    small = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "loss_type": loss}
    settings = options(tmp_path, **small)
    model, processor = vision
    stock = trained(STOCK, model, processor, image_rows, settings)
    args = whole_groups(GRPOConfig(**settings))
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps, args.steps_per_generation) == (4, 2, 2)
    joined = {name: getattr(args, name) for name in (*small, "steps_per_generation")}
    trainer = build_trainer(STOCK, model, processor, image_rows, settings | joined)
    with share_prompts(trainer.model) as report:
        trainer.train()
    assert report.prompts_per_row < 1 / 2  # TRL shuffles rows over two micro-batches
    assert_same_steps(model, trainer, stock)


def test_groups_that_no_number_makes_whole():
    with pytest.raises(ConfigError):
        whole_groups(SimpleNamespace(
            num_generations=8, per_device_train_batch_size=2, gradient_accumulation_steps=2, steps_per_generation=4,
        ))  # fmt: skip
