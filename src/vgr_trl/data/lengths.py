"""Prompt lengths in tokens, image tokens included, without decoding an image."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from datasets.fingerprint import Hasher
from PIL import Image
from transformers import ProcessorMixin
from trl.data_utils import prepare_multimodal_messages

from vgr_trl.data.images import Size, image_size, images_of
from vgr_trl.data.prompts import limited
from vgr_trl.errors import ConfigError, DataError, error_text

SIZES = "__sizes__"  # column: (width, height) of a row's images and frames in the size that the model gets
PROBES = ((640, 480), (300, 500), (1300, 900))  # sizes with which a processor's own count is compared
QUESTION = [{"role": "user", "content": "What is shown?"}]


def image_sizes_of(row: Mapping[str, Any]) -> list[Size]:
    """Return (width, height) of the images of a row, from the column that `prepare_rows` adds or from headers."""
    if row.get(SIZES) is not None:
        return [(width, height) for width, height in row[SIZES]]
    return [image_size(value) for value in images_of(row)]


def require_ending_template(processor: Any, template: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the chat template of a processor or tokenizer computes for too long on a question."""
    with limited(f"The chat template of {type(processor).__name__}"), suppress(Exception):  # which its use reports
        processor.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False, **template)


class PromptLengths:
    """Count the tokens of prompts as TRL tokenizes them.

    The number of an image's tokens is a function of its size, which transformers has for most families. The markers
    around images are found by comparing with the processor's own count on blank images. Where the two do not differ by
    a constant, or there is no such function, a blank image of each size is processed once.

    Args:
        processor: of the model, or its tokenizer for text alone.
        template: further arguments of `apply_chat_template`.
    """

    def __init__(self, processor: Any, **template: Any) -> None:
        require_ending_template(processor, template)
        self.processor, self.template = processor, template
        self.reads_images = isinstance(processor, ProcessorMixin)
        self.tokenizer: Any = processor.tokenizer if isinstance(processor, ProcessorMixin) else processor
        self._processed: dict[tuple[Size, ...], int] = {}
        self._by_size: dict[Size, int] = {}
        self._markers = self._calibrate() if self.reads_images else None
        # Whether blank images are processed, which must not happen in a forked process: torch may hang there.
        self.needs_pixels = self.reads_images and self._markers is None

    @property
    def key(self) -> str:
        """A hash of the processor and the template, on which lengths depend besides the rows."""
        images = getattr(self.processor, "image_processor", None)
        about = [type(self.processor).__name__, self.tokenizer.get_vocab(), images and images.to_dict()]
        about += [getattr(each, "chat_template", None) for each in (self.processor, self.tokenizer)]
        return str(Hasher.hash([json.dumps(about, sort_keys=True, default=str), self.template]))

    def __call__(self, row: Mapping[str, Any]) -> int:
        """Return the number of tokens of a row's `prompt`, which has placeholders for its images.

        Raises:
            ConfigError: the row has images, and there is a tokenizer only.
            DataError: the chat template refuses the prompt.
        """
        prompt, sizes = row["prompt"], image_sizes_of(row)
        if sizes and not self.reads_images:
            raise ConfigError(f"The data have images, but {type(self.processor).__name__} reads text only.")
        try:
            if not sizes:
                return self._processor_count(prompt, [])
            return self._text_tokens(prompt, len(sizes)) + self.image_tokens(sizes)
        except Exception as error:  # templates and processors raise whatever a prompt leads them to
            raise DataError(f"the model's processor refuses its prompt ({error_text(error)})") from error

    def image_tokens(self, sizes: Sequence[Size]) -> int:
        """Return the number of tokens that images of these sizes add to a prompt with a placeholder for each."""
        if self._markers is None:
            return self._processed_tokens(tuple(sizes))
        per_image, per_prompt = self._markers
        return self._counted(sizes) + per_image * len(sizes) + per_prompt

    def _calibrate(self) -> tuple[int, int] | None:
        """Return the number of marker tokens per image and per prompt, or None if sizes do not give the count."""
        one, two, three = PROBES
        try:
            (single,) = {self._processed_tokens((size,)) - self._counted([size]) for size in PROBES}
        except Exception:  # no such function, or not a constant
            return None
        try:
            pairs = {self._processed_tokens(pair) - self._counted(pair) for pair in ((one, two), (three, one))}
        except Exception:  # a model of one image
            return single, 0
        return (max(pairs) - single, 2 * single - max(pairs)) if len(pairs) == 1 else None

    def _processed_tokens(self, sizes: tuple[Size, ...]) -> int:
        if sizes not in self._processed:
            blank = [Image.new("RGB", size) for size in sizes]
            self._processed[sizes] = self._processor_count(QUESTION, blank) - self._text_tokens(QUESTION, len(sizes))
        return self._processed[sizes]

    def _counted(self, sizes: Sequence[Size]) -> int:
        for width, height in {*sizes} - self._by_size.keys():
            if hasattr(self.processor, "_get_num_multimodal_tokens"):
                found = self.processor._get_num_multimodal_tokens(image_sizes=[(height, width)]).num_image_tokens[0]
            else:  # PaddleOCR-VL and relatives of Qwen2-VL
                images = self.processor.image_processor
                found = images.get_number_of_image_patches(height, width, {}) // images.merge_size**2
            self._by_size[width, height] = int(found)
        return sum(self._by_size[size] for size in sizes)

    def _processor_count(self, prompt: Any, images: Sequence[Image.Image]) -> int:
        """Return the number of tokens of a prompt by calling the processor as TRL does."""
        if isinstance(prompt, str):
            return len(self.processor(text=[prompt])["input_ids"][0])
        messages = prepare_multimodal_messages(prompt, list(images)) if self.reads_images else prompt
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, **self.template}
        return len(self.processor.apply_chat_template(conversation=[messages], **options)["input_ids"][0])

    def _text_tokens(self, prompt: Any, images: int) -> int:
        """Return the number of tokens of a conversation's text with a placeholder for each image."""
        messages = prepare_multimodal_messages(prompt, [Image.new("RGB", (1, 1))] * images)
        options = {"add_generation_prompt": True, "tokenize": False, **self.template}
        (text,) = self.processor.apply_chat_template(conversation=[messages], **options)
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def refuse_single_image_models(processor: Any) -> None:
    """Raise `ConfigError` if a processor ignores the second of two images; a failing processor raises its own error."""
    lengths, blank = PromptLengths(processor), Image.new("RGB", PROBES[0])
    if lengths._processor_count(QUESTION, [blank] * 2) <= lengths._processor_count(QUESTION, [blank]):
        name = type(processor).__name__
        raise ConfigError(f"{name} reads one image per prompt, but a video becomes several: use another model.")
