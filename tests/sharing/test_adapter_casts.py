import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.steps import DAPO, build_trainer, options
from torch.utils._python_dispatch import TorchDispatchMode

from vgr_trl.passes import run_pass
from vgr_trl.passes.run_pass import cast_adapters

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}


class Casts(TorchDispatchMode):
    """Counts casts."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "_to_copy" in str(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("changed", [{}, {"gradient_checkpointing": True}, {"max_tokens_per_micro_batch": 60}])
def test_updates_are_the_same_to_the_bit_with_fewer_casts(changed, vision, image_rows, tmp_path, monkeypatch):
    found = []
    for dtype in (None, torch.bfloat16):
        torch.manual_seed(0)
        trainer = build_trainer(
            DAPO, copy.deepcopy(vision[0]), vision[1], image_rows, options(tmp_path, bf16=True, **changed),
            peft_config=LoraConfig(**LORA),
        )  # fmt: skip
        assert run_pass.adapter_dtype(trainer.accelerator) == torch.bfloat16
        monkeypatch.setattr("vgr_trl.trainer.adapter_dtype", lambda accelerator, dtype=dtype: dtype)
        step, counts = trainer.training_step, Casts()

        def counted(*args, step=step, counts=counts, **kwargs):
            with counts:
                return step(*args, **kwargs)

        monkeypatch.setattr(trainer, "training_step", counted)
        trainer.train()
        weights = {name: each.detach() for name, each in trainer.model.named_parameters() if each.requires_grad}
        found.append((counts.count, weights))
    (many, expected), (few, weights) = found
    assert all(torch.equal(weights[name], each) for name, each in expected.items())
    assert few < many


def test_layers_are_left_as_they_were(vision):
    model = get_peft_model(copy.deepcopy(vision[0]), LoraConfig(**LORA))
    layers = [module for module in model.modules() if type(module) is run_pass.Linear]
    layers[0].cast_input_dtype_enabled = False
    before = [dict(vars(layer)) for layer in layers]
    with cast_adapters(model, torch.bfloat16):
        assert not layers[1].cast_input_dtype_enabled
    assert [dict(vars(layer)) for layer in layers] == before
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_dropout": 0.1}])
def test_other_adapters_stay_as_they_are(options, vision):
    model = get_peft_model(copy.deepcopy(vision[0]), LoraConfig(**LORA, **options))
    layer = next(module for module in model.modules() if type(module) is run_pass.Linear)
    with cast_adapters(model, torch.bfloat16):
        assert "forward" not in vars(layer.lora_A["default"])
