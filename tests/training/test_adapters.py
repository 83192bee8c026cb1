import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from support.trainers import tiny_model
from trl import ModelConfig

from vgr_trl.cli.arguments import parse
from vgr_trl.cli.train import separate_lora_modules
from vgr_trl.errors import ConfigError
from vgr_trl.validate import options


def test_a_copy_of_a_model_that_has_a_trainer_is_trained_itself(text_trainer, text_model):
    """TRL's forward of a copy would compute with the weights of the model that it was copied from."""
    text_trainer(model=text_model)
    copied = copy.deepcopy(text_model)
    trainer = text_trainer(model=copied, max_steps=2)
    before = {name: value.clone() for name, value in copied.named_parameters()}
    trainer.train()
    assert all(torch.equal(value, text_model.state_dict()[name]) for name, value in before.items())
    assert not all(torch.equal(value, before[name]) for name, value in copied.named_parameters())
    fresh = copy.deepcopy(text_model)
    fresh.load_state_dict(copied.state_dict())
    ids = torch.tensor([[3, 5, 8]])
    with torch.no_grad():
        assert torch.equal(copied.base_model(ids).last_hidden_state, fresh.base_model(ids).last_hidden_state)
        assert torch.allclose(copied(ids).logits, copied.lm_head(copied.base_model(ids).last_hidden_state))


@pytest.mark.parametrize(
    ("typed", "modules"),
    [
        (["q_proj", "v_proj"], ["q_proj", "v_proj"]), (["q_proj,v_proj", ","], ["q_proj", "v_proj"]),
        (["all-linear"], "all-linear"), ([r".*layers\.\d{1,2}\.q_proj"], r".*layers\.\d{1,2}\.q_proj"),
    ],
    ids=str,
)  # fmt: skip
def test_commas_are_separators(typed, modules):
    (model,) = parse((ModelConfig,), "train", ["--use_peft", "--lora_target_modules", *typed])
    separate_lora_modules(model)
    assert model.lora_target_modules == modules


def test_a_target_without_a_module_is_refused(text_trainer):
    names = r"down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
    refusal = f"No module of Qwen2ForCausalLM is named q_porj, .*linear modules are {names}"
    with pytest.raises(ConfigError, match=refusal):
        text_trainer(peft_config=LoraConfig(r=2, target_modules=["q_porj", "v_proj"]))


@pytest.mark.parametrize("kind", [PrefixTuningConfig, PromptTuningConfig])
def test_virtual_tokens_that_generation_would_lose_are_refused(kind, text_trainer, monkeypatch):
    monkeypatch.setattr(options, "version", {"transformers": "5.24.0", "peft": "0.21.2", "trl": "1.16.0"}.__getitem__)
    with pytest.raises(ConfigError, match="virtual tokens"):
        text_trainer(peft_config=kind(task_type="CAUSAL_LM", num_virtual_tokens=3))


def test_a_comma_behind_a_target_is_dropped(text_trainer):
    """The shell leaves one in the commands of TRL's scripts: --lora_target_modules "q_proj", "v_proj"."""
    trainer = text_trainer(peft_config=LoraConfig(r=2, target_modules=["q_proj,", "v_proj"]))
    adapted = {name.split(".")[-1] for name in trainer.model.base_model.targeted_module_names}
    assert adapted == {"q_proj", "v_proj"}


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_model_of_which_nothing_is_trained_is_refused(vision_trainer, model_folder, tmp_path, beta):
    """TRL makes a copy of a loaded adapter as the reference, which is trainable."""
    get_peft_model(tiny_model(model_folder), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "a")

    def load(**options):
        return PeftModel.from_pretrained(tiny_model(model_folder), tmp_path / "a", **options)

    for frozen in (load(), tiny_model(model_folder).requires_grad_(False)):
        with pytest.raises(ConfigError, match=r"No weight of .* requires a gradient: .*is_trainable=True"):
            vision_trainer(model=frozen, beta=beta)
    trainer = vision_trainer(model=load(is_trainable=True), beta=beta, max_steps=1)
    before = [weight.detach().clone() for weight in trainer.model.parameters() if weight.requires_grad]
    trainer.train()
    after = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    assert any((one != two).any() for one, two in zip(before, after, strict=True))
