from pathlib import Path

import pytest
import yaml
from peft import LoraConfig
from support.models.tiny_questions import picture, questions
from support.steps import DAPO, LOSSES, ROUNDING, STOCK, assert_same_steps, options, trained
from support.trainers import logged
from support.vllm import in_place_of_vllm

# TRL 1.16 switches checkpointing off around a rollout by the old name of the method.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_(en|dis)able` is deprecated:FutureWarning")
TWICE = {"num_iterations": 2}  # the second time the policy is not the one that wrote the completions
STRADDLING = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
TABLE = yaml.safe_load(Path(__file__).with_name("steps.yaml").read_text(encoding="utf-8"))
CASES, OURS_ALONE = TABLE["other options"], TABLE["ours alone"]
NOT_REGROUPED = ["entropy quantile", "several steps per rollout"]


def stock_and_ours(vision, rows, settings, lora=None, **ours_only):
    model, processor = vision
    peft = [{} if lora is None else {"peft_config": LoraConfig(**LORA, **lora)} for _ in range(2)]
    settings = {"epsilon_high": 0.28, **settings}
    stock = trained(STOCK, model, processor, rows, settings, **peft[0])
    ours = trained(DAPO, model, processor, rows, {**settings, **ours_only}, **peft[1])
    return stock, ours


def assert_equal_steps(vision, stock, ours):
    assert_same_steps(vision[0], ours, stock)
    assert ours.places["generation"].prompts_per_row == 1 / 4


@pytest.mark.parametrize("loss", LOSSES)
def test_steps_of_every_loss(loss, vision, image_rows, tmp_path):
    """All weights trained, two iterations: old log-probabilities are scored, and ratios differ from 1."""
    stock, ours = stock_and_ours(vision, image_rows, options(tmp_path, **LOSSES[loss], **TWICE))
    assert_equal_steps(vision, stock, ours)
    assert ours.places["scoring"].prompts_per_row == 1 / 4
    assert ours.run.features.regroup.enabled == (loss != "bnpo")
    if ours.run.features.regroup.enabled:
        assert ours.places["training"].prompts_per_row == 1 / 4
        assert logged(ours, "sharing/prompts_per_row") == [1 / 4] * 3


@pytest.mark.parametrize("loss", LOSSES)
def test_steps_of_an_adapter_with_a_reference_in_small_checkpointed_micro_batches(loss, vision, image_rows, tmp_path):
    """The reference is the model without its adapter."""
    settings = options(tmp_path, **LOSSES[loss], **STRADDLING, beta=0.1, gradient_checkpointing=True, learning_rate=0.5)
    stock, ours = stock_and_ours(vision, image_rows, settings, lora={}, rows_per_pass="off")
    assert_equal_steps(vision, stock, ours)
    assert ours.places["scoring"].prompts_per_row == 1 / 4
    assert ours.places["training"].rows > 0


@pytest.mark.parametrize("case", CASES)
def test_steps_with_other_options(case, vision, image_rows, tmp_path):
    stock, ours = stock_and_ours(vision, image_rows, options(tmp_path, **CASES[case]), skip_zero_advantage="off")
    assert_equal_steps(vision, stock, ours)
    assert ours.run.features.regroup.enabled == (case not in NOT_REGROUPED)
    if ours.run.features.regroup.enabled:
        assert ours.places["training"].prompts_per_row == 1 / 4


@pytest.mark.parametrize("case", OURS_ALONE)
def test_micro_batches_of_one_completion_with_what_stock_trl_lacks(case, vision, image_rows, tmp_path):
    """Against plain passes of this library."""
    model, processor = vision
    if case.startswith("rows without an image"):
        image_rows = questions(lambda number: [picture(number)] if number % 2 else [])
    size = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8} | OURS_ALONE[case]
    size["gradient_accumulation_steps"] //= size["per_device_train_batch_size"]
    settings = options(tmp_path, **size, epsilon_high=0.28, gradient_checkpointing=True)
    plain = trained(DAPO, model, processor, image_rows, {**settings, "share_prompts": "off"})
    shared = trained(DAPO, model, processor, image_rows, {**settings, "rows_per_pass": "off"})
    assert_same_steps(model, shared, plain, 5e-2 if case == "bf16" else ROUNDING)
    assert shared.places["training"].rows > 0


def test_passes_are_shared_whatever_wrote_the_completions(vision, image_rows, tmp_path, monkeypatch):
    """vLLM's log-probabilities are corrected by those of a scoring pass, which shares prompts as any other does."""
    in_place_of_vllm(monkeypatch, lengths=(4, 9), stock=True)
    stock, ours = stock_and_ours(vision, image_rows, options(tmp_path, use_vllm=True))
    assert_same_steps(vision[0], ours, stock)
    assert str(ours.run.features.share_generation) == "off (vLLM shares prompts itself)"
    assert ours.places["generation"].rows == 0
    assert ours.places["scoring"].prompts_per_row == ours.places["training"].prompts_per_row == 1 / 4
    ratios = [entry["sampling/importance_sampling_ratio/mean"] for entry in ours.state.log_history[:-1]]
    assert all(ratio != 1 for ratio in ratios)
