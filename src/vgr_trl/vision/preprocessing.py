"""Process equal images once; TRL has its processor make the pixel inputs of every completion, and twice."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import xxhash
from PIL import Image
from transformers import BatchFeature

from vgr_trl.pixels import (
    IMAGE_INPUTS,
    image_inputs_of,
    stack_images,
)
from vgr_trl.utils import patched_method

# Outputs of transformers' processors beside pixel inputs: one entry per image, or per row of images.
_LISTED = {"num_patches", "num_crops", "num_soft_tokens_per_image", "rows", "cols"}
_EXACT = "transformers.models."  # packages whose processors are deterministic


@contextmanager
def images_processed_once(processor: Any) -> Iterator[None]:
    """Memoise image preprocessing in this block: equal rows of images are processed once.

    Outputs are unchanged, but always tensors. Only lists of Pillow images are memoised, and only by processors of
    transformers.

    Args:
        processor: of prompts; it may have no image processor.
    """
    images: Any = getattr(processor, "image_processor", None)
    if not type(images).__module__.startswith(_EXACT):
        yield
        return
    with patched_method(images, "preprocess", _ProcessedOnce(images, images.preprocess)):
        yield


@dataclass
class _ProcessedOnce:
    """An image processor's `preprocess` with a memory of the outputs of each row of images."""

    processor: Any
    plain: Callable[..., Any]
    _known: dict[Hashable, dict[str, Any]] = field(default_factory=dict)

    def __call__(self, images: Any, *args: Any, **options: Any) -> Any:
        as_tensors = not args and options.get("return_tensors") in (None, "pt")
        keys = _make_keys(images) if as_tensors else None
        if keys is None:
            return self.plain(images, *args, **options)
        asked = options | {"return_tensors": "pt"}
        changed = [f"{name}={value}" for name, value in asked.items() if value != getattr(self.processor, name, None)]
        calls = [(*sorted(changed), key) for key in keys]
        if (call := tuple(calls)) not in self._known:
            self._known[call] = self._combine_outputs(images, calls, asked)
        return BatchFeature(dict(self._known[call]))

    def _combine_outputs(self, images: list[Any], calls: Sequence[Hashable], options: dict[str, Any]) -> dict[str, Any]:
        """Combine the outputs of the rows, or process all rows at once if the outputs have an unknown layout."""
        for call, row in zip(calls, images, strict=True):
            if row and call not in self._known:
                self._known[call] = dict(self.plain([row], **options))
        rows = [self._known[call] if row else {} for call, row in zip(calls, images, strict=True)]
        first = next(filter(None, rows))
        one_per_row = "pixel_attention_mask" in first and not all(rows)  # which rows without images have too
        if one_per_row or first.keys() - {*IMAGE_INPUTS, *_LISTED}:
            return dict(self.plain(images, **options))
        joined: dict[str, Any] = stack_images([image_inputs_of(row) for row in rows], one_per_row=False)
        for name in first.keys() - joined.keys():
            values = [row[name] for row in rows if row]
            tensors = isinstance(values[0], torch.Tensor)
            joined[name] = torch.cat(values) if tensors else list(chain.from_iterable(values))
        return joined


def _make_keys(images: Any) -> list[Hashable] | None:
    """Return a hashable key for each row of images; None unless all rows are lists of images without palettes."""
    if not isinstance(images, list) or not all(isinstance(row, list) for row in images):
        return None
    flat = {id(image): image for row in images for image in row}
    if not flat or not all(isinstance(image, Image.Image) and image.palette is None for image in flat.values()):
        return None
    known = {number: _make_key(image) for number, image in flat.items()}
    return [tuple(known[id(image)] for image in row) for row in images]


def _make_key(image: Image.Image) -> Hashable:
    transparency = str(image.info.get("transparency"))
    return image.mode, image.size, transparency, xxhash.xxh3_128_digest(image.tobytes())
