from functools import partial
from types import SimpleNamespace

import pytest
from datasets import Dataset
from PIL import Image
from support.models.processors import PROCESSORS
from trl import GRPOTrainer
from trl.data_utils import prepare_multimodal_messages

from vgr_trl.data import prompts
from vgr_trl.data.checked_rows import prompt_lengths
from vgr_trl.data.prompts import SYSTEM_PROMPTS, PromptLengths, build_prompt
from vgr_trl.demo.tiny_model import build_processor
from vgr_trl.errors import ConfigError

SIZES = [(640, 480), (37, 90), (1024, 768), (500, 333), (112, 112), (1600, 200)]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part.type == 'image' %}MARK{% else %}{{ part.text }}{% endif %}{% endfor %}\n{% endfor %}"
)


def trainers_count(processor, row):
    """What the trainer's own tokenization gives with decoded images."""
    trainer = SimpleNamespace(processing_class=processor, _is_vlm=True, environment_factories=None, tools=None)
    trainer.chat_template, trainer.chat_template_kwargs = None, {}
    messages = prepare_multimodal_messages(row["prompt"], row["images"])
    return len(partial(GRPOTrainer._tokenize_prompts, trainer)([messages])[0][0])


def rows_of(counts, system_prompt=None):
    sizes = iter(SIZES * 3)
    for images in counts:
        prompt = build_prompt("what is it?", ["x", "y"], system_prompt=system_prompt)
        yield {"prompt": prompt, "images": [Image.effect_noise(next(sizes), 50).convert("RGB") for _ in range(images)]}


@pytest.mark.parametrize("family", PROCESSORS)
def test_lengths_are_those_of_the_trainer(family):
    processor = PROCESSORS[family]()
    mark = getattr(processor, "boi_token", None) if family == "gemma3" else processor.image_token
    processor.chat_template = TEMPLATE.replace("MARK", mark)
    lengths = PromptLengths(processor)
    assert lengths.needs_pixels == (family == "idefics2"), "which has no function of sizes in transformers"
    for row in rows_of([1] * len(SIZES) + [2, 3]):
        assert lengths(row) == trainers_count(processor, row), [image.size for image in row["images"]]


@pytest.mark.parametrize("system_prompt", [SYSTEM_PROMPTS["zh"], None])
def test_rows_of_a_data_set_with_and_without_images(system_prompt):
    processor = build_processor(["what"])  # whose family has the function of sizes in its image processor alone
    rows, lengths = list(rows_of([0, 1, 3], system_prompt)), PromptLengths(processor)
    assert not lengths.needs_pixels, "one process would count the tokens of all rows"
    counts = prompt_lengths(Dataset.from_list(rows), lengths, "lengths")
    assert counts == [trainers_count(processor, row) for row in rows]


def test_templates_that_do_not_end_are_refused(text_trainer, text_tokenizer, monkeypatch):
    monkeypatch.setattr(prompts, "TEMPLATE_SECONDS", 0.5)
    loops = "{% for _ in range(99999) %}" * 4 + "{% endfor %}" * 4
    monkeypatch.setattr(text_tokenizer, "chat_template", loops)
    own = prompts.PromptTemplate(loops)
    asks = partial(prompts.build_prompt, "what?", system_prompt=own)
    for start in (text_trainer, partial(PromptLengths, text_tokenizer), asks):
        with pytest.raises(ConfigError, match="computes for more than 0.5 s"):
            start()
