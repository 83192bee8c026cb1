"""LoRA targets as users type them, and targets that no module has."""

import pytest
from peft import LoraConfig
from trl import ModelConfig

from vgr_trl.cli.arguments import parse
from vgr_trl.cli.train import separate_lora_modules
from vgr_trl.utils import ConfigError


@pytest.mark.parametrize(
    ("typed", "modules"),
    [
        (["q_proj", "v_proj"], ["q_proj", "v_proj"]),
        (["q_proj,v_proj", ","], ["q_proj", "v_proj"]),
        (["all-linear"], "all-linear"),
        ([r".*layers\.\d{1,2}\.q_proj"], r".*layers\.\d{1,2}\.q_proj"),
    ],
    ids=str,
)
def test_commas_are_separators(typed, modules):
    (model,) = parse((ModelConfig,), "train", ["--use_peft", "--lora_target_modules", *typed])
    separate_lora_modules(model)
    assert model.lora_target_modules == modules


def test_a_target_without_a_module_is_refused(text_trainer):
    names = r"down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
    refusal = f"No module of Qwen2ForCausalLM is named q_porj, .*linear modules are {names}"
    with pytest.raises(ConfigError, match=refusal):
        text_trainer(peft_config=LoraConfig(r=2, target_modules=["q_porj", "v_proj"]))
