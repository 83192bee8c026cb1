import random

import pytest
import torch
from datasets import Dataset
from PIL import Image

from vgr_trl.demo.tiny_model import build_tiny_vlm

WORDS = "what colour is this red green blue yellow which of them do you see here now and there"


def made_vision(folder):
    model, processor = build_tiny_vlm([WORDS], hidden_size=32, num_layers=2, num_heads=2)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            scale = 0.5 if "embed" in name else parameter[0].numel() ** -0.5
            parameter.data = torch.randn(parameter.shape, generator=generator) * scale
    model.save_pretrained(folder)  # TRL loads its reference model from where the policy comes from
    return type(model).from_pretrained(folder), processor


@pytest.fixture(scope="session")
def vision(tmp_path_factory):
    return made_vision(tmp_path_factory.mktemp("model"))


def picture(seed, width=56):
    noise = random.Random(seed).randbytes(width * 56 * 3)
    return Image.frombytes("RGB", (width, 56), noise)


def questions(images_of):
    """Prompts of unequal length; `images_of` gives the images of each by its number."""
    draw = random.Random(3)
    texts = [" ".join(draw.choices(WORDS.split(), k=draw.randint(24, 40))) for _ in range(8)]
    prompts = [[{"role": "user", "content": text}] for text in texts]
    return Dataset.from_dict({"prompt": prompts, "images": [images_of(number) for number in range(8)]})


@pytest.fixture(scope="session")
def image_rows():
    return questions(lambda number: [picture(number), *([picture(number + 50, 84)] if number % 3 == 0 else [])])
