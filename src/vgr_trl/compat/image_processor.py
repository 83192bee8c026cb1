"""A processor of Qwen2.5-VL for images alone: transformers 5.23 cannot make its own where there is no torchvision.

Its video processor needs one (`VIDEO_PROCESSOR_MAPPING has no attribute '_extra_content'`), and `AutoProcessor` cannot
load a class that it does not know. Removable once the stock class can be made without videos.
"""

import json
from pathlib import Path
from typing import Any

from transformers import Qwen2_5_VLProcessor


class TinyProcessor(Qwen2_5_VLProcessor):
    """Qwen2.5-VL's processor without videos, whose processor needs torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


def load_processor(path: str | Path) -> TinyProcessor | None:
    """Return the processor saved in the folder `path`, or None if that is not a folder with a `TinyProcessor`."""
    file = Path(path) / "processor_config.json"
    if not file.is_file():
        return None
    if json.loads(file.read_text(encoding="utf-8")).get("processor_class") != TinyProcessor.__name__:
        return None
    return TinyProcessor.from_pretrained(path)
