"""How long the prompt of a row is for a model."""

from collections.abc import Mapping
from typing import Any

from transformers import ProcessorMixin
from trl.data_utils import prepare_multimodal_messages

from vgr_trl.data.rows.columns import images_of
from vgr_trl.errors import ConfigError


def prompt_tokens(processor: Any, row: Mapping[str, Any]) -> int:
    """Return the tokens of a ready row's prompt as the trainer counts them, image tokens included.

    Args:
        processor: of the model, or its tokenizer for text alone.
        row: with `prompt`, and decoded images if any.

    Raises:
        ConfigError: the row has images, and `processor` is a tokenizer.
    """
    prompt, images = row["prompt"], images_of(row)
    is_processor = isinstance(processor, ProcessorMixin)
    if images and not is_processor:
        raise ConfigError(
            f"The data have images, but {type(processor).__name__} reads text only: name a vision-language model."
        )
    if isinstance(prompt, str):
        return len((processor(text=[prompt]) if is_processor else processor([prompt]))["input_ids"][0])
    messages = prepare_multimodal_messages(prompt, images=images or None) if is_processor else prompt
    tokens = processor.apply_chat_template(
        conversation=[messages], add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return len(tokens["input_ids"][0])
