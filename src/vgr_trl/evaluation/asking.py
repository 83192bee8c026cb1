"""How a question is put to a model, with its images or without."""

from collections.abc import Mapping
from typing import Any

from PIL import Image
from trl.data_utils import prepare_multimodal_messages

from vgr_trl.data.rows.columns import images_of
from vgr_trl.data.rows.text.marks import placed
from vgr_trl.data.rows.text.prompts import build_prompt
from vgr_trl.errors import DataError


def blank_image(image: Image.Image) -> Image.Image:
    """Return a mid-grey RGB image of the same size."""
    return Image.new("RGB", image.size, (128, 128, 128))


def conversation_of(row: Mapping[str, Any], blank_images: bool, system_prompt: str | None) -> Any:
    """Return the prompt of a row, made of its question if it has none; a text stays one.

    Raises:
        DataError: it is a text beside images.
    """
    prompt = row.get("prompt") or build_prompt(row["problem"], row.get("choices"), system_prompt=system_prompt)
    images = images_of(row)
    if not images:
        return prompt
    if isinstance(prompt, str):
        raise DataError("A row with images has a text as its prompt: give a conversation (a list of messages).")
    return prepare_multimodal_messages(
        placed(prompt), images=[blank_image(i) for i in images] if blank_images else images
    )
