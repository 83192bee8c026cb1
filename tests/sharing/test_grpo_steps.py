"""Three optimizer steps with shared prompts are three steps of TRL's GRPOTrainer."""

import copy
import random
from contextlib import nullcontext

import pytest
import torch
from datasets import Dataset
from families import build as build_model
from peft import LoraConfig
from PIL import Image
from sharing_trainer import SharingTrainer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from vgr_trl.demo.tiny_vlm import build_tiny_vlm
from vgr_trl.sharing import share_prompts

# TRL 1.16 switches checkpointing off around a rollout by the old name of the method.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_(en|dis)able` is deprecated:FutureWarning")

WORDS = "what colour is this red green blue yellow which of them do you see here now and there"


def uneven_reward(completion_ids, **kwargs):
    """Another value for nearly every completion, so that no group is dead."""
    return [sum(ids) % 17 / 17 for ids in completion_ids]


def options(tmp_path, **changed):
    defaults = {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 3,
        "learning_rate": 0.2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e9,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 7,
        "temperature": 3.0,
    }
    return {**defaults, **changed}


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    model, processor = build_tiny_vlm([WORDS], hidden_size=32, num_layers=2, num_heads=2)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            scale = 0.5 if "embed" in name else parameter[0].numel() ** -0.5
            parameter.data = torch.randn(parameter.shape, generator=generator) * scale
    folder = tmp_path_factory.mktemp("model")  # TRL loads its reference model from where the policy comes from
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder), processor


def picture(seed, width=56):
    noise = random.Random(seed).randbytes(width * 56 * 3)
    return Image.frombytes("RGB", (width, 56), noise)


@pytest.fixture(scope="module")
def image_rows():
    """Prompts of unequal length; two images in every third."""
    draw = random.Random(3)
    prompts, images = [], []
    for number in range(8):
        text = " ".join(draw.choices(WORDS.split(), k=draw.randint(24, 40)))
        prompts.append([{"role": "user", "content": text}])
        images.append([picture(number), *([picture(number + 50, 84)] if number % 3 == 0 else [])])
    return Dataset.from_dict({"prompt": prompts, "images": images})


def trained(trainer_class, config_class, model, processor, rows, settings, shared=False, **more):
    # Few tokens to choose from, so that completions end at different lengths.
    tokenizer = getattr(processor, "tokenizer", processor)
    allowed = {tokenizer.eos_token_id, *tokenizer(WORDS)["input_ids"][:6]}
    others = sorted(set(range(len(tokenizer))) - allowed)
    settings = {**settings, "generation_kwargs": {"suppress_tokens": others}}
    trainer = trainer_class(
        model=copy.deepcopy(model),
        reward_funcs=uneven_reward,
        args=config_class(**settings),
        train_dataset=rows,
        processing_class=processor,
        **more,
    )
    with share_prompts(trainer.model) if shared else nullcontext() as report:
        trainer.train()
    trainer.report = report
    return trainer


def texts_of(trainer):
    return [completion[0]["content"] for completion in trainer._logs["completion"]]


def largest_relative_update(start, ours, theirs):
    """Largest difference of any two weights, relative to the largest update of any weight."""
    start, mine = dict(start.named_parameters()), dict(ours.model.named_parameters())
    update, difference = 0.0, 0.0
    for name, other in theirs.model.named_parameters():
        before = start.get(name.replace("base_model.model.", "").replace(".base_layer", ""), other)
        if "lora_B" in name:
            before = torch.zeros_like(other)
        update = max(update, float((other - before).detach().abs().max()))
        difference = max(difference, float((mine[name] - other).detach().abs().max()))
    assert update > 0
    return difference / update


TWICE = {"num_iterations": 2}  # the second time the policy is not the one that wrote the completions
CASES = {
    "dapo": {},
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dapo twice": TWICE,
    "grpo twice": {"loss_type": "grpo", **TWICE},
    "cispo twice": {"loss_type": "cispo", "epsilon_high": 5.0, **TWICE},
    "sapo twice": {"loss_type": "sapo", **TWICE},
    "vespo twice": {"loss_type": "vespo", **TWICE},
    "luspo twice": {"loss_type": "luspo", "importance_sampling_level": "sequence", **TWICE},
    "entropy bonus": {"entropy_coef": 0.1},
    "entropy quantile": {"top_entropy_quantile": 0.5},
    "checkpointing": {"gradient_checkpointing": True},
    "reference": {"beta": 0.1},
    "truncated completions masked": {"mask_truncated_completions": True},
    "padded to a multiple": {"pad_to_multiple_of": 16},
    "straddling": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "several steps per rollout": {"gradient_accumulation_steps": 1, "steps_per_generation": 2},
}
NOT_REGROUPED = ("bnpo", "entropy bonus", "entropy quantile", "several steps per rollout")


@pytest.mark.parametrize("case", CASES)
def test_steps_equal_stock_trl(case, vision, image_rows, tmp_path):
    model, processor = vision
    settings = options(tmp_path, **CASES[case])
    stock = trained(GRPOTrainer, GRPOConfig, model, processor, image_rows, settings)
    ours = trained(SharingTrainer, GRPOConfig, model, processor, image_rows, settings)
    assert texts_of(ours) == texts_of(stock)
    assert largest_relative_update(model, ours, stock) < 1e-5
    assert ours.generation_report.prompts_per_row == 1 / 4
    assert ours.regroups == (case not in NOT_REGROUPED)
    if ours.regroups:
        expected = 1 / 2 if case == "straddling" else 1 / 4
        assert ours.training_report.prompts_per_row == expected
        assert not ours.training_report.plain
    if case == "reference" or "twice" in case:
        assert ours.scoring_report.prompts_per_row == 1 / 4


@pytest.mark.parametrize("changed", [{}, {"beta": 0.1, "gradient_checkpointing": True}], ids=["plain", "reference"])
def test_steps_of_an_adapter_equal_stock_trl(changed, vision, image_rows, tmp_path):
    """The reference is the model without its adapter: its prompts must not come from the adapter's pass."""
    model, processor = vision
    settings = options(tmp_path, learning_rate=0.5, **changed)
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    stock = trained(GRPOTrainer, GRPOConfig, model, processor, image_rows, settings, peft_config=LoraConfig(**lora))
    ours = trained(SharingTrainer, GRPOConfig, model, processor, image_rows, settings, peft_config=LoraConfig(**lora))
    assert texts_of(ours) == texts_of(stock)
    assert largest_relative_update(model, ours, stock) < 1e-5
    assert ours.training_report.prompts_per_row == 1 / 4
    assert not ours.training_report.plain


def test_regrouping_a_loss_that_divides_by_the_micro_batch_changes_the_step(vision, image_rows, tmp_path):
    model, processor = vision
    settings = options(tmp_path, loss_type="bnpo")
    stock = trained(GRPOTrainer, GRPOConfig, model, processor, image_rows, settings)
    ours = trained(SharingTrainer, GRPOConfig, model, processor, image_rows, settings, regroup=True)
    assert largest_relative_update(model, ours, stock) > 1e-3


@pytest.mark.parametrize(
    ("trainer_class", "config_class"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)], ids=["grpo", "rloo"]
)
def test_two_lines_share_prompts_in_trainers_of_trl(trainer_class, config_class, vision, image_rows, tmp_path):
    model, processor = vision
    settings = options(tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=1)

    stock = trained(trainer_class, config_class, model, processor, image_rows, settings)
    ours = trained(trainer_class, config_class, model, processor, image_rows, settings, shared=True)
    assert texts_of(ours) == texts_of(stock)
    assert largest_relative_update(model, ours, stock) < 1e-5
    assert ours.report.prompts_per_row < 0.3
    assert not ours.report.plain


def test_a_text_model(text_tokenizer, tmp_path):
    """No images, prompts of unequal length."""
    model = build_model("qwen3")
    rows = Dataset.from_dict({"prompt": [" ".join(["red blue green teal"] * (6 + n % 3)) + " A" * n for n in range(8)]})
    settings = options(tmp_path, learning_rate=1.0)
    stock = trained(GRPOTrainer, GRPOConfig, model, text_tokenizer, rows, settings)
    ours = trained(SharingTrainer, GRPOConfig, model, text_tokenizer, rows, settings)
    assert list(ours._logs["completion"]) == list(stock._logs["completion"])
    assert largest_relative_update(model, ours, stock) < 1e-5
    assert ours.training_report.prompts_per_row == 1 / 4
