"""Training for a few optimizer steps, and what two trainings have in common."""

import copy
import random
from contextlib import contextmanager

import torch
from datasets import Dataset
from PIL import Image
from trl import GRPOConfig, GRPOTrainer

from vgr_trl import DAPOConfig, DAPOTrainer
from vgr_trl.demo.tiny_vlm import build_tiny_vlm
from vgr_trl.sharing import SharingReport, plan, replaced, share_prompts

WORDS = "what colour is this red green blue yellow which of them do you see here now and there"
PLACES = ("generation", "scoring", "training")
DAPO, STOCK = (DAPOTrainer, DAPOConfig), (GRPOTrainer, GRPOConfig)


def tiny_vision_model(folder):
    """A Qwen2.5-VL with weights of a sensible size, and its processor."""
    model, processor = build_tiny_vlm([WORDS], hidden_size=32, num_layers=2, num_heads=2)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            scale = 0.5 if "embed" in name else parameter[0].numel() ** -0.5
            parameter.data = torch.randn(parameter.shape, generator=generator) * scale
    model.save_pretrained(folder)  # TRL loads its reference model from where the policy comes from
    return type(model).from_pretrained(folder), processor


def picture(seed, width=56):
    noise = random.Random(seed).randbytes(width * 56 * 3)
    return Image.frombytes("RGB", (width, 56), noise)


def questions(images_of):
    """Prompts of unequal length; `images_of` gives the images of each by its number."""
    draw = random.Random(3)
    texts = [" ".join(draw.choices(WORDS.split(), k=draw.randint(24, 40))) for _ in range(8)]
    prompts = [[{"role": "user", "content": text}] for text in texts]
    return Dataset.from_dict({"prompt": prompts, "images": [images_of(number) for number in range(8)]})


def image_questions():
    """Two images in every third row."""
    return questions(lambda number: [picture(number), *([picture(number + 50, 84)] if number % 3 == 0 else [])])


def uneven_reward(completion_ids, **kwargs):
    """Another value for nearly every completion, so that no group is dead."""
    return [sum(ids) % 17 / 17 for ids in completion_ids]


def options(folder, **changed):
    """Three steps of SGD in float32 over two prompts with four completions each."""
    defaults = {
        "output_dir": str(folder),
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


def build_trainer(classes, model, processor, rows, settings, **more):
    """A trainer, of classes (trainer, config), with few tokens to choose from: completions end at different lengths."""
    trainer_class, config_class = classes
    tokenizer = getattr(processor, "tokenizer", processor)
    allowed = {tokenizer.eos_token_id, *tokenizer(WORDS)["input_ids"][:6]}
    others = sorted(set(range(len(tokenizer))) - allowed)
    return trainer_class(
        model=copy.deepcopy(model),
        reward_funcs=uneven_reward,
        args=config_class(**settings, generation_kwargs={"suppress_tokens": others}),
        train_dataset=rows,
        processing_class=processor,
        **more,
    )


def trained(classes, model, processor, rows, settings, **more):
    """The trainer after its steps; `trainer.places` has the reports of `DAPOTrainer`."""
    trainer = build_trainer(classes, model, processor, rows, settings, **more)
    with reports_by_place() as trainer.places:
        trainer.train()
    return trainer


@contextmanager
def reports_by_place():
    """What `DAPOTrainer` shares meanwhile, in generation, scoring and training."""
    found = {place: SharingReport() for place in PLACES}

    @contextmanager
    def recording(model, completion_length=None, **more):
        place = "generation" if completion_length is None else "training" if torch.is_grad_enabled() else "scoring"
        with share_prompts(model, completion_length, **more) as report:
            yield report
        found[place].add(report)

    with replaced(plan, "share_prompts", recording):
        yield found


def texts_of(trainer):
    """The completions of the latest rollouts."""
    return [item if isinstance(item, str) else item[0]["content"] for item in trainer._logs["completion"]]


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
