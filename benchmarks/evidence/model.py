"""SmolLM2-135M-Instruct behind a small, untrained vision tower, as SmolVLM has it; questions and answers in words."""

import random
from pathlib import Path
from typing import Any

import torch
from mosaics.task import Row
from teacher.runs import Settings, Start
from teacher.task import ANSWER, SIDE, Example, crop, draw_rows
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Idefics3Processor,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from trl.data_utils import prepare_multimodal_messages

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
QUESTIONS = (
    "Which digit is hidden in the noise?",
    "Somewhere in this picture stands a handwritten digit. Which one is it?",
    "Look closely: what number was written here?",
    "Tell me the digit that you see in the image.",
)
PROMPT = "{} Say in a sentence what you see, then give the digit between <answer> and </answer>."
REPLY = "I see a handwritten {}. " + ANSWER
PATCH = 4  # pixels; a patch is an image token
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")


def load_language_model(folder: Path) -> tuple[Any, Any]:
    """Return SmolLM2 and its tokenizer of the GGUF file in `folder` (`make evidence-model`)."""
    (file,) = folder.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32), tokenizer


def build_model(seed: int, folder: Path) -> tuple[Any, Any]:
    """Return a SmolVLM with SmolLM2's weights and an untrained tower, and its processor."""
    language, tokenizer = load_language_model(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [*MARKS]})
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.chat_template = TEMPLATE
    language.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    image_token = tokenizer.convert_tokens_to_ids(MARKS[0])
    patches = (SIDE // PATCH) ** 2
    tower = {
        "hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 3,
        "image_size": SIDE, "patch_size": PATCH,
    }  # fmt: skip
    config = SmolVLMConfig(
        text_config=language.config.to_dict(),
        vision_config=tower,
        scale_factor=1,
        image_token_id=image_token,
        tie_word_embeddings=True,
    )
    config.pad_token_id = tokenizer.pad_token_id
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model: Any = SmolVLMForConditionalGeneration(config)
    model.model.text_model.load_state_dict(language.model.state_dict())
    model.tie_weights()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    side = {"longest_edge": SIDE}
    images = Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    # SmolVLM's own processor reads videos, for which it needs torchvision; the tokens of an image are Idefics 3's.
    return model, Idefics3Processor(images, tokenizer, image_seq_len=patches, chat_template=TEMPLATE)


def in_words(row: Row, rng: random.Random) -> Row:
    """Return a row that asks its question in words."""
    return row | {"prompt": [{"role": "user", "content": PROMPT.format(rng.choice(QUESTIONS))}]}


def reply(row: Row, image: Any, digit: str) -> Example:
    """Return the question about an image, and an answer in words."""
    return [*row["prompt"], {"role": "assistant", "content": REPLY.format(WORDS[int(digit)], digit)}], [image]


class WordyStart(Start):
    """A language model that reads crops and says what it reads; every method starts from a copy."""

    tokens = 24

    def __init__(self, seed: int, settings: Settings, folder: Path, language: Path, device: str, batch: int) -> None:
        self.language, self.device, self.batch = language, device, batch
        super().__init__(seed, settings, folder)

    def draw_rows(self, count: int, **options: Any) -> list[Row]:
        """Draw pictures with questions in words."""
        rng = random.Random(f"words {options}")
        return [in_words(row, rng) for row in draw_rows(count, **options)]

    def build(self, seed: int) -> tuple[Any, Any]:
        """Return the model on its device, and its processor."""
        model, processor = build_model(seed, self.language)
        return model.to(self.device), processor

    def warm_up(self, rows: list[Row]) -> None:
        """Teach to read crops, and from one whole picture in sixteen the form of an answer."""
        rng = random.Random(self.seed)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.settings.learning_rate, weight_decay=0.01)
        self.model.train()
        for _ in range(self.settings.reading_steps):
            examples = [self.reading(rng.choice(rows), rng) for _ in range(self.batch)]
            loss = self.loss(examples)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()

    def reading(self, row: Row, rng: random.Random) -> Example:
        """Return a crop with its digit or, once in 16, the whole picture with a digit that is right half the time."""
        if rng.random() < 1 / 16:
            return reply(row, row["image"], rng.choice([row["solution"], str(rng.randrange(10))]))
        return reply(row, crop(row), row["solution"])

    def loss(self, examples: list[Example]) -> torch.Tensor:
        """Return the mean loss of the tokens of the answers."""
        pictures = [images for _, images in examples]
        talks = [prepare_multimodal_messages(talk, images=images) for talk, images in examples]
        asked = [self.processor.apply_chat_template(talk[:-1], add_generation_prompt=True) for talk in talks]
        told = [self.processor.apply_chat_template(talk).removesuffix("\n") for talk in talks]
        given = {"images": pictures, "padding": True, "padding_side": "right", "return_tensors": "pt"}
        lengths = self.processor(text=asked, **given)["attention_mask"].sum(1)
        inputs = self.processor(text=told, **given).to(self.device)
        places = torch.arange(inputs["input_ids"].size(1))
        hidden = (places < lengths[:, None]).to(self.device) | (inputs["attention_mask"] == 0)
        loss: torch.Tensor = self.model(**inputs, labels=inputs["input_ids"].masked_fill(hidden, -100)).loss
        return loss

    def label(self, row: Row, rng: random.Random) -> Example:
        """Return the whole picture with its answer in words."""
        return reply(row, row["image"], row["solution"])

    def suppressed(self) -> list[int]:
        """Return the tokens that stand for images."""
        tokens: list[int] = self.processor.tokenizer.convert_tokens_to_ids([*MARKS])
        return tokens
